"""Term pages of long sessions are merged.

Revision ID: 0024
Revises: 0023
"""

from __future__ import annotations

from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the number of pages that a row holds. Older code reads merged rows too, and makes their other pages again."""
    op.execute("ALTER TABLE term_pages ADD COLUMN pages integer NOT NULL DEFAULT 1")


def downgrade() -> None:
    """Drop it, and with it the merged pages; searches make theirs again."""
    op.execute("DELETE FROM term_pages WHERE pages > 1")
    op.execute("ALTER TABLE term_pages DROP COLUMN pages")
