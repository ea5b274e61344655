"""Stream the activity in all sessions of a tenant: calls, epochs, compactions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.connection import Database
from tersely.store.ops import activity
from tersely.store.ops.activity import StoredCall
from tersely.store.ops.calls import CallRow

PAUSE = 1.0
PAGE = 200
OVERLAP = timedelta(seconds=5)
"""Rows are committed a little later than their times say: so much is looked at again."""
RUNNING = timedelta(minutes=15)
"""A call that began longer ago and has no end was given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityItem:
    """Something that happened to a session. ``body`` is a `CallRow`, or counts and names."""

    kind: str
    session_id: str
    at: datetime
    key: tuple[object, ...]
    body: CallRow | dict[str, Any]


class Activity:
    """Reads new events of all sessions of a tenant."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime], pause: float = PAUSE) -> None:
        """``pause`` in seconds between two looks."""
        self._database = database
        self._clock = clock
        self._pause = pause

    async def since(self, tenant: str, at: datetime, *, limit: int = PAGE) -> list[ActivityItem]:
        """Return the activity after ``at``, in order of time."""
        async with self._database.reading(tenant) as connection:
            rows = await activity.finished(connection, tenant, at, limit)
            epochs = await activity.epochs(connection, tenant, at, limit)
            events = await activity.events(connection, tenant, at, limit)
        found = [
            ActivityItem(
                kind="call",
                session_id=row.session_id,
                at=row.finished_at or row.created_at,
                key=("call", row.session_id, row.number),
                body=row,
            )
            for row in rows
        ]
        for kind, others in (("epoch", epochs), ("", events)):
            found += [
                ActivityItem(
                    kind=kind or str(body["type"]),
                    session_id=session_id,
                    at=when,
                    key=(kind or "event", session_id, body["number"]),
                    body=body,
                )
                for session_id, when, body in others
            ]
        return sorted(found, key=lambda each: each.at)[:limit]

    async def running(self, tenant: str) -> list[StoredCall]:
        """The calls under way, on any replica."""
        async with self._database.reading(tenant) as connection:
            return await activity.running(connection, tenant, self._clock() - RUNNING)

    async def follow(self, tenant: str, since: datetime | None = None) -> AsyncIterator[list[ActivityItem]]:
        """Yield the new events at each poll (possibly none): those after ``since``, or after now.

        While the database is unavailable there are none; they follow when it is back.
        """
        began = self._clock()
        at = since or began
        reported: dict[tuple[object, ...], datetime] | None = {} if since else None
        while True:
            try:
                latest = await self.since(tenant, at - OVERLAP)
            except StoreUnavailable:
                yield []
                await asyncio.sleep(self._pause)
                continue
            if reported is None:
                reported = {each.key: each.at for each in latest if each.at <= began}
            found = [each for each in latest if each.key not in reported]
            yield found
            reported.update((each.key, each.at) for each in found)
            at = max([at, *(each.at for each in found)])
            reported = {key: when for key, when in reported.items() if when > at - 2 * OVERLAP}
            if len(found) < PAGE:
                await asyncio.sleep(self._pause)
