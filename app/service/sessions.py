"""Sessions as their owner handles them: made, listed, configured, deleted; turns hidden, taken back, removed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from app.dialects import raw_json
from app.domain.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from app.domain.sessions import Session
from app.service.calls import check_session_id
from app.service.cursors import read_cursor, write_cursor
from app.service.recipes import Recipes
from app.service.remembering import Remembering
from app.store import memory, sessions, turns
from app.store.connection import Connection, Database
from app.store.sessions import Configuration
from app.store.turns import Range, TurnRow
from app.strategies.presets import strategy_name

MAX_METADATA = 16 * 1024
# Deleting a long session touches many rows.
DELETE_LIMIT = 30.0


class Unset:
    """The type of `UNSET`."""


UNSET: Final = Unset()
"""In a change: leave that as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a session's configuration; None means: back to the default."""

    strategy: Any = UNSET
    epoch: Any = UNSET
    metadata: Any = UNSET


class Sessions:
    """The verbs on sessions and turns, within a tenant; `NotFound` for what is not there, or not the tenant's."""

    def __init__(
        self,
        database: Database,
        recipes: Recipes,
        remembering: Remembering,
        *,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._remembering = remembering
        self._database = database
        self._recipes = recipes
        self._clock = clock
        self._new_id = new_id

    async def create(self, tenant: str, *, session_id: str | None, parent: str | None, given: Change) -> Session:
        """Make an empty session. Raises `Conflict` for an id that is taken, `InvalidRequest` for a bad value."""
        session_id = self._new_id() if session_id is None else check_session_id(session_id, "id")
        configured = self.configure(given)
        async with self._database.transaction(tenant) as connection:
            if parent is not None and await sessions.get(connection, tenant, parent) is None:
                raise InvalidRequest("parent: there is no such session", field="parent")
            if not await sessions.add(connection, tenant, session_id, parent, configured, self._clock()):
                raise Conflict("that session id is taken", field="id")
            return await _require(connection, tenant, session_id)

    async def get(self, tenant: str, session_id: str) -> Session:
        """The session."""
        async with self._database.transaction(tenant) as connection:
            return await _require(connection, tenant, session_id)

    async def page(
        self, tenant: str, *, after: str | None, parent: str | None, client_id: str | None, limit: int
    ) -> tuple[list[Session], str | None]:
        """The newest sessions after a cursor, and the next cursor."""
        before = None if after is None else read_cursor(after)
        async with self._database.transaction(tenant) as connection:
            found = await sessions.newest(
                connection, tenant, before=before, parent=parent, client_id=client_id, limit=limit + 1
            )
        more = found[limit - 1] if len(found) > limit else None
        return found[:limit], None if more is None else write_cursor(more.created_at, more.id)

    async def change(self, tenant: str, session_id: str, given: Change) -> Session:
        """Change the configuration; the next context follows it."""
        async with self._database.transaction(tenant) as connection:
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
        return changed

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete a session and all that belongs to it."""
        async with self._database.transaction(tenant, limit=DELETE_LIMIT) as connection:
            if not await sessions.delete(connection, tenant, session_id):
                raise NotFound("there is no such session")
            await memory.forget_session(connection, tenant, session_id)

    # Turns

    async def turns(self, tenant: str, session_id: str, *, after: int, limit: int) -> tuple[list[TurnRow], int | None]:
        """Turns after that number, and the number to go on after."""
        async with self._database.transaction(tenant) as connection:
            session = await _require(connection, tenant, session_id)
            found = await turns.between(connection, tenant, session_id, after + 1, after + limit)
        return found, after + limit if after + limit < session.turns else None

    async def turn(self, tenant: str, session_id: str, turn: int) -> TurnRow:
        """One turn. `NotFound` for one that is not there, or was removed."""
        async with self._database.transaction(tenant) as connection:
            await _require(connection, tenant, session_id)
            return await _require_turn(connection, tenant, session_id, turn)

    async def drop(self, tenant: str, session_id: str, turn: int) -> TurnRow:
        """Hide a turn from every context. One that is hidden already stays as it is."""
        async with self._database.transaction(tenant) as connection:
            session = await _lock(connection, tenant, session_id)
            await _require_turn(connection, tenant, session_id, turn)
            told = await turns.hide(connection, tenant, session, turn, "dropped", self._clock())
            row = await _require_turn(connection, tenant, session_id, turn)
        await self._tell_anew(tenant, session, told)
        return row

    async def undo(self, tenant: str, session_id: str) -> TurnRow:
        """Take the last turn back. `Conflict` when there is none."""
        async with self._database.transaction(tenant) as connection:
            session = await _lock(connection, tenant, session_id)
            turn = await turns.last_turn(connection, tenant, session_id)
            told = await turns.hide(connection, tenant, session, turn, "undone", self._clock()) if turn else None
            if told is None:
                raise Conflict("there is no turn to take back")
            row = await _require_turn(connection, tenant, session_id, turn)
        await self._tell_anew(tenant, session, told)
        return row

    async def remove(self, tenant: str, session_id: str, turn: int) -> None:
        """Remove a turn's content for good."""
        async with self._database.transaction(tenant, limit=DELETE_LIMIT) as connection:
            session = await _lock(connection, tenant, session_id)
            await _require_turn(connection, tenant, session_id, turn)
            told = await turns.remove(connection, tenant, session, turn, self._clock())
        await self._tell_anew(tenant, session, told)

    async def _tell_anew(self, tenant: str, session: Session, ranges: Iterable[Range] | None) -> None:
        """Have the memory tell of what is left of ``ranges``; it may fail, for what was asked for is done."""
        if ranges:
            strategy = strategy_name(self._recipes.choose(session=session).strategy)
            with suppress(StoreUnavailable):
                await self._remembering.write(tenant, session.id, ranges, strategy=strategy)

    def configure(self, given: Change) -> Configuration:
        """The configuration of a new session. Raises `InvalidRequest`."""
        return self._configure(Configuration(strategy=None, epoch_policy=None, metadata=b"{}"), given)

    def _configure(self, known: Configuration, given: Change) -> Configuration:
        strategy = known.strategy if given.strategy is UNSET else as_setting(given.strategy)
        policy = known.epoch_policy if given.epoch is UNSET else as_setting(given.epoch)
        self._recipes.check(
            strategy=None if given.strategy is UNSET else strategy, epoch=None if given.epoch is UNSET else policy
        )
        metadata = known.metadata if given.metadata is UNSET else write_metadata(given.metadata)
        return Configuration(strategy=strategy, epoch_policy=policy, metadata=metadata)


def as_setting(value: Any) -> str | None:
    """A strategy or policy from JSON in the form of the configuration: a name, or an object as JSON text."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def write_metadata(value: dict[str, Any] | None) -> bytes:
    """Metadata as stored. Raises `InvalidRequest` over the size limit."""
    stored = raw_json.dump(value or {})
    if len(stored) > MAX_METADATA:
        raise InvalidRequest(f"metadata must have at most {MAX_METADATA} bytes as JSON", field="metadata")
    return stored


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
