"""Remember who asked for a client's own summary: nobody else goes on from it, in whatever words.

Summaries without a requester are those of earlier versions; they are not gone on from, and forgotten within hours.
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the requester."""
    op.execute("ALTER TABLE side_replies ADD COLUMN requester bytea")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE side_replies DROP COLUMN requester")
