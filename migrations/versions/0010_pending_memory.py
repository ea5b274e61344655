"""Keep what the daily memory has yet to tell until it is told, whatever becomes of the process that was to do it.

Revision ID: 0010
Revises: 0009
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

# One row for each memory entry that is to be written. ``epoch`` is the epoch with which the messages left the context;
# 0: ``runs`` are the messages, as JSON. From ``due_at`` on any process may write the entry; ``tries`` counts how often
# one has taken the row over.
PENDING_MEMORY = """
CREATE TABLE pending_memory (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    epoch integer NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    runs bytea,
    strategy text NOT NULL,
    dialect text NOT NULL,
    model text NOT NULL,
    due_at timestamptz NOT NULL,
    tries integer NOT NULL DEFAULT 0,
    PRIMARY KEY (tenant_id, session_id, epoch, first_seq, last_seq),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"
# Across tenants a transaction that says so may see the rows, and nothing else.
LISTED = "current_setting('app.list_pending_memory', true) = 'on'"


def upgrade() -> None:
    """Add the table; older code goes on without it."""
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(PENDING_MEMORY)
    op.execute("ALTER TABLE pending_memory ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE pending_memory FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON pending_memory USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute(f"CREATE POLICY listed ON pending_memory FOR SELECT USING ({LISTED})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON pending_memory TO tersely_app")


def downgrade() -> None:
    """Drop the table."""
    op.execute("DROP TABLE pending_memory")
