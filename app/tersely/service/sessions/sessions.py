"""The sessions of a tenant: create, list, configure, delete; drop, undo and remove turns."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from msgspec import structs

from tersely.dialects.wire import raw_json
from tersely.domain.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from tersely.domain.history.runs import Run
from tersely.domain.history.sessions import Session, check_session_id
from tersely.service.context.building import keeps_log_of_turns
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.loading import first_seq_replanned
from tersely.service.context.visible_states import take_visible_states
from tersely.service.sessions import turn_log
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.store.commit import turns
from tersely.store.commit.turns import HiddenStatus, TurnRow
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages, session_lists, sessions
from tersely.store.history.session_lists import ListedSession, SessionCursor, SessionFilter, Sort
from tersely.store.history.sessions import Configuration
from tersely.store.notes import daily_memory as memory
from tersely.strategies.presets import Strategy, Window, strategy_name

MAX_METADATA = 16 * 1024
# Deleting a long session touches many rows.
DELETE_LIMIT = 30.0
LIST_LIMIT = 10.0


class Unset:
    """The type of `UNSET`."""


UNSET: Final = Unset()
"""In a change: leave that as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionChange:
    """A change of a session's configuration; None means: back to the default."""

    strategy: Any = UNSET
    epoch: Any = UNSET
    metadata: Any = UNSET


class Sessions:
    """The verbs on sessions and turns, within a tenant; `NotFound` for what is not there, or not the tenant's."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        memory_updates: MemoryUpdates,
        *,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._memory_updates = memory_updates
        self._database = database
        self._configs = configs
        self._clock = clock
        self._new_id = new_id

    async def create(self, tenant: str, *, session_id: str | None, parent: str | None, given: SessionChange) -> Session:
        """Create an empty session. Raises `Conflict` for a taken id, `InvalidRequest` for an invalid value."""
        session_id = self._new_id() if session_id is None else check_session_id(session_id, "id")
        configured = self.configure(given)
        async with self._database.transaction(tenant) as connection:
            if parent is not None and await sessions.get(connection, tenant, parent) is None:
                raise InvalidRequest("parent: there is no such session", field="parent")
            if not await sessions.add(connection, tenant, session_id, parent, configured, self._clock()):
                raise Conflict("that session id is taken", field="id")
            return await _require(connection, tenant, session_id)

    async def get(self, tenant: str, session_id: str) -> Session:
        """Return the session."""
        async with self._database.transaction(tenant) as connection:
            return await _require(connection, tenant, session_id)

    async def figures(self, tenant: str, session_id: str) -> ListedSession:
        """The session with its figures."""
        async with self._database.reading(tenant) as connection:
            found = await session_lists.get(connection, tenant, session_id)
        if found is None:
            raise NotFound("there is no such session")
        return found

    async def page(
        self, tenant: str, session_filter: SessionFilter, *, sort: Sort = "created", after: str | None, limit: int
    ) -> tuple[list[ListedSession], str | None]:
        """Sessions behind a cursor, and the next cursor."""
        cursor = None if after is None else _read_cursor(after, sort)
        async with self._database.reading(tenant, limit=LIST_LIMIT) as connection:
            found = await session_lists.page(
                connection, tenant, session_filter, sort=sort, after=cursor, limit=limit + 1
            )
        more = found[limit - 1] if len(found) > limit else None
        return found[:limit], None if more is None else _write_cursor(more, sort)

    async def children(self, tenant: str, parents: Sequence[str]) -> dict[str, int]:
        """Parent -> how many sessions are its children."""
        async with self._database.reading(tenant) as connection:
            return await session_lists.children(connection, tenant, list(parents))

    async def change(self, tenant: str, session_id: str, given: SessionChange) -> Session:
        """Change the configuration; the next context follows it."""
        async with self._database.edit(tenant, session_id) as connection:
            session = await turns.lock(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            known = Configuration(
                strategy=session.strategy, epoch_policy=session.epoch_policy, metadata=session.metadata
            )
            configured = self._configure(known, given)
            changed = await sessions.change(connection, tenant, session_id, configured, self._clock())
            if changed is None:
                raise NotFound("there is no such session")
            if self._becomes_window(session, changed):
                since = await first_seq_replanned(connection, tenant, changed)
                await take_visible_states(connection, tenant, changed, since)
        return changed

    def _becomes_window(self, before: Session, after: Session) -> bool:
        return self._is_window(after) and not self._is_window(before)

    def _is_window(self, session: Session) -> bool:
        return isinstance(self._strategy(session), Window)

    def keeps_log(self, session: Session) -> bool:
        """Return whether each turn of the session gets a line of the log."""
        strategy = self._strategy(session)
        return strategy is not None and keeps_log_of_turns(strategy)

    def _strategy(self, session: Session) -> Strategy | None:
        """Return the strategy of the session; None for a setting of another version."""
        try:
            return self._configs.choose_outside_calls(session).strategy
        except InvalidRequest:
            return None

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete a session with all its data."""
        async with self._database.edit(tenant, session_id, limit=DELETE_LIMIT) as connection:
            if not await sessions.delete(connection, tenant, session_id):
                raise NotFound("there is no such session")
            await memory.forget_session(connection, tenant, session_id)

    # Turns

    async def turns(self, tenant: str, session_id: str, *, after: int, limit: int) -> tuple[list[TurnRow], int | None]:
        """Return the turns after a number, and the number to continue after."""
        async with self._database.transaction(tenant, limit=LIST_LIMIT) as connection:
            session = await _require(connection, tenant, session_id)
            found = await self._between(connection, tenant, session, after + 1, after + limit)
        return found, after + limit if after + limit < session.turns else None

    async def turn(self, tenant: str, session_id: str, turn: int) -> TurnRow:
        """Return one turn. Raises `NotFound` for a missing or removed one."""
        async with self._database.transaction(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            found = await self._between(connection, tenant, session, turn, turn)
        if not found:
            raise NotFound(f"there is no turn t{turn}")
        return found[0]

    async def _between(
        self, connection: Connection, tenant: str, session: Session, first: int, last: int
    ) -> list[TurnRow]:
        """Return turns with their lines of the log, also with those that are not stored."""
        found = await turns.between(connection, tenant, session.id, first, last)
        if not self.keeps_log(session):
            return found
        live = [row.turn for row in found if row.status == "live"]
        lines = {line.turn: line.text for line in await turn_log.derived(connection, tenant, session.id, live)}
        return [
            structs.replace(row, terse=(*row.terse, lines[row.turn])) if row.turn in lines else row for row in found
        ]

    async def drop(self, tenant: str, session_id: str, turn: int) -> TurnRow:
        """Hide a turn from every context. A hidden turn stays unchanged."""
        async with self._database.edit(tenant, session_id) as connection:
            session = await _lock(connection, tenant, session_id)
            await _require_turn(connection, tenant, session_id, turn)
            memory_runs = await turns.hide(connection, tenant, session, turn, "dropped", self._clock())
            await self.enqueue_rewrites(connection, tenant, session, memory_runs)
            row = await _require_turn(connection, tenant, session_id, turn)
        await self.rewrite_memory(tenant, session, memory_runs)
        return row

    async def hide_within(
        self, connection: Connection, tenant: str, session_id: str, turn: int, status: HiddenStatus
    ) -> None:
        """Hide a turn in a transaction of the caller's, without what follows from it for the memory."""
        session = await _lock(connection, tenant, session_id)
        await turns.hide(connection, tenant, session, turn, status, self._clock())

    async def undo(self, tenant: str, session_id: str, *, expected: int | None = None) -> TurnRow:
        """Take the last turn back. `Conflict` when there is none, or when it is not the ``expected`` one."""
        async with self._database.edit(tenant, session_id) as connection:
            session = await _lock(connection, tenant, session_id)
            _, turn = await messages.last_link(connection, tenant, session_id)
            if expected is not None and turn != expected:
                raise Conflict("another turn is the last one by now: look again")
            memory_runs = await turns.hide(connection, tenant, session, turn, "undone", self._clock()) if turn else None
            if memory_runs is None:
                raise Conflict("there is no turn to take back")
            await self.enqueue_rewrites(connection, tenant, session, memory_runs)
            row = await _require_turn(connection, tenant, session_id, turn)
        await self.rewrite_memory(tenant, session, memory_runs)
        return row

    async def remove(self, tenant: str, session_id: str, turn: int) -> None:
        """Remove a turn's content for good."""
        async with self._database.edit(tenant, session_id, limit=DELETE_LIMIT) as connection:
            session = await _lock(connection, tenant, session_id)
            await _require_turn(connection, tenant, session_id, turn)
            memory_runs = await turns.remove(connection, tenant, session, turn, self._clock())
            await self.enqueue_rewrites(connection, tenant, session, memory_runs)
        await self.rewrite_memory(tenant, session, memory_runs)

    async def enqueue_rewrites(
        self, connection: Connection, tenant: str, session: Session, memory_runs: Iterable[tuple[Run, ...]] | None
    ) -> None:
        """Store the entries that `rewrite_memory` must write, in the transaction that makes them due."""
        if memory_runs:
            strategy = strategy_name(self._configs.choose_outside_calls(session).strategy)
            await self._memory_updates.enqueue(connection, tenant, session.id, memory_runs, strategy=strategy)

    async def rewrite_memory(
        self, tenant: str, session: Session, memory_runs: Iterable[tuple[Run, ...]] | None
    ) -> None:
        """Write memory entries again, for the remaining messages of entries that covered ``memory_runs``.

        A failure is ignored, because the requested change is done.
        """
        if memory_runs:
            strategy = strategy_name(self._configs.choose_outside_calls(session).strategy)
            with suppress(StoreUnavailable):
                await self._memory_updates.write(tenant, session.id, memory_runs, strategy=strategy)

    def check_settings(self, strategy: str | None, epoch: str | None) -> None:
        """Raise `InvalidRequest` unless both can be read."""
        self._configs.check(strategy=strategy, epoch=epoch)

    def configure(self, given: SessionChange) -> Configuration:
        """Return the configuration of a new session. Raises `InvalidRequest`."""
        return self._configure(Configuration(strategy=None, epoch_policy=None, metadata=b"{}"), given)

    def _configure(self, known: Configuration, given: SessionChange) -> Configuration:
        strategy = known.strategy if given.strategy is UNSET else as_setting(given.strategy)
        policy = known.epoch_policy if given.epoch is UNSET else as_setting(given.epoch)
        self._configs.check(
            strategy=None if given.strategy is UNSET else strategy, epoch=None if given.epoch is UNSET else policy
        )
        metadata = known.metadata if given.metadata is UNSET else write_metadata(given.metadata)
        return Configuration(strategy=strategy, epoch_policy=policy, metadata=metadata)


def as_setting(value: Any) -> str | None:
    """Return a strategy or policy from JSON in the form of the configuration: a name, or an object as JSON text."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def write_metadata(value: dict[str, Any] | None) -> bytes:
    """Metadata as stored. Raises `InvalidRequest` over the size limit."""
    stored = raw_json.dump(value or {})
    if len(stored) > MAX_METADATA:
        raise InvalidRequest(f"metadata must have at most {MAX_METADATA} bytes as JSON", field="metadata")
    return stored


def _write_cursor(listed: ListedSession, sort: Sort) -> str:
    """The cursor behind a session in a list."""
    rank, value = (each.isoformat() if isinstance(each, datetime) else each for each in (listed.rank, listed.value))
    text = json.dumps([sort, rank, value, listed.session.id])
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str, sort: Sort) -> SessionCursor:
    """The inverse of `_write_place`. Raises `InvalidRequest`."""
    try:
        given = json.loads(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        order, rank, value, session_id = given
        if order != sort or not isinstance(session_id, str) or "\x00" in session_id:
            raise ValueError
        if sort in {"last_call", "created"}:
            rank, value = (None if each is None else _time(each) for each in (rank, value))
        elif not all(isinstance(each, int) and abs(each) < 2**62 for each in (rank, value)) or abs(rank) > 2**15 - 1:
            raise ValueError
    except (ValueError, TypeError):
        raise InvalidRequest("after must be the `next` of an earlier page, in the same order", field="after") from None
    return SessionCursor(rank=rank, value=value, id=session_id)


def _time(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None:
        raise ValueError
    return at


async def _require(connection: Connection, tenant: str, session_id: str) -> Session:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session


async def _lock(connection: Connection, tenant: str, session_id: str) -> Session:
    session = await turns.lock(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session


async def _require_turn(connection: Connection, tenant: str, session_id: str, turn: int) -> TurnRow:
    found = await turns.between(connection, tenant, session_id, turn, turn)
    if not found:
        raise NotFound(f"there is no turn t{turn}")
    return found[0]
