"""State and scratchpad of a session, as its owner and its model handle them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tersely.domain.errors import NotFound, TooLarge
from tersely.domain.text.state import MAX_BLOCK, StateBlock, state_text
from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.notes import scratchpads, states
from tersely.store.notes.scratchpads import Scratchpad
from tersely.store.notes.states import PastState, StateCursor

MAX_SCRATCHPAD = 32_000
"""Characters of a scratchpad, which is part of every context."""


class Notes:
    """Reads and writes states and scratchpads, within a tenant. Raises `NotFound` for an unknown session.

    A client's text is not in any message, so the next context starts a new epoch with it. The model's own text
    (``by_model``) is in its call.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    async def state(self, tenant: str, session_id: str) -> StateBlock | None:
        """Return the newest valid state, if there is one."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            return await states.newest(connection, tenant, session_id)

    async def state_history(
        self, tenant: str, session_id: str, *, after: StateCursor | None, limit: int
    ) -> tuple[list[PastState], StateCursor | None]:
        """Return all states in order after a cursor, including invalid ones, and the next cursor."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            found = await states.history(connection, tenant, session_id, after=after or (-1, 0), limit=limit + 1)
        return found[:limit], found[limit - 1].position if len(found) > limit else None

    async def put_state(self, tenant: str, session_id: str, text: str) -> StateBlock:
        """Write the state in the model's place. Raises `TooLarge`."""
        text = state_text(text)
        if len(text) > MAX_BLOCK:
            raise TooLarge(f"a state has at most {MAX_BLOCK} characters, not {len(text)}", field="text")
        now = self._clock()
        async with self._database.edit(tenant, session_id) as connection:
            await _edit(connection, tenant, session_id, now)
            return await states.add(connection, tenant, session_id, text, "client", now)

    async def scratchpad(self, tenant: str, session_id: str) -> Scratchpad:
        """Return the scratchpad."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            return await scratchpads.get(connection, tenant, session_id)

    async def put_scratchpad(self, tenant: str, session_id: str, text: str, *, by_model: bool = False) -> Scratchpad:
        """Write the scratchpad anew. Raises `TooLarge`."""
        return await self._write(tenant, session_id, text, appends=False, by_model=by_model)

    async def append_scratchpad(self, tenant: str, session_id: str, text: str, *, by_model: bool = False) -> Scratchpad:
        """Add to the scratchpad, on a new line. Raises `TooLarge`."""
        return await self._write(tenant, session_id, text, appends=True, by_model=by_model)

    async def _write(self, tenant: str, session_id: str, text: str, *, appends: bool, by_model: bool) -> Scratchpad:
        now = self._clock()
        async with self._database.edit(tenant, session_id) as connection:
            if not by_model:
                await _edit(connection, tenant, session_id, now)
            elif await turns.lock(connection, tenant, session_id) is None:
                raise NotFound("there is no such session")
            if appends:
                before = (await scratchpads.get(connection, tenant, session_id)).text
                text = before + ("\n" if before and not before.endswith("\n") else "") + text
            if len(text) > MAX_SCRATCHPAD:
                raise TooLarge(f"a scratchpad has at most {MAX_SCRATCHPAD} characters, not {len(text)}", field="text")
            return await scratchpads.put(connection, tenant, session_id, text, now)


async def _edit(connection: Connection, tenant: str, session_id: str, now: datetime) -> None:
    if not await sessions.mark_edited(connection, tenant, session_id, now):
        raise NotFound("there is no such session")


async def _require(connection: Connection, tenant: str, session_id: str) -> None:
    if await sessions.get(connection, tenant, session_id) is None:
        raise NotFound("there is no such session")
