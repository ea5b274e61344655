"""Find a call's idempotency key in whichever session it brought its messages to.

The first request of a conversation names no session: a repetition of it is found by its key.
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index the keys of each tenant."""
    op.execute("CREATE INDEX appends_key ON appends (tenant_id, key)")


def downgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX appends_key")
