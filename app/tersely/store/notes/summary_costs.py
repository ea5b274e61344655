"""The costs of a session's summaries: calls and tokens of the summarizer's model, by day (UTC) and model."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from tersely.store.db.connection import Connection

HERE = "tenant_id = $1 AND session_id = $2"
ADD = """
INSERT INTO summary_costs (tenant_id, session_id, day, model, calls, input_tokens, output_tokens, refused)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (tenant_id, session_id, day, model) DO UPDATE SET calls = summary_costs.calls + excluded.calls,
    input_tokens = summary_costs.input_tokens + excluded.input_tokens,
    output_tokens = summary_costs.output_tokens + excluded.output_tokens,
    refused = summary_costs.refused + excluded.refused
"""
SUMS = """
    coalesce(sum(calls), 0)::bigint AS calls, coalesce(sum(input_tokens), 0)::bigint AS input_tokens,
    coalesce(sum(output_tokens), 0)::bigint AS output_tokens, coalesce(sum(refused), 0)::bigint AS refused
"""
TOTAL = f"SELECT {SUMS} FROM summary_costs WHERE {HERE} AND ($3::date IS NULL OR day = $3)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryCosts:
    """Calls and tokens; ``refused`` counts the summaries that a limit kept from the model."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    refused: int = 0

    @property
    def tokens(self) -> int:
        """Return all tokens."""
        return self.input_tokens + self.output_tokens


async def add(connection: Connection, tenant: str, session_id: str, day: date, model: str, costs: SummaryCosts) -> None:
    """Add ``costs`` to those of the day."""
    await connection.execute(
        ADD, tenant, session_id, day, model, costs.calls, costs.input_tokens, costs.output_tokens, costs.refused
    )


async def total(connection: Connection, tenant: str, session_id: str, day: date | None = None) -> SummaryCosts:
    """Return the sums of a session: of one day, or of all."""
    record = await connection.fetchrow(TOTAL, tenant, session_id, day)
    assert record is not None  # an aggregate always gives a row
    return SummaryCosts(**dict(record))
