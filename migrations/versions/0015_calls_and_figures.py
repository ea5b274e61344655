"""What each call sent and cost, and the figures by which sessions are listed.

``calls.sent`` describes the messages of the request, see `tersely.store.history.sent_contexts`. The ranks are coarse
copies of ``last_call_at``, ``tokens_saved`` and ``tokens``: they change rarely, so that an index on them costs the
update of a session nothing most of the time, and a list sorts exactly within one rank alone.

Revision ID: 0015
Revises: 0014
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

CALLS = (
    "sent bytea",
    "client text",
    "request_id text",
    "overhead_ms real",
    "cost_sent double precision",
    "cost_full double precision",
)
SESSIONS = (
    "title text",
    "client text",
    "models text[] NOT NULL DEFAULT '{}'",
    "tokens_saved bigint NOT NULL DEFAULT 0",
    "input_tokens bigint NOT NULL DEFAULT 0",
    "cached_tokens bigint NOT NULL DEFAULT 0",
    "output_tokens bigint NOT NULL DEFAULT 0",
    "cost_sent double precision NOT NULL DEFAULT 0",
    "cost_full double precision NOT NULL DEFAULT 0",
    "priced_calls bigint NOT NULL DEFAULT 0",
    "call_hour timestamptz",
    "saved_rank smallint NOT NULL DEFAULT 0",
    "tokens_rank smallint NOT NULL DEFAULT 0",
)
INDEXES = {
    "sessions_by_last_call": "sessions (tenant_id, call_hour DESC NULLS LAST)",
    "sessions_by_saved": "sessions (tenant_id, saved_rank DESC)",
    "sessions_by_tokens": "sessions (tenant_id, tokens_rank DESC)",
    "calls_by_time": "calls (tenant_id, created_at DESC, session_id, number)",
    "epochs_by_time": "epochs (tenant_id, created_at)",
    "events_by_time": "events (tenant_id, created_at DESC, session_id, number)",
}
BACKFILL = """
UPDATE sessions AS s SET
    tokens_saved = coalesce(c.saved, 0), input_tokens = coalesce(c.input, 0), cached_tokens = coalesce(c.cached, 0),
    output_tokens = coalesce(c.output, 0), models = coalesce(c.models, '{}'),
    call_hour = date_trunc('hour', s.last_call_at),
    saved_rank = floor(16 * ln(1 + coalesce(c.saved, 0)::float8))::smallint,
    tokens_rank = floor(16 * ln(1 + s.tokens::float8))::smallint
FROM sessions AS all_sessions LEFT JOIN (
    SELECT tenant_id, session_id, sum(greatest(0, tokens_before - tokens_after))::bigint AS saved,
        sum(input_tokens)::bigint AS input, sum(cached_tokens)::bigint AS cached, sum(output_tokens)::bigint AS output,
        array_agg(DISTINCT model) AS models
    FROM calls GROUP BY tenant_id, session_id
) AS c ON c.tenant_id = all_sessions.tenant_id AND c.session_id = all_sessions.id
WHERE s.tenant_id = all_sessions.tenant_id AND s.id = all_sessions.id
"""


def upgrade() -> None:
    """Add columns that older code neither reads nor writes; fill what earlier calls tell."""
    op.execute(f"ALTER TABLE calls {', '.join(f'ADD COLUMN IF NOT EXISTS {column}' for column in CALLS)}")
    op.execute(f"ALTER TABLE sessions {', '.join(f'ADD COLUMN IF NOT EXISTS {column}' for column in SESSIONS)}")
    op.execute(BACKFILL)
    for name, target in INDEXES.items():
        op.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {target}")


def downgrade() -> None:
    """Remove them."""
    for name in INDEXES:
        op.execute(f"DROP INDEX {name}")
    for column in CALLS:
        op.execute(f"ALTER TABLE calls DROP COLUMN {column.split()[0]}")
    for column in SESSIONS:
        op.execute(f"ALTER TABLE sessions DROP COLUMN {column.split()[0]}")
