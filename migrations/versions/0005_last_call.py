"""What the headers of a session's last call asked for, and what a call's last round weighed.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns that may be null: older code neither reads nor writes them."""
    op.execute("ALTER TABLE sessions ADD COLUMN last_strategy text, ADD COLUMN last_epoch_policy text")
    op.execute("ALTER TABLE calls ADD COLUMN weight integer")


def downgrade() -> None:
    """Drop the columns."""
    op.execute("ALTER TABLE calls DROP COLUMN weight")
    op.execute("ALTER TABLE sessions DROP COLUMN last_strategy, DROP COLUMN last_epoch_policy")
