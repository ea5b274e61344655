"""How a model's reported tokens relate to the estimates, learnt by one worker and read by all.

Revision ID: 0018
Revises: 0017
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

CALIBRATIONS = """
CREATE TABLE calibrations (
    tenant_id text NOT NULL,
    model text NOT NULL,
    ratio double precision NOT NULL,
    samples bigint NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, model)
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"
# The workers learn from the calls of all tenants: a transaction that says so.
LISTED = "current_setting('app.list_calibrations', true) = 'on'"


def upgrade() -> None:
    """Add the table; older code goes on without it."""
    op.execute(CALIBRATIONS)
    op.execute("CREATE INDEX calibrations_updated ON calibrations (updated_at)")
    op.execute("ALTER TABLE calibrations ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE calibrations FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON calibrations USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute(f"CREATE POLICY listed ON calibrations FOR SELECT USING ({LISTED})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON calibrations TO tersely_app")


def downgrade() -> None:
    """Drop the table."""
    op.execute("DROP TABLE calibrations")
