"""Statistics of a session: stored messages, sent tokens, tokens that the provider reported, savings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from tersely.domain.errors import ContextTooLarge, InvalidRequest, NotFound
from tersely.domain.history.history import Status
from tersely.domain.history.sessions import Session
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.sessions.previews import Preview, PreviewRequest, Previews
from tersely.service.summaries.models import SummarizerConfig
from tersely.store.db.connection import Database
from tersely.store.history import numbering, sessions
from tersely.store.notes import summary_costs
from tersely.store.notes.summary_costs import SummaryCosts
from tersely.store.ops import calls, shadows, stats
from tersely.store.ops.shadows import ShadowSums
from tersely.store.ops.stats import CallTotals, Compression
from tersely.strategies.presets import Tiered

# Seconds; sums over the calls of a long session take a while.
LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLevel:
    """A memory level of the current context, in tokens; without a ``budget`` it uses the remaining tokens."""

    name: str
    tokens: int
    budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredFigures:
    """The figures that Fifth prints of a context (its "Metrics"). ``retrieved`` are the retrieved turns."""

    tokens: int
    budget: int
    levels: tuple[MemoryLevel, ...]
    retrieved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """``messages`` by status, including instructions; ``live_tokens`` of the live ones. The rest is as in the store.

    ``summary_costs`` and ``summary_costs_today`` are the costs of the summarizer's model, ``limits`` its daily calls
    and tokens for one session (0: no limit), ``money`` its cost in USD, None without a known price;
    ``call_costs`` the costs of the calls as sent and as the full history, None without a known price; ``shadow`` the
    strategy that was tried out, and its figures.
    """

    session: Session
    messages: dict[Status, int]
    live_tokens: int
    calls: CallTotals
    epochs: dict[str, int]
    terse: dict[str, int]
    compression: Compression
    summary_costs: SummaryCosts
    summary_costs_today: SummaryCosts
    limits: tuple[int, int]
    money: float | None
    call_costs: tuple[float, float] | None
    shadow: tuple[str, ShadowSums] | None
    tiered: TieredFigures | None

    @property
    def saved(self) -> int:
        """Tokens that were not sent, by our own counts."""
        return max(0, self.calls.tokens_before - self.calls.tokens_after)

    @property
    def saved_share(self) -> float | None:
        """Return the same as a share of what would have been sent."""
        return self.saved / self.calls.tokens_before if self.calls.tokens_before else None

    @property
    def cache_hit_share(self) -> float | None:
        """The share of input tokens that came from the cache, over calls whose provider reports it."""
        return self.calls.cached / self.calls.input_of_cached if self.calls.input_of_cached else None


def memory_levels(preview: Preview, strategy: Tiered) -> TieredFigures:
    """Return the tokens of each level of a context: permanent, session, working and volatile memory."""
    budgets = {
        "permanent": strategy.permanent_budget,
        "session": strategy.session_budget,
        "working": strategy.working_budget,
    }
    return TieredFigures(
        tokens=preview.report.tokens_after,
        budget=strategy.total_budget,
        levels=tuple(
            MemoryLevel(name=level.name, tokens=level.tokens, budget=budgets.get(level.name))
            for level in preview.levels
        ),
        retrieved=preview.retrieved,
    )


class StatsReader:
    """Statistics and events, within a tenant."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        previews: Previews,
        config: SummarizerConfig,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        """``config`` is the summarizer's."""
        self._config = config
        self._clock = clock
        self._database = database
        self._configs = configs
        self._previews = previews

    async def stats(self, tenant: str, session_id: str) -> Stats:
        """Raises `NotFound`."""
        tiered = await self._tiered(tenant, session_id)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            hidden = [row for row in await numbering.exceptions(connection, tenant, session_id) if row.status != "live"]
            counts: dict[Status, int] = {"live": session.last_seq - len(hidden)}
            for row in hidden:
                counts[row.status] = counts.get(row.status, 0) + 1
            costs = await summary_costs.total(connection, tenant, session_id)
            return Stats(
                session=session,
                messages=counts,
                live_tokens=session.tokens - sum(row.tokens for row in hidden),
                calls=await stats.call_totals(connection, tenant, session_id),
                epochs=await stats.epochs_by_reason(connection, tenant, session_id),
                terse=await stats.terse_by_source(connection, tenant, session_id),
                compression=await stats.compression(connection, tenant, session_id),
                summary_costs=costs,
                summary_costs_today=await summary_costs.total(connection, tenant, session_id, self._clock().date()),
                limits=(self._config.daily_calls, self._config.daily_tokens),
                money=self._config.price_of(costs.input_tokens, costs.output_tokens),
                call_costs=await calls.costs(connection, tenant, session_id),
                shadow=await shadows.of_session(connection, tenant, session_id),
                tiered=tiered,
            )

    async def _tiered(self, tenant: str, session_id: str) -> TieredFigures | None:
        """Return the levels of the next context, for a session under `tiered`; None if it cannot be built."""
        async with self._database.reading(tenant) as connection:
            session = await sessions.get(connection, tenant, session_id)
        strategy = self._configs.choose_outside_calls(session).strategy if session else None
        if not isinstance(strategy, Tiered):
            return None
        try:
            return memory_levels(await self._previews.build(tenant, session_id, PreviewRequest()), strategy)
        except (ContextTooLarge, InvalidRequest):
            return None
