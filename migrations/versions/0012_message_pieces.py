"""Pieces of large messages, while they are being written.

A message of many megabytes is sent to the database in pieces, so that no statement is long to encode. The pieces are
joined and deleted in the transaction that writes the message; nobody else ever sees them.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

MESSAGE_PIECES = """
CREATE TABLE message_pieces (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    seq bigint NOT NULL,
    part text NOT NULL,
    number integer NOT NULL,
    content bytea NOT NULL,
    PRIMARY KEY (tenant_id, session_id, seq, part, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"


def upgrade() -> None:
    """Add the table; older code goes on without it."""
    op.execute(MESSAGE_PIECES)
    op.execute("ALTER TABLE message_pieces ALTER COLUMN content SET STORAGE EXTERNAL")
    op.execute("ALTER TABLE message_pieces ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE message_pieces FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON message_pieces USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON message_pieces TO tersely_app")


def downgrade() -> None:
    """Drop the table."""
    op.execute("DROP TABLE message_pieces")
