"""What is summarised at somebody's word: compact a session now, make its state anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from app.domain.errors import NotFound
from app.domain.messages import Dialect as DialectName
from app.domain.sessions import Session
from app.domain.state import StateBlock, state_text, strip_state
from app.service.summarizer import Compaction, Summarizer
from app.service.summary_jobs import Job
from app.store import sessions, states, summaries
from app.store.connection import Connection, Database
from app.strategies.summary_prompts import Purpose


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """With what a session is summarised: its strategy's name, and the caller's own model, dialect and key.

    ``model`` empty: that of the session's last call.
    """

    strategy: str
    dialect: DialectName = "openai_chat"
    model: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)


class Compactions:
    """The verbs, within a tenant; `NotFound` for a session that is not there, `StoreUnavailable`."""

    def __init__(self, database: Database, summarizer: Summarizer, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._summarizer = summarizer
        self._clock = clock

    async def compact(self, tenant: str, session_id: str, means: Means, *, last_seq: int | None = None) -> Compaction:
        """A checkpoint of everything up to ``last_seq``, by default up to the last turn; the next context starts anew.

        `done` where there is one already, `empty` where there is nothing before the last turn.
        """
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            if last_seq is None:
                last_seq = await summaries.last_turn_begins(connection, tenant, session_id) - 1
            means = await _with_model(connection, tenant, session_id, means)
        if last_seq < 1:
            return Compaction(result="empty")
        done = await self._summarizer.run_now(_job(tenant, session_id, means, "checkpoint", 1, last_seq))
        if done.summary is not None:
            async with self._database.transaction(tenant) as connection:
                await sessions.mark_edited(connection, tenant, session_id, self._clock())
        return done

    async def rebuild_state(self, tenant: str, session_id: str, means: Means) -> StateBlock | None:
        """The state made anew from everything in the current window (std::slop, "/context rebuild").

        None where there is nothing to make it of, or where another replica is at work on the session for too long.
        """
        async with self._database.reading(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            before = await states.newest(connection, tenant, session_id)
            means = await _with_model(connection, tenant, session_id, means)
        job = _job(tenant, session_id, means, "state", session.cut, session.last_seq)
        done = await self._summarizer.run_now(replace(job, given=before.text if before else "", again=True))
        if done.summary is None:
            return None
        said, blocks = strip_state(done.summary.text)
        text = blocks[-1] if blocks else state_text(said)
        async with self._database.transaction(tenant) as connection:
            if not await sessions.mark_edited(connection, tenant, session_id, self._clock()):
                raise NotFound("there is no such session")
            return await states.add(connection, tenant, session_id, text, "rebuilt", self._clock())


async def _require(connection: Connection, tenant: str, session_id: str) -> Session:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session


async def _with_model(connection: Connection, tenant: str, session_id: str, means: Means) -> Means:
    if means.model:
        return means
    return replace(means, model=await summaries.last_model(connection, tenant, session_id))


def _job(tenant: str, session_id: str, means: Means, purpose: Purpose, first: int, last: int) -> Job:
    return Job(
        tenant=tenant,
        session_id=session_id,
        purpose=purpose,
        first_seq=first,
        last_seq=last,
        strategy=means.strategy,
        dialect=means.dialect,
        model=means.model,
        credentials=means.credentials,
    )
