"""An index of the epochs with packed log lines, by their turns.

It is no part of the migration that adds the columns: this one's lock would keep readers out while the index is made.

Revision ID: 0027
Revises: 0026
"""

from __future__ import annotations

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index; older code goes on with it."""
    op.execute(
        "CREATE INDEX epochs_log ON epochs (tenant_id, session_id, log_last_turn, log_first_turn) "
        "WHERE log_last_turn IS NOT NULL"
    )


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX epochs_log")
