"""Ids that providers gave to what tenants made under the operator's key, beside the stored replies.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLE = """
CREATE TABLE provider_ids (
    tenant_id text NOT NULL,
    id text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id)
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"


def upgrade() -> None:
    """Create the table; each statement on its own, as a distributed Postgres wants it."""
    op.execute(TABLE)
    op.execute("ALTER TABLE provider_ids ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE provider_ids FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON provider_ids USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON provider_ids TO tersely_app")


def downgrade() -> None:
    """Drop the table."""
    op.execute("DROP TABLE provider_ids")
