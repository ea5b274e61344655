"""Figures of a session: what is stored, what was sent, what the provider said of it, what was spared."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.errors import ContextTooLarge, InvalidRequest, NotFound
from app.domain.history import Status
from app.domain.sessions import Session
from app.service.previews import Preview, Previews, Wish
from app.service.recipes import Recipes
from app.store import positions, sessions, stats
from app.store.connection import Database
from app.store.stats import CallTotals, Compression
from app.strategies.presets import Tiered

# Seconds; sums over the calls of a long session take a while.
LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A memory level of the context as it is now, in tokens; without a ``budget`` it takes what is left."""

    name: str
    tokens: int
    budget: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredFigures:
    """What Fifth prints of a context (its "Metrics"). ``retrieved`` are turns that were brought back."""

    tokens: int
    budget: int
    levels: tuple[Level, ...]
    retrieved: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """``messages`` by status, instructions included; ``live_tokens`` of the live ones. The rest as in the store."""

    session: Session
    messages: dict[Status, int]
    live_tokens: int
    calls: CallTotals
    epochs: dict[str, int]
    terse: dict[str, int]
    compression: Compression
    tiered: TieredFigures | None

    @property
    def saved(self) -> int:
        """Tokens that were not sent, by our own counts."""
        return max(0, self.calls.tokens_before - self.calls.tokens_after)

    @property
    def saved_share(self) -> float | None:
        """The same as a share of what would have been sent."""
        return self.saved / self.calls.tokens_before if self.calls.tokens_before else None

    @property
    def cache_hit_share(self) -> float | None:
        """Of the input tokens of those calls whose provider says so, the share that came from its cache."""
        return self.calls.cached / self.calls.input_of_cached if self.calls.input_of_cached else None


def levels_of(preview: Preview, strategy: Tiered) -> TieredFigures:
    """How a context is made up: what is always there, what stands for old turns, the newest ones, what came back."""
    budgets = {
        "permanent": strategy.permanent_budget,
        "session": strategy.session_budget,
        "working": strategy.working_budget,
    }
    return TieredFigures(
        tokens=preview.report.tokens_after,
        budget=strategy.total_budget,
        levels=tuple(
            Level(name=level.name, tokens=level.tokens, budget=budgets.get(level.name)) for level in preview.levels
        ),
        retrieved=preview.retrieved,
    )


class Figures:
    """Statistics and events, within a tenant."""

    def __init__(self, database: Database, recipes: Recipes, previews: Previews) -> None:
        self._database = database
        self._recipes = recipes
        self._previews = previews

    async def stats(self, tenant: str, session_id: str) -> Stats:
        """Raises `NotFound`."""
        tiered = await self._tiered(tenant, session_id)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            hidden = [row for row in await positions.exceptions(connection, tenant, session_id) if row.status != "live"]
            counts: dict[Status, int] = {"live": session.last_seq - len(hidden)}
            for row in hidden:
                counts[row.status] = counts.get(row.status, 0) + 1
            return Stats(
                session=session,
                messages=counts,
                live_tokens=session.tokens - sum(row.tokens for row in hidden),
                calls=await stats.call_totals(connection, tenant, session_id),
                epochs=await stats.epochs_by_reason(connection, tenant, session_id),
                terse=await stats.terse_by_source(connection, tenant, session_id),
                compression=await stats.compression(connection, tenant, session_id),
                tiered=tiered,
            )

    async def _tiered(self, tenant: str, session_id: str) -> TieredFigures | None:
        """The levels of the next context, for a session under `tiered`; None where it cannot be built."""
        async with self._database.reading(tenant) as connection:
            session = await sessions.get(connection, tenant, session_id)
        strategy = self._recipes.choose(session=session).strategy
        if session is None or not isinstance(strategy, Tiered):
            return None
        try:
            return levels_of(await self._previews.build(tenant, session_id, Wish()), strategy)
        except (ContextTooLarge, InvalidRequest):
            return None
