"""An index of pinned messages, which are few: to find them, a session's messages had to be read, all of them.

Revision ID: 0022
Revises: 0021
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index; older code goes on with it."""
    op.execute("CREATE INDEX messages_pinned ON messages (tenant_id, session_id, seq) WHERE pinned")


def downgrade() -> None:
    """Drop it."""
    op.execute("DROP INDEX messages_pinned")
