"""Replies note the provider's conversation that they are part of.

Revision ID: 0023
Revises: 0022
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column: empty for a reply outside every conversation, NULL where it is not known (older code's)."""
    op.execute("ALTER TABLE reply_ids ADD COLUMN conversation text")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE reply_ids DROP COLUMN conversation")
