"""What the provider reported of a reply that was made in several rounds, in all.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column that may be null: older code neither reads nor writes it."""
    op.execute("ALTER TABLE reply_ids ADD COLUMN usage bytea")


def downgrade() -> None:
    """Drop the column."""
    op.execute("ALTER TABLE reply_ids DROP COLUMN usage")
