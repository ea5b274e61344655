"""Limits of tenants, of which retention is the first, and leases of work that one replica does for all.

Revision ID: 0013
Revises: 0012
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

LIMITS = """
CREATE TABLE tenant_limits (
    tenant_id text PRIMARY KEY,
    retention_days integer,
    updated_at timestamptz NOT NULL
)
"""
# No tenant's: who does which work for the whole service, and until when at most.
SERVICE_LEASES = """
CREATE TABLE service_leases (
    name text PRIMARY KEY,
    holder text NOT NULL,
    until timestamptz NOT NULL
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"
# The cleaner and the operator's commands look at all tenants: a transaction that says so may see these rows.
LISTED = "current_setting('app.list_limits', true) = 'on'"


def upgrade() -> None:
    """Add both tables; older code goes on without them."""
    op.execute(LIMITS)
    op.execute("ALTER TABLE tenant_limits ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE tenant_limits FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON tenant_limits USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute(f"CREATE POLICY listed ON tenant_limits FOR SELECT USING ({LISTED})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON tenant_limits TO tersely_app")
    op.execute(SERVICE_LEASES)
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON service_leases TO tersely_app")


def downgrade() -> None:
    """Drop both tables."""
    op.execute("DROP TABLE service_leases")
    op.execute("DROP TABLE tenant_limits")
