"""The rows of a turn are found without an index of all messages.

Nearly every message belongs to the session's newest turn when it is stored, so turns rise with the sequence numbers and
a binary search finds them. ``newest_turn`` marks the rows for which that is not so. NULL: the row's own turn was the
newest. A number from 1 on: the turn that was the newest. 0: the row is older than this column. -1: the row was written
by code that does not know the column. See `tersely.store.history.turn_rows`.

Revision ID: 0028
Revises: 0027
"""

from __future__ import annotations

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column. Neither step writes the rows that there are."""
    op.execute("ALTER TABLE messages ADD COLUMN newest_turn integer DEFAULT 0")
    op.execute("ALTER TABLE messages ALTER COLUMN newest_turn SET DEFAULT -1")


def downgrade() -> None:
    """Drop it."""
    op.execute("ALTER TABLE messages DROP COLUMN newest_turn")
