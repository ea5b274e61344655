"""The events of a session as they happen: started epochs, finished summaries."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from tersely.domain.errors import InvalidRequest, NotFound, StoreUnavailable
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.ops import events, stats
from tersely.store.ops.events import Event
from tersely.store.ops.stats import EpochRow

# Seconds between two looks: other replicas write too, and the database announces nothing.
PAUSE = 1.0
PAGE = 100

_CURSOR = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The last epoch and the last event that were sent; both are numbered from 1."""

    epoch: int = 0
    event: int = 0

    @classmethod
    def read(cls, text: str, field: str) -> Cursor:
        """Return the inverse of `write`. Raises `InvalidRequest`."""
        found = _CURSOR.fullmatch(text)
        if found is None:
            raise InvalidRequest(f"{field} must be the id of an event, such as '3-0', not {text[:40]!r}", field=field)
        return cls(epoch=int(found[1]), event=int(found[2] or 0))

    def write(self) -> str:
        """As the id of an event: ``3-0``."""
        return f"{self.epoch}-{self.event}"


# The events, and the cursor to continue from.
StreamItem = tuple[EpochRow | Event, Cursor]


class EventStream:
    """Read the new events of a session, within a tenant."""

    def __init__(self, database: Database, *, pause: float = PAUSE) -> None:
        """``pause`` in seconds."""
        self._database = database
        self._pause = pause

    async def poll(self, tenant: str, session_id: str, cursor: Cursor, *, limit: int = PAGE) -> list[StreamItem]:
        """Return the events after ``cursor`` in order of time, at least ``limit`` if there are. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            if await sessions.get(connection, tenant, session_id) is None:
                raise NotFound("there is no such session")
            epochs = await stats.epochs(connection, tenant, session_id, after=cursor.epoch, limit=limit)
            others = await events.after(connection, tenant, session_id, cursor.event, limit=limit)
        both: list[EpochRow | Event] = [*epochs, *others]
        found: list[StreamItem] = []
        for each in sorted(both, key=lambda happened: happened.created_at):
            moved = {"epoch": each.number} if isinstance(each, EpochRow) else {"event": each.number}
            cursor = replace(cursor, **moved)
            found.append((each, cursor))
        return found

    async def follow(self, tenant: str, session_id: str, cursor: Cursor) -> AsyncIterator[list[StreamItem]]:
        """Yield the events after ``cursor`` at each look (empty without news, or without the database), until the
        session is deleted.
        """
        while True:
            try:
                found = await self.poll(tenant, session_id, cursor)
            except NotFound:
                return
            except StoreUnavailable:
                found = []
            if found:
                cursor = found[-1][1]
            yield found
            if not found:
                await asyncio.sleep(self._pause)
