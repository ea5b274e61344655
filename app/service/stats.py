"""Figures of a session: what is stored, what was sent, what the provider said of it, what was spared."""

from __future__ import annotations

from dataclasses import dataclass

from app.domain.errors import NotFound
from app.domain.history import Status
from app.domain.sessions import Session
from app.store import positions, sessions, stats
from app.store.connection import Database
from app.store.stats import CallTotals, EpochRow

# Seconds; sums over the calls of a long session take a while.
LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """``messages`` by status, instructions included; ``live_tokens`` of the live ones. The rest as in the store."""

    session: Session
    messages: dict[Status, int]
    live_tokens: int
    calls: CallTotals
    epochs: dict[str, int]
    terse: dict[str, int]

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


class Figures:
    """Statistics and events, within a tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def stats(self, tenant: str, session_id: str) -> Stats:
        """Raises `NotFound`."""
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
            )

    async def epochs(
        self, tenant: str, session_id: str, *, after: int, limit: int
    ) -> tuple[list[EpochRow], int | None]:
        """Epochs in order after number ``after``, and where to go on. Raises `NotFound`."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            if await sessions.get(connection, tenant, session_id) is None:
                raise NotFound("there is no such session")
            found = await stats.epochs(connection, tenant, session_id, after=after, limit=limit + 1)
        return found[:limit], found[limit - 1].number if len(found) > limit else None
