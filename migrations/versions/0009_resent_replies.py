"""Find the sessions to which a client has brought a reply itself.

An exchange that waited in the spool may belong to a session that was made meanwhile from the client's own history.
Replies that were relayed have a chain; those that a client brought have none, and are few.
"""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Index the replies that clients brought."""
    op.execute(
        "CREATE INDEX messages_resent ON messages (tenant_id, digest) WHERE chain IS NULL AND role = 'assistant'"
    )


def downgrade() -> None:
    """Drop the index."""
    op.execute("DROP INDEX messages_resent")
