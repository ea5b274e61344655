"""Exchanges: a call's request and reply under one id, so that a repeated write of either is recognised.

``messages.exchange`` is set on the messages of a request that carries only what is new: a full history is recognised by
its content. ``replays`` has one row per exchange that was written from a spool.
"""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

OWN_ROWS = "tenant_id = nullif(current_setting('app.tenant', true), '')"

REPLAYS = """
CREATE TABLE replays (
    tenant_id text NOT NULL,
    id text NOT NULL,
    session_id text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant_id, id)
)
"""


def upgrade() -> None:
    """Add the columns and the table; each statement on its own, as a distributed Postgres wants it."""
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute("ALTER TABLE messages ADD COLUMN IF NOT EXISTS exchange text")
    op.execute("ALTER TABLE calls ADD COLUMN IF NOT EXISTS exchange text")
    op.execute(REPLAYS)
    op.execute("ALTER TABLE replays ENABLE ROW LEVEL SECURITY")
    op.execute("ALTER TABLE replays FORCE ROW LEVEL SECURITY")
    op.execute(f"CREATE POLICY own_rows ON replays USING ({OWN_ROWS}) WITH CHECK ({OWN_ROWS})")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON replays TO tersely_app")


def downgrade() -> None:
    """Remove them."""
    op.execute("DROP TABLE replays")
    op.execute("ALTER TABLE calls DROP COLUMN exchange")
    op.execute("ALTER TABLE messages DROP COLUMN exchange")
