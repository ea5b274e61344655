"""Cheaper calls: find twins by their newest replies, and write less for each call.

Conversations that begin alike have a reply's chain in common: ``messages_chain_newest`` gives the newest first, so that
finding a session costs the same however many there are. It does all that ``messages_chain`` did for older code.

The ranks of sessions become coarser, so that fewer updates change an indexed column. Latest calls are found by their
time alone. Text that is searched is stored compressed: it was as large again as the messages.

Revision ID: 0017
Revises: 0016
"""

from __future__ import annotations

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

RANKS = """
UPDATE sessions SET saved_rank = floor({factor} * ln(1 + tokens_saved::float8))::smallint,
    tokens_rank = floor({factor} * ln(1 + tokens::float8))::smallint
"""
# A distributed Postgres refuses both, and not every server was built with lz4, which unpacks several times as fast.
OPTIONAL = """
DO $$
BEGIN
    ALTER TABLE search_pages ALTER COLUMN text SET {what};
EXCEPTION WHEN feature_not_supported THEN
    NULL;
END
$$
"""


def upgrade() -> None:
    """Replace the indexes; older code runs on the new ones."""
    op.execute(
        "CREATE INDEX messages_chain_newest ON messages (tenant_id, chain, created_at DESC) WHERE chain IS NOT NULL"
    )
    op.execute("DROP INDEX messages_chain")
    op.execute(RANKS.format(factor=2))
    op.execute("DROP INDEX calls_by_time")
    op.execute("CREATE INDEX calls_by_time ON calls (tenant_id, created_at DESC)")
    op.execute(OPTIONAL.format(what="STORAGE EXTENDED"))
    op.execute(OPTIONAL.format(what="COMPRESSION lz4"))


def downgrade() -> None:
    """Restore them."""
    op.execute(OPTIONAL.format(what="STORAGE EXTERNAL"))
    op.execute("DROP INDEX calls_by_time")
    op.execute("CREATE INDEX calls_by_time ON calls (tenant_id, created_at DESC, session_id, number)")
    op.execute(RANKS.format(factor=16))
    op.execute("CREATE INDEX messages_chain ON messages (tenant_id, chain) WHERE chain IS NOT NULL")
    op.execute("DROP INDEX messages_chain_newest")
