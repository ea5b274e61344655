"""Log lines that no model wrote are packed into the row of the epoch that cut their turns.

``log`` is described in `tersely.store.history.packed_log`. The other columns say which turns it is about, and how many
lines it has. Lines that are rows of ``terse`` stay where they are.

Revision ID: 0025
Revises: 0024
"""

from __future__ import annotations

from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

COLUMNS = ("log bytea", "log_first_turn integer", "log_last_turn integer", "log_lines integer")
# The values are compressed already. A distributed Postgres refuses the statement.
STORAGE = """
DO $$
BEGIN
    ALTER TABLE epochs ALTER COLUMN log SET STORAGE EXTERNAL;
EXCEPTION WHEN feature_not_supported THEN
    NULL;
END
$$
"""


def upgrade() -> None:
    """Add the columns. Older code goes on with rows of ``terse`` alone: it makes other lines when the log is read, and
    does without them in contexts.
    """
    op.execute(f"ALTER TABLE epochs {', '.join(f'ADD COLUMN {column}' for column in COLUMNS)}")
    op.execute(STORAGE)


def downgrade() -> None:
    """Drop the columns, and with them the packed lines: the log makes its lines again when it is read."""
    for column in COLUMNS:
        op.execute(f"ALTER TABLE epochs DROP COLUMN {column.split()[0]}")
