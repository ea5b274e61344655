"""Change a session's context on request: compact it, clear it, rebuild its state block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal, cast

from tersely.domain.errors import Conflict, NotFound, StoreUnavailable
from tersely.domain.history.context import Report
from tersely.domain.history.runs import Run, subtract
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.text.state import StateBlock, state_text, strip_state
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.sessions.epochs import EpochStarter, ExtraWrite
from tersely.service.summaries.jobs import Job, earlier_of
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.service.summaries.summarizer import Compaction, Summarizer
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.notes import daily_memory, states, summaries
from tersely.store.notes.summaries import LastCall
from tersely.strategies.composition import layer_text
from tersely.strategies.epochs.policies import Reason
from tersely.strategies.prefetch import MEMORY_UPDATE
from tersely.strategies.presets import Compact, Strategy, Trim, strategy_name
from tersely.strategies.summaries.prompts import Purpose

_log = logging.getLogger(__name__)

WITHOUT_MODEL = (
    "only a model can rebuild the state block, and none is available. Set TERSELY_SUMMARIZER_MODEL "
    "(docs/summaries.md), "
    "or write the block yourself: PUT /api/sessions/{id}/state"
)
# Seconds; of a session without an epoch everything is read.
LIMIT = 15.0
# What a strategy puts in the place of all older messages; the others need no such summary.
PURPOSES: dict[type[Strategy], Purpose] = {Compact: "checkpoint", Trim: "ahead"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionOptions:
    """The options of a compaction: the caller's own model, dialect and key.

    ``model`` empty: model, host and dialect are those of the session's last call. ``host`` is the name of a model host
    (empty: the default one of the dialect). ``strategy`` and ``epoch``, in the form of
    the configuration, apply to the following calls if they are not the session's.
    """

    dialect: DialectName = "openai_chat"
    strategy: str | None = None
    epoch: str | None = None
    model: str = ""
    host: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """The written summary, if the strategy has one, and the report of the started epoch."""

    summary: Compaction | None
    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionPreview:
    """The effect of a compaction or a clearing.

    ``messages`` with ``tokens`` leave the context; ``summarised`` with ``summarised_tokens`` are read for a summary
    first, by ``model`` (empty: without a model). ``report`` is that of the context afterwards; it ``is_estimate`` where
    the text of a summary is not known yet.
    """

    report: Report
    messages: int
    tokens: int
    summarised: int = 0
    summarised_tokens: int = 0
    model: str = ""
    is_estimate: bool = False


class Compactions:
    """The verbs, within a tenant; `NotFound` for a session that is not there, `StoreUnavailable`."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        summarizer: Summarizer,
        epoch_starter: EpochStarter,
        memory_updates: MemoryUpdates,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._configs = configs
        self._summarizer = summarizer
        self._epoch_starter = epoch_starter
        self._memory_updates = memory_updates
        self._clock = clock

    async def compact(self, tenant: str, session_id: str, options: CompactionOptions) -> CompactionResult:
        """Cut the context down now: everything before the last turn is summarised, and a new epoch starts.

        Raises `Conflict` when another replica is at work on the session for too long, or it is in heavy use.
        """
        await self._database.flush(tenant, session_id)
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            last_seq = await summaries.last_turn_begins(connection, tenant, session_id) - 1
            options = await _with_model(connection, tenant, session_id, options)
        strategy = self._configs.choose_outside_calls(session, strategy=options.strategy).strategy
        purpose = PURPOSES.get(type(strategy))
        done = None
        if purpose is not None and last_seq >= session.cleared_at:
            job = _job(session, tenant, options, strategy, purpose, _first_shown(session, strategy), last_seq)
            done = await self._run(job)
        report = await self._begin(tenant, session_id, "compact", options)
        if isinstance(strategy, Trim):
            left = _job(session, tenant, options, strategy, MEMORY_UPDATE, 1, report.cut - 1)
            await self._run(replace(left, epoch=report.epoch))
        return CompactionResult(summary=done, report=report)

    async def preview(self, tenant: str, session_id: str, act: Literal["compact", "clear"]) -> CompactionPreview:
        """Return what `compact` or `clear` would do now. Nothing is stored. Raises `NotFound`, `ContextTooLarge`."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            session = await _require(connection, tenant, session_id)
            options = await _with_model(connection, tenant, session_id, CompactionOptions())
            strategy = self._configs.choose_outside_calls(session).strategy
            built = await self._epoch_starter.try_epoch(connection, tenant, session_id, act)
            after = built.context.epoch
            messages, tokens = await summaries.leaving(connection, tenant, session_id, session.plan, after)
            plain = CompactionPreview(report=built.context.report, messages=messages, tokens=tokens)
            purpose = PURPOSES.get(type(strategy)) if act == "compact" else MEMORY_UPDATE
            first, last = _first_shown(session, strategy), after.cut - 1
            if act == "compact":
                last = await summaries.last_turn_begins(connection, tenant, session_id) - 1
            if purpose is None or last < first:
                return plain
            job = _job(session, tenant, options, strategy, purpose, first, last)
            model = self._summarizer.model_of(job)
            runs: Sequence[Run] = [(first, last)]
            if act == "clear":
                covered = await daily_memory.covered_runs(connection, tenant, session_id, first, last)
                runs = subtract(runs, [*covered, *((seq, seq) for seq in after.kept)])
            elif model and (earlier := await earlier_of(connection, job)) is not None:
                runs = [(earlier.last_seq + 1, last)]
            read, read_tokens = await summaries.size_of_runs(connection, tenant, session_id, runs)
            is_estimate = act == "compact"
            return replace(plain, summarised=read, summarised_tokens=read_tokens, model=model, is_estimate=is_estimate)

    async def clear(self, tenant: str, session_id: str, options: CompactionOptions) -> Report:
        """Start an empty context: it contains nothing from before, except pinned messages.

        History and memory stay; summaries of the cleared messages go into the memory. Raises `Conflict` if the session
        is in heavy use.
        """

        async def empty_state(connection: Connection) -> None:
            await states.add(connection, tenant, session_id, "", "client", self._clock())

        await self._database.flush(tenant, session_id)
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            options = await _with_model(connection, tenant, session_id, options)
        report = await self._begin(tenant, session_id, "clear", options, empty_state)
        try:
            await self._remember(session, tenant, options)
        except StoreUnavailable as error:
            # The context is cleared all the same, and nothing is lost.
            _log.warning("cleared messages were not added to the memory: %s", error)
        return report

    async def _remember(self, before: Session, tenant: str, options: CompactionOptions) -> None:
        """Write the cleared messages into the memory; ``before`` is the session before."""
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, before.id)
        kept = [(seq, seq) for seq in session.plan.kept] if session.plan else []
        left = subtract([(before.cleared_at, session.cleared_at - 1)], kept)
        await self._memory_updates.write(
            tenant,
            session.id,
            [left],
            strategy=strategy_name(self._configs.choose_outside_calls(before, strategy=options.strategy).strategy),
            call=LastCall(options.model, options.host, options.dialect),
            credentials=options.credentials,
        )

    async def rebuild_state(self, tenant: str, session_id: str, options: CompactionOptions) -> StateBlock | None:
        """Write the state again from everything in the current window (std::slop, "/context rebuild").

        Only a model writes a state: an extract is none, and would stand in every later context as one. Without a model,
        or if it fails, `Conflict` names what to do. None for a session without messages. Raises `Conflict` also as
        `compact` does.
        """
        await self._database.flush(tenant, session_id)
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            before = await states.newest(connection, tenant, session_id)
            options = await _with_model(connection, tenant, session_id, options)
        left = "was left as it is" if before is not None and before.text.strip() else "was not written"
        strategy = self._configs.choose_outside_calls(session, strategy=options.strategy).strategy
        job = _job(session, tenant, options, strategy, "state", session.cut, session.last_seq)
        if not self._summarizer.has_model(job):
            raise Conflict(f"the state block {left}: {WITHOUT_MODEL}")
        done = await self._run(replace(job, earlier=before.text if before else "", is_forced=True))
        if done.result == "empty":
            return None
        if done.summary is None or done.summary.source != "model":
            raise Conflict(f"the state block {left}, because the model failed: {done.error}; try again later")
        text = _block_in(done.summary.text)
        async with self._database.edit(tenant, session_id) as connection:
            if not await sessions.mark_edited(connection, tenant, session_id, self._clock()):
                raise NotFound("there is no such session")
            return await states.add(connection, tenant, session_id, text, "rebuilt", self._clock())

    async def _begin(
        self,
        tenant: str,
        session_id: str,
        reason: Reason,
        options: CompactionOptions,
        extra_write: ExtraWrite | None = None,
    ) -> Report:
        return await self._epoch_starter.start_epoch(
            tenant,
            session_id,
            reason,
            dialect=options.dialect,
            strategy=options.strategy,
            epoch=options.epoch,
            extra_write=extra_write,
        )

    async def _run(self, job: Job) -> Compaction:
        done = await self._summarizer.run_now(job)
        if done.result == "held":
            raise Conflict("the session is being summarised already: try again")
        return done


def _first_shown(session: Session, strategy: Strategy) -> int:
    """Return the first message that no summary of the session's epoch covers."""
    if isinstance(strategy, Trim) and session.plan is not None and not session.plan.must_rebuild:
        return session.cut if layer_text(session.plan, "summary") else session.cleared_at
    return session.cleared_at


def _block_in(text: str) -> str:
    """Return the state in a summarizer's text, without its heading."""
    rest, blocks = strip_state(text)
    return blocks[-1] if blocks else state_text(rest)


async def _require(connection: Connection, tenant: str, session_id: str) -> Session:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session


async def _with_model(
    connection: Connection, tenant: str, session_id: str, options: CompactionOptions
) -> CompactionOptions:
    if options.model:
        return options
    last = await summaries.last_call(connection, tenant, session_id)
    return replace(
        options, model=last.model, host=last.host, dialect=cast(DialectName, last.dialect or options.dialect)
    )


def _job(
    session: Session,
    tenant: str,
    options: CompactionOptions,
    strategy: Strategy,
    purpose: Purpose,
    first: int,
    last: int,
) -> Job:
    return Job(
        tenant=tenant,
        session_id=session.id,
        purpose=purpose,
        first_seq=first,
        last_seq=last,
        strategy=strategy_name(strategy),
        dialect=options.dialect,
        model=options.model,
        host=options.host,
        credentials=options.credentials,
    )
