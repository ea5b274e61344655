"""What is done to a session's context at somebody's word: compact it now, empty it, make its state anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from app.domain.context import Report
from app.domain.errors import Conflict, NotFound, StoreUnavailable
from app.domain.messages import Dialect as DialectName
from app.domain.sessions import Session
from app.domain.state import StateBlock, state_text, strip_state
from app.service.epoch_keeping import Beside, EpochKeeper
from app.service.recipes import Recipes
from app.service.remembering import Remembering
from app.service.summarizer import Compaction, Summarizer
from app.service.summary_jobs import Job
from app.store import sessions, states, summaries
from app.store.connection import Connection, Database
from app.strategies.epochs import Reason
from app.strategies.presets import Compact, Strategy, Trim, strategy_name
from app.strategies.summary_prompts import Purpose

_log = logging.getLogger(__name__)

# What a strategy puts in the place of all older messages; the others need no such summary.
PURPOSES: dict[type[Strategy], Purpose] = {Compact: "checkpoint", Trim: "trim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """With what a session is summarised: the caller's own model, dialect and key. ``model`` empty: the last call's.

    ``strategy`` and ``epoch``, as in the configuration, are those of the calls to come where they are not the
    session's.
    """

    dialect: DialectName = "openai_chat"
    strategy: str | None = None
    epoch: str | None = None
    model: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The summary that was made, if the strategy has one, and the report of the epoch that was started."""

    summary: Compaction | None
    report: Report


class Compactions:
    """The verbs, within a tenant; `NotFound` for a session that is not there, `StoreUnavailable`."""

    def __init__(
        self,
        database: Database,
        recipes: Recipes,
        summarizer: Summarizer,
        keeper: EpochKeeper,
        remembering: Remembering,
        *,
        clock: Callable[[], datetime],
    ) -> None:
        self._database = database
        self._recipes = recipes
        self._summarizer = summarizer
        self._keeper = keeper
        self._remembering = remembering
        self._clock = clock

    async def compact(self, tenant: str, session_id: str, means: Means) -> Compacted:
        """Cut the context down now: everything before the last turn is summarised, and a new epoch starts.

        Raises `Conflict` when another replica is at work on the session for too long, or it is in heavy use.
        """
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            last_seq = await summaries.last_turn_begins(connection, tenant, session_id) - 1
            means = await _with_model(connection, tenant, session_id, means)
        strategy = self._recipes.choose(strategy=means.strategy, session=session).strategy
        purpose = PURPOSES.get(type(strategy))
        done = None
        if purpose is not None and last_seq >= session.floor:
            job = _job(session, tenant, means, strategy, purpose, session.floor, last_seq)
            done = await self._run(job)
        report = await self._begin(tenant, session_id, "compact", means)
        return Compacted(summary=done, report=report)

    async def clear(self, tenant: str, session_id: str, means: Means) -> Report:
        """An empty context from here on: nothing before is shown or told of, but for what is pinned.

        History and memory stay; what is cleared goes into the memory. Raises `Conflict` where the session is in heavy
        use.
        """

        async def empty_state(connection: Connection) -> None:
            await states.add(connection, tenant, session_id, "", "client", self._clock())

        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            means = await _with_model(connection, tenant, session_id, means)
        report = await self._begin(tenant, session_id, "clear", means, empty_state)
        try:
            await self._remember(session, tenant, means, report.cut - 1)
        except StoreUnavailable as error:
            # It is cleared all the same, and nothing of it is lost.
            _log.warning("what was cleared is not in the memory: %s", error)
        return report

    async def _remember(self, session: Session, tenant: str, means: Means, last_seq: int) -> None:
        await self._remembering.write(
            tenant,
            session.id,
            [(session.floor, last_seq)],
            strategy=strategy_name(self._recipes.choose(strategy=means.strategy, session=session).strategy),
            dialect=means.dialect,
            model=means.model,
            credentials=means.credentials,
        )

    async def rebuild_state(self, tenant: str, session_id: str, means: Means) -> StateBlock | None:
        """The state made anew from everything in the current window (std::slop, "/context rebuild").

        None where there is nothing to make it of. Raises `Conflict` as `compact` does.
        """
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            before = await states.newest(connection, tenant, session_id)
            means = await _with_model(connection, tenant, session_id, means)
        strategy = self._recipes.choose(session=session).strategy
        job = _job(session, tenant, means, strategy, "state", session.cut, session.last_seq)
        done = await self._run(replace(job, given=before.text if before else "", again=True))
        if done.summary is None:
            return None
        said, blocks = strip_state(done.summary.text)
        text = blocks[-1] if blocks else state_text(said)
        async with self._database.transaction(tenant) as connection:
            if not await sessions.mark_edited(connection, tenant, session_id, self._clock()):
                raise NotFound("there is no such session")
            return await states.add(connection, tenant, session_id, text, "rebuilt", self._clock())

    async def _begin(
        self, tenant: str, session_id: str, reason: Reason, means: Means, beside: Beside | None = None
    ) -> Report:
        return await self._keeper.begin(
            tenant,
            session_id,
            reason,
            dialect=means.dialect,
            strategy=means.strategy,
            epoch=means.epoch,
            beside=beside,
        )

    async def _run(self, job: Job) -> Compaction:
        done = await self._summarizer.run_now(job)
        if done.result == "held":
            raise Conflict("the session is being summarised already: try again")
        return done


async def _require(connection: Connection, tenant: str, session_id: str) -> Session:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session


async def _with_model(connection: Connection, tenant: str, session_id: str, means: Means) -> Means:
    if means.model:
        return means
    return replace(means, model=await summaries.last_model(connection, tenant, session_id))


def _job(
    session: Session, tenant: str, means: Means, strategy: Strategy, purpose: Purpose, first: int, last: int
) -> Job:
    return Job(
        tenant=tenant,
        session_id=session.id,
        purpose=purpose,
        first_seq=first,
        last_seq=last,
        strategy=strategy_name(strategy),
        dialect=means.dialect,
        model=means.model,
        credentials=means.credentials,
    )
