"""Provider ids that clients chose go with the sessions of the calls that brought them.

Revision ID: 0021
Revises: 0020
"""

from __future__ import annotations

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE session_provider_ids (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    id text NOT NULL,
    PRIMARY KEY (tenant_id, session_id, id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"


def upgrade() -> None:
    """Add the table; older code goes on without it."""
    op.execute(TABLE)
    op.execute("ALTER TABLE session_provider_ids ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE session_provider_ids FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON session_provider_ids USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON session_provider_ids TO tersely_app")
    op.execute("CREATE INDEX session_provider_ids_id ON session_provider_ids (tenant_id, id)")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP TABLE session_provider_ids")
