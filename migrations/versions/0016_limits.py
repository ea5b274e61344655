"""Limits of tenants and of their keys, and what has been used of them. The operator lists tenants with both.
Keys for one client.

``limits`` has a row per tenant with an empty ``key_id``, and one per limited key. ``limit_use.record`` is the JSON of
`tersely.domain.limits.Use`.

Revision ID: 0016
Revises: 0015
"""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

LIMITS = """
CREATE TABLE limits (
    tenant_id text NOT NULL,
    key_id text NOT NULL,
    requests_per_minute bigint,
    concurrent bigint,
    tokens_per_day bigint,
    money_per_month double precision,
    stored_bytes bigint,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, key_id)
)
"""
LIMIT_USE = """
CREATE TABLE limit_use (
    tenant_id text NOT NULL,
    key_id text NOT NULL,
    record bytea NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, key_id)
)
"""
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"
# The workers read the limits of all tenants, the operator's list also what they use: a transaction that says so.
LISTED = "current_setting('app.list_limits', true) = 'on'"


def upgrade() -> None:
    """Add both tables; older code goes on without limits."""
    for table, create in (("limits", LIMITS), ("limit_use", LIMIT_USE)):
        op.execute(create)
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
        op.execute(f"CREATE POLICY listed ON {table} FOR SELECT USING ({LISTED})")
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO tersely_app")
    # The only client that may use a key, by the name that its calls have in lists. NULL: any.
    op.execute("ALTER TABLE keys ADD COLUMN client text")
    op.execute(f"CREATE POLICY listed ON tenants FOR SELECT USING ({LISTED})")


def downgrade() -> None:
    """Drop both tables."""
    op.execute("DROP POLICY listed ON tenants")
    op.execute("ALTER TABLE keys DROP COLUMN client")
    op.execute("DROP TABLE limit_use")
    op.execute("DROP TABLE limits")
