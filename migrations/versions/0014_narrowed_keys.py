"""Keys that may do less than their tenant, and keys that expire.

Revision ID: 0014
Revises: 0013
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns. NULL: the key may do everything, and does not expire, as all keys of older versions."""
    op.execute("ALTER TABLE keys ADD COLUMN scope text")
    op.execute("ALTER TABLE keys ADD COLUMN expires_at timestamptz")


def downgrade() -> None:
    """Drop the columns."""
    op.execute("ALTER TABLE keys DROP COLUMN expires_at")
    op.execute("ALTER TABLE keys DROP COLUMN scope")
