"""What another strategy would have sent: figures of each call, and where its contexts go on from.

Revision ID: 0020
Revises: 0019
"""

from __future__ import annotations

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# `plan` is the epoch of the contexts that are never sent; `sent` lists their last messages, by digest and tokens.
SHADOWS = """
CREATE TABLE shadows (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    strategy text NOT NULL,
    last_call bigint NOT NULL,
    plan bytea NOT NULL,
    sent bytea NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
# `full_tokens` and `full_cached` are those of the request that was sent; costs are in USD.
SHADOW_CALLS = """
CREATE TABLE shadow_calls (
    tenant_id text NOT NULL,
    session_id text NOT NULL,
    number bigint NOT NULL,
    strategy text NOT NULL,
    epoch bigint NOT NULL,
    tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    full_tokens bigint NOT NULL,
    full_cached bigint NOT NULL,
    cost double precision,
    full_cost double precision,
    referring integer NOT NULL,
    lost integer NOT NULL,
    pointing integer NOT NULL,
    lost_pointing integer NOT NULL,
    edits integer NOT NULL,
    ready integer NOT NULL,
    full_ready integer NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, session_id, number),
    FOREIGN KEY (tenant_id, session_id) REFERENCES sessions (tenant_id, id) ON DELETE CASCADE
)
"""
TABLES = {"shadows": SHADOWS, "shadow_calls": SHADOW_CALLS}
OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"


def upgrade() -> None:
    """Add the tables; older code goes on without them."""
    for table, definition in TABLES.items():
        op.execute(definition)
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY own_rows ON {table} USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
        op.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO tersely_app")
    op.execute("CREATE INDEX shadow_calls_by_time ON shadow_calls (tenant_id, created_at)")


def downgrade() -> None:
    """Drop them."""
    for table in TABLES:
        op.execute(f"DROP TABLE {table}")
