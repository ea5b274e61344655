"""The model host of each call, by its name in the settings; empty: the default host of the dialect.

Summaries that are written later go to the host of the session's last call. NULL stands for calls of older code.

Revision ID: 0019
Revises: 0018
"""

from __future__ import annotations

from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns that older code neither reads nor writes."""
    op.execute("ALTER TABLE calls ADD COLUMN IF NOT EXISTS host text")
    op.execute("ALTER TABLE pending_memory ADD COLUMN IF NOT EXISTS host text")


def downgrade() -> None:
    """Remove them."""
    op.execute("ALTER TABLE pending_memory DROP COLUMN host")
    op.execute("ALTER TABLE calls DROP COLUMN host")
