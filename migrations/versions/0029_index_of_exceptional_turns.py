"""The index of turns holds only the messages that a search through the sequence numbers does not find.

It is no part of the migration that adds the column: this one's lock would keep readers out while the index is made.
Older code finds turns without its index, by a scan of the session.

Revision ID: 0029
Revises: 0028
"""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the index of all messages. Only queries that say `newest_turn IS NOT NULL` use the new one."""
    op.execute(
        "CREATE INDEX messages_out_of_turn ON messages (tenant_id, session_id, turn) WHERE newest_turn IS NOT NULL"
    )
    op.execute("DROP INDEX messages_turn")


def downgrade() -> None:
    """Restore it."""
    op.execute("CREATE INDEX messages_turn ON messages (tenant_id, session_id, turn) WHERE turn + 0 IS NOT NULL")
    op.execute("DROP INDEX messages_out_of_turn")
