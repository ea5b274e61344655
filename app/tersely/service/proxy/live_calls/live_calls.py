"""Calls that continue a live session: only what is new in them is read, hashed, decided upon and written.

The full path (steps 1 to 4 of `tersely.service.proxy.proxy`) defines what is right. A live call takes its result from
the last call's, where each step of the full path provably gives the same again; every other call is a miss, which the
full path prepares, and which leaves a live session behind. Read `LiveCalls.prepare` and what it calls:

1. find the session by the body (`tersely.service.proxy.live_calls.matching`);
2. decide, and write the body (`tersely.service.proxy.live_calls.preparing`), or have the full path do so where an epoch
   starts (`tersely.service.proxy.live_calls.epoch_starts`);
3. when its reply is stored, continue the live session (`tersely.service.proxy.live_calls.session_building`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.errors import StoreUnavailable
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.metrics import Metrics
from tersely.service.common.tracing import step
from tersely.service.context.loading import with_epoch_inputs
from tersely.service.memos.selection import choose_memos, memo_limit
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.durability.durable_writer import DurableWriter
from tersely.service.proxy.live_calls.live_call import MISSES, Continuation, LiveCall, Miss
from tersely.service.proxy.live_calls.matching import LiveMatcher
from tersely.service.proxy.live_calls.preparing import LivePreparer
from tersely.service.proxy.live_calls.session_building import LiveSessionBuilder
from tersely.service.proxy.live_sessions.live_session import LiveSession, LiveSessions
from tersely.service.proxy.preparing.session_matching import SessionMatcher
from tersely.service.proxy.preparing.stages import MatchedCall, PreparedCall
from tersely.store.commit.records import ReplyWrite, StoredReply
from tersely.store.db.connection import Database
from tersely.store.history.lookups import Lookups
from tersely.store.history.tail_cache import TailCache


class LiveCalls:
    """The live calls and the live sessions of one dialect."""

    def __init__(
        self,
        dialect: Dialect,
        sessions: LiveSessions,
        matcher: SessionMatcher,
        *,
        database: Database,
        lookups: Lookups,
        exchanges: DurableWriter,
        tails: TailCache,
        calibrations: Calibrations,
        metrics: Metrics,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self.is_on = bool(dialect.history.path) and sessions.is_on
        self._sessions = sessions
        self._database = database
        self._matcher = LiveMatcher(dialect, sessions, database=database, lookups=lookups, exchanges=exchanges)
        self._preparer = LivePreparer(dialect, matcher, calibrations=calibrations, new_id=new_id)
        self._builder = LiveSessionBuilder(dialect, owner=id(self), tails=tails, new_id=new_id)
        self._metrics = metrics
        self._clock = clock
        self._count = {each: metrics.live_calls.labels(each) for each in ("hit", *MISSES)}

    def count_miss(self, reason: Miss) -> None:
        """Count a call that was not looked at."""
        self._metrics.tally.add(self._count[reason])

    async def prepare(self, call: Call) -> LiveCall | MatchedCall | None:
        """Return the call as the full path would prepare it or, where an epoch starts, as it would match it; None for
        the full path.
        """
        try:
            with step("recognition"):
                found = await self._matcher.match(call, id(self))
            if not isinstance(found, str) and memo_limit(found.live.config.strategy):
                found = await self._without_memos(found)
        except StoreUnavailable:
            return None  # the full path decides what happens without the database
        with step("context"):
            prepared = found if isinstance(found, str) else self._preparer.prepare(call, found, self._clock())
        if isinstance(prepared, str):
            self._metrics.tally.add(self._count[prepared])
            return None
        if isinstance(prepared, MatchedCall):
            self._metrics.tally.add(self._count["epoch"])
            return await self._with_epoch_inputs(prepared)
        self._metrics.tally.add(self._count["hit"])
        return prepared

    async def _with_epoch_inputs(self, matched: MatchedCall) -> MatchedCall | None:
        tenant = matched.call.tenant
        try:
            async with self._database.reading(tenant) as connection:
                loaded = await with_epoch_inputs(connection, tenant, matched.match, matched.loaded, matched.config)
        except StoreUnavailable:
            return None
        return replace(matched, loaded=loaded)

    async def _without_memos(self, found: Continuation) -> Continuation | Miss:
        """Return the call unless memos come with its question, which the full path stores with it. Raises
        `StoreUnavailable`.
        """
        question, tenant = found.history.messages[-1], found.live.tenant
        if not (question.starts_turn and question.text):
            return found
        most = memo_limit(found.live.config.strategy)
        async with self._database.reading(tenant) as connection:
            (memos,) = await choose_memos(connection, tenant, [question.text], limit=most)
        return "messages" if memos else found

    def now(self, tenant: str) -> tuple[float, int]:
        """Return the time and the count of changes that a session has been checked at which is written to now."""
        return asyncio.get_running_loop().time(), self._database.changes(tenant)

    def begin(self, prepared: PreparedCall, write: ReplyWrite, stored: StoredReply | None) -> None:
        """Keep the session of a call of the full path, whose reply has been ``stored``; or nothing, where nothing may
        be kept.
        """
        if self.is_on and (outcome := write.request_outcome) is not None:
            self._keep(prepared.call.tenant, outcome.session_id, self._builder.begin(prepared, write, stored))

    def grow(self, call: LiveCall, write: ReplyWrite, stored: StoredReply | None, checked: tuple[float, int]) -> None:
        """Keep the session of a live call, whose reply has been ``stored`` (None: it waits to be)."""
        live = None
        if stored is not None:
            live = self._builder.grow(call, write, stored, checked_at=checked[0], changes=checked[1])
        self._keep(call.call.tenant, call.live.session.id, live)

    def note_replies(self, tenant: str, write: ReplyWrite, stored: StoredReply | None) -> None:
        """Remember the ids of replies that have been ``stored``, so that a call can name them."""
        if not self.is_on or stored is None:
            return
        for reply in write.replies:
            if reply.id:
                self._sessions.note_reply(tenant, reply.id, stored.outcome.session_id)

    def forget(self, call: LiveCall) -> None:
        """Keep nothing of the session of a call that does not end as most do."""
        self.forget_session(call.call.tenant, call.live.session.id)

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Keep nothing of a session to which the full path is going to write."""
        self._sessions.forget(tenant, session_id)

    def _keep(self, tenant: str, session_id: str, live: LiveSession | None) -> None:
        if live is not None:
            self._sessions.put(live)
        else:
            self._sessions.forget(tenant, session_id)
        self._metrics.show_live_sessions(len(self._sessions), self._sessions.bytes)
