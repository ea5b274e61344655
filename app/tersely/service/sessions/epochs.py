"""Start epochs when messages are appended, as the proxy does on calls: agents that only use REST get the same contexts.

An agent appends a question, asks for the context, calls its model, and appends the reply; or it asks for the context
with the question unstored, and appends both. Asking for a context stores nothing. So the append before or after it
stores the epoch that the context begins with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import cast
from weakref import WeakValueDictionary

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.errors import Conflict, ContextTooLarge, NotFound
from tersely.domain.history.context import Report
from tersely.domain.history.history import Snapshot
from tersely.domain.history.reconciliation import append_messages
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.models import known_window
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.metrics import Metrics
from tersely.service.context.building import BuiltContext, build
from tersely.service.context.context_config import ContextConfig, TokenBudget
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.fixed_tokens import budget_outside_calls, window_of
from tersely.service.context.history import History
from tersely.service.context.loading import load_history
from tersely.service.context.retrieval import Retriever
from tersely.service.context.stored_messages import restore_reply
from tersely.service.recognition.incoming_history import hash_history
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.service.sessions.messages import AppendedBatch, dialect_of
from tersely.service.summaries.prefetcher import SummaryPrefetcher, memory_of_cut
from tersely.store.commit import epochs
from tersely.store.commit.records import NewEpoch
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.history.sessions import write_epoch
from tersely.store.notes import summaries
from tersely.store.notes.pending_memory import PendingMemory
from tersely.store.notes.summaries import LastCall
from tersely.strategies.epochs.additions import waits
from tersely.strategies.epochs.policies import EveryRequest, Reason, StartEpoch
from tersely.strategies.planning import ContentSize, is_unchanged, may_need_epoch
from tersely.strategies.presets import Full, strategy_name

# Seconds. The read data is bounded by the watermark and by one append.
LIMIT = 15.0
# A batch with more calls than this is an import: it starts one epoch at its end.
FEW_CALLS = 8
# How often a session may move on while an epoch is being planned for it.
ATTEMPTS = 8

ExtraWrite = Callable[[Connection], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RequestedEpoch:
    """The inputs of an epoch that is started on request. ``last`` is the session's last call."""

    session: Session
    history: History
    config: ContextConfig
    budget: TokenBudget
    last: LastCall


class EpochStarter:
    """Starts epochs outside of calls: when appended messages need one, and on request."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        calibrations: Calibrations,
        retriever: Retriever,
        prefetcher: SummaryPrefetcher,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._configs = configs
        self._calibrations = calibrations
        self._retriever = retriever
        self._prefetcher = prefetcher
        self._metrics = metrics
        self._clock = clock
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def advance_if_due(self, tenant: str, session_id: str, batch: AppendedBatch) -> None:
        """Start the epochs that calls would have started with these messages, and request the summaries for the next
        one.

        A reply in the batch shows that a call was made. If its context began with an epoch, that epoch is started as it
        was built then, so that contexts requested in between stay what they are. If the session changes meanwhile, the
        next append does it.
        """
        moments = _CallSnapshots(batch.first_seq)
        for _ in range(2 * FEW_CALLS):
            if not await self._keep_up(tenant, session_id, batch, moments):
                return

    async def _keep_up(self, tenant: str, session_id: str, batch: AppendedBatch, moments: _CallSnapshots) -> bool:
        """Do one step of `advance_if_due`; return whether another epoch may be due."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                return False
            config = self._configs.choose_for_preview(session)
            last = await summaries.last_call(connection, tenant, session_id)
            if batch.model and batch.model != last.model:
                last = LastCall(batch.model, dialect=batch.dialect)
            model = last.model
            pause = await epochs.pause_before(connection, tenant, session_id, batch.first_seq)
            if not await self._may_advance(connection, tenant, session, config, model, pause):
                return False
            history, budget, found = await self._load(
                connection,
                tenant,
                session,
                dialect_of(batch.dialect),
                config,
                model=model,
                pause=pause,
                moments=moments,
            )
        epoch = None
        if history.epoch_start is not None:
            history = await self._with_past(tenant, found, history, config, batch.dialect)
            try:
                if session.plan is None and await self._start_bare(tenant, session, history, config, budget, batch):
                    return True
                started = await self._start(tenant, session, history, config, budget, last, batch.dialect)
            except ContextTooLarge:
                return False
            if started is None:
                return False
            if not started.starts_epoch and moments.skip_one():
                return True
            if started.starts_epoch:
                report, epoch = started.context.report, started.context.epoch
                self._metrics.epochs.labels(strategy_name(config.strategy), epoch.reason).inc()
                self._metrics.compression.observe(report.tokens_after / max(1, report.tokens_before))
        self._prefetcher.prefetch(
            tenant,
            session_id,
            session,
            config.strategy,
            history,
            epoch,
            dialect=cast(DialectName, last.dialect or batch.dialect),
            model=model,
            host=last.host,
            credentials=batch.credentials,
        )
        return epoch is not None and not isinstance(config.policy, EveryRequest)

    async def _start_bare(
        self,
        tenant: str,
        session: Session,
        history: History,
        config: ContextConfig,
        budget: TokenBudget,
        batch: AppendedBatch,
    ) -> bool:
        """Store the first epoch of a session that was sent whole until now and no longer is. Return whether it was
        stored.
        """
        before = tuple(entry for entry in history.snapshot.entries if entry.seq < batch.first_seq)
        if not before:
            return False
        now = await asyncio.to_thread(build, history, config, budget, batch.model)
        is_whole = is_unchanged(now.context.epoch)
        if is_whole and (now.context.epoch.is_plain or not waits(config.policy)):
            return False
        past = replace(history, snapshot=replace(history.snapshot, entries=before))
        built = await asyncio.to_thread(build, past, config, budget, batch.model)
        # Nothing leaves the context with such an epoch.
        before_it = built.context.epoch
        if not is_unchanged(before_it) or (is_whole and not before_it.is_plain):
            return False
        return await self._store(tenant, session, built, budget, None)

    async def _may_advance(
        self,
        connection: Connection,
        tenant: str,
        session: Session,
        config: ContextConfig,
        model: str,
        pause: timedelta | None,
    ) -> bool:
        """Return False where the session's size alone shows that no epoch is due."""
        if session.plan is not None and session.edited:
            return True
        cheap = partial(
            may_need_epoch,
            session.plan,
            strategy=config.strategy,
            policy=config.policy,
            read_back=config.read_back,
            window=window_of(model, self._calibrations),
            model_window=known_window(model),
        )
        if isinstance(config.strategy, Full):
            return cheap(ContentSize(tokens=0, messages=0, turns=0))
        size = await epochs.tail_size(connection, tenant, session)
        return cheap(
            ContentSize(
                tokens=size.tokens + (session.plan.head_tokens if session.plan else 0),
                messages=size.messages,
                turns=size.turns,
                idle=pause.total_seconds() if pause else 0.0,
            )
        )

    async def _with_past(
        self, tenant: str, found: SessionMatch, history: History, config: ContextConfig, dialect: DialectName
    ) -> History:
        target = dialect_of(dialect)
        restore = partial(restore_reply, target)
        return await self._retriever.with_past(
            tenant, found, history, config.strategy, hash_history(()), target, restore
        )

    async def start_epoch(
        self,
        tenant: str,
        session_id: str,
        reason: Reason,
        *,
        dialect: DialectName = "openai_chat",
        strategy: str | None = None,
        epoch: str | None = None,
        extra_write: ExtraWrite | None = None,
    ) -> Report:
        """Start an epoch for ``reason`` and return its report. ``strategy`` and ``epoch`` are those of future calls, if
        they differ from the session's. ``extra_write`` runs in the same transaction.

        Concurrent requests are served one after the other. Raises `NotFound`, `ContextTooLarge`, and `Conflict` if the
        session changes too fast.
        """
        session_key = tenant, session_id
        async with self._locks.setdefault(session_key, asyncio.Lock()):
            return await self._begin(tenant, session_id, reason, dialect, strategy, epoch, extra_write)

    async def _begin(
        self,
        tenant: str,
        session_id: str,
        reason: Reason,
        dialect: DialectName,
        strategy: str | None,
        epoch: str | None,
        extra_write: ExtraWrite | None,
    ) -> Report:
        for _ in range(ATTEMPTS):
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                found = await self._inputs(connection, tenant, session_id, reason, dialect, strategy, epoch)
            started = await self._start(
                tenant, found.session, found.history, found.config, found.budget, found.last, dialect, extra_write
            )
            if started is not None:
                return started.context.report
        raise Conflict("the session is in use: try again")

    async def try_epoch(self, connection: Connection, tenant: str, session_id: str, reason: Reason) -> BuiltContext:
        """Return the context that `start_epoch` would begin with; nothing is stored. Raises as it does."""
        found = await self._inputs(connection, tenant, session_id, reason, "openai_chat", None, None)
        return await asyncio.to_thread(build, found.history, found.config, found.budget, found.last.model)

    async def _inputs(
        self,
        connection: Connection,
        tenant: str,
        session_id: str,
        reason: Reason,
        dialect: DialectName,
        strategy: str | None,
        epoch: str | None,
    ) -> _RequestedEpoch:
        session = await sessions.get(connection, tenant, session_id)
        if session is None:
            raise NotFound("there is no such session")
        config = self._configs.choose_for_preview(session, strategy=strategy, epoch=epoch)
        last = await summaries.last_call(connection, tenant, session_id)
        history, budget, _ = await self._load(
            connection, tenant, session, dialect_of(dialect), config, model=last.model
        )
        history = replace(history, epoch_start=StartEpoch(reason=reason))
        return _RequestedEpoch(session=session, history=history, config=config, budget=budget, last=last)

    async def _load(
        self,
        connection: Connection,
        tenant: str,
        session: Session,
        dialect: Dialect,
        config: ContextConfig,
        *,
        model: str,
        pause: timedelta | None = None,
        moments: _CallSnapshots | None = None,
    ) -> tuple[History, TokenBudget, SessionMatch]:
        decision = append_messages((), last_seq=session.last_seq, turns=session.turns, turn=session.turns)
        found = SessionMatch(
            session_id=session.id, session=session, source="header", decision=decision, rows=(), is_delta=True
        )
        now = self._clock()
        budget = await budget_outside_calls(
            connection,
            tenant,
            session,
            config,
            self._calibrations,
            model=model,
            now=now,
            last_call_at=None if pause is None else now - pause,
        )
        if moments is None:
            # A requested epoch ignores the window: it is the way out of a window that is too small.
            budget = replace(budget, window=None)
        history = await load_history(
            connection,
            tenant,
            found,
            hash_history(()),
            dialect,
            config,
            budget,
            needs_epoch_inputs=moments is None,
            snapshots_at=moments,
        )
        return history, budget, found

    async def _start(
        self,
        tenant: str,
        session: Session,
        history: History,
        config: ContextConfig,
        budget: TokenBudget,
        last: LastCall,
        dialect: DialectName,
        extra_write: ExtraWrite | None = None,
    ) -> BuiltContext | None:
        """Store the new epoch; None if the session changed meanwhile. ``last`` is the session's last call.

        A first epoch that shows everything unchanged is not stored: the next append decides again.
        """
        built = await asyncio.to_thread(build, history, config, budget, last.model)
        if built.context.epoch.reason == "first" and is_unchanged(built.context.epoch):
            return replace(built, starts_epoch=False)
        memory = memory_of_cut(
            config.strategy,
            history,
            built.context.epoch,
            dialect=cast(DialectName, last.dialect or dialect),
            model=last.model,
            host=last.host,
        )
        return built if await self._store(tenant, session, built, budget, memory, extra_write) else None

    async def _store(
        self,
        tenant: str,
        session: Session,
        built: BuiltContext,
        budget: TokenBudget,
        memory: PendingMemory | None,
        extra_write: ExtraWrite | None = None,
    ) -> bool:
        report = built.context.report
        new = NewEpoch(
            epoch=built.context.epoch,
            plan=write_epoch(built.context.epoch),
            tokens_before=report.tokens_before,
            tokens_after=report.tokens_after,
            derived=built.derived,
            states=built.states,
            memory=memory,
        )
        async with self._database.edit(tenant, session.id, limit=LIMIT) as connection:
            is_started = await epochs.start(connection, tenant, session, new, budget.now)
            if is_started and extra_write is not None:
                await extra_write(connection)
        return is_started


class _CallSnapshots:
    """The snapshots at each call among the messages from ``first_seq`` on, and the present one.

    Each reply marks a call. Of a long batch, which is an import, only the last call counts.
    """

    def __init__(self, first_seq: int) -> None:
        self._first_seq = first_seq
        self._skipped = 0
        self._count = 1

    def __call__(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the moments that were not skipped, in order."""
        entries = snapshot.entries
        questions = [
            index
            for index, (entry, following) in enumerate(pairwise(entries), start=1)
            if following.seq >= self._first_seq
            and following.message.role == "assistant"
            and entry.message.role != "assistant"
        ]
        if len(questions) > FEW_CALLS:
            questions = questions[-1:]
        found = [*(replace(snapshot, entries=entries[:index]) for index in questions), snapshot]
        self._count = len(found)
        return found[min(self._skipped, self._count - 1) :]

    def skip_one(self) -> bool:
        """Leave out the first moment from now on; return whether one is left."""
        self._skipped += 1
        return self._skipped < self._count
