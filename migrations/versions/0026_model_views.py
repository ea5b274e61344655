"""The model's view of a message is stored as its difference from the client's.

See `tersely.store.history.model_views`. Rows that have ``model_raw`` stay as they are.

Revision ID: 0026
Revises: 0025
"""

from __future__ import annotations

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

COLUMNS = ("model_prefix integer", "model_suffix integer", "model_middle bytea")


def upgrade() -> None:
    """Add the columns. Older code takes the client's view of such messages for the model's: without its tags."""
    op.execute(f"ALTER TABLE messages {', '.join(f'ADD COLUMN {column}' for column in COLUMNS)}")


def downgrade() -> None:
    """Drop them, and with them the model's views that were stored so."""
    for column in COLUMNS:
        op.execute(f"ALTER TABLE messages DROP COLUMN {column.split()[0]}")
