"""Says in the database whose exchanges wait in this process's spool, so that other replicas wait for them.

A request that does not carry its history must not be answered from a database that lacks a part of it. No replica can
say anything while the database is away, so after an outage such requests wait for `GRACE` seconds: until then each
replica has noticed the return and set its marks, which is the first that it does.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from tersely.domain.errors import StoreUnavailable
from tersely.domain.history.sessions import Session
from tersely.store.commit import spool_marks
from tersely.store.db.connection import Database

# Seconds. A replica asks a database that is away four times a second, and waits a second for the answer.
GRACE = 2.0
# How long a mark counts without being renewed, and when it is renewed (seconds).
COUNTS_FOR = 60.0
RENEW_AFTER = 20.0
# Seconds for one mark.
LIMIT = 0.5


class SpoolMarks:
    """The marks of one process, and those of others."""

    def __init__(self, database: Database, *, process: str, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._process = process
        self._clock = clock
        # Exchanges that wait, by tenant; and when each mark was written, in the loop's time.
        self._waiting: Counter[str] = Counter()
        self._marked_at: dict[str, float] = {}
        # Tenant and process of marks that no exchange needs any more, or that a process left which has ended.
        self._left: set[tuple[str, str]] = set()
        # A mark is written and removed in turns: the database would keep what reaches it last.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def add(self, tenant: str) -> None:
        """Count an exchange that waits. One that cannot be read has no tenant."""
        if tenant:
            self._waiting[tenant] += 1

    def adopt(self, tenant: str, process: str) -> None:
        """Remove the mark of a process that has ended, once the exchanges of the tenant are stored."""
        if tenant:
            self._left.add((tenant, process))

    async def remove(self, tenant: str) -> None:
        """Count an exchange less; remove the mark after the last one."""
        if not tenant:
            return
        self._waiting[tenant] -= 1
        if self._waiting[tenant] > 0:
            return
        del self._waiting[tenant]
        if tenant in self._marked_at:
            self._left.add((tenant, self._process))
        await self._unmark(tenant)

    async def remove_left(self) -> bool:
        """Remove the marks that nobody needs, as far as the database permits. Return whether none of them is left.

        A mark that stays holds up the tenant's requests at other replicas until it ends.
        """
        tenants = {tenant for tenant, _ in self._left if tenant not in self._waiting}
        await asyncio.gather(*[self._unmark(tenant) for tenant in tenants])
        return not any(tenant in tenants for tenant, _ in self._left)

    async def _unmark(self, tenant: str) -> None:
        async with self._turn(tenant):
            left = {each for each in self._left if each[0] == tenant}
            if tenant in self._waiting or not left:
                return
            self._marked_at[tenant] = -math.inf  # it may be removed without an answer
            with suppress(StoreUnavailable):
                async with self._database.transaction(tenant, limit=LIMIT) as connection:
                    for _, process in left:
                        await spool_marks.unmark(connection, tenant, process)
                self._left -= left
                if tenant not in self._waiting:
                    del self._marked_at[tenant]

    async def write(self) -> None:
        """Write the marks that are missing or old, as far as the database takes them."""
        if not self._waiting:
            return
        await asyncio.gather(*[self._mark(tenant) for tenant in self._waiting if self._is_due(tenant)])

    def _is_due(self, tenant: str) -> bool:
        age = asyncio.get_running_loop().time() - self._marked_at.get(tenant, -math.inf)
        return age >= RENEW_AFTER and not self._database.is_away(tenant)

    async def _mark(self, tenant: str) -> None:
        async with self._turn(tenant):
            if tenant not in self._waiting or not self._is_due(tenant):
                return
            until = self._clock() + timedelta(seconds=COUNTS_FOR)
            written_at = asyncio.get_running_loop().time()
            self._marked_at.setdefault(tenant, -math.inf)  # it may be written without an answer
            with suppress(StoreUnavailable):
                async with self._database.transaction(tenant, limit=LIMIT) as connection:
                    await spool_marks.mark(connection, tenant, self._process, until)
                self._marked_at[tenant] = written_at

    def _turn(self, tenant: str) -> asyncio.Lock:
        return self._turns.setdefault(tenant, asyncio.Lock())

    async def grace(self, tenant: str) -> float:
        """Return for how many seconds marks may be missing because the database has just come back."""
        return max(0.0, GRACE - await self._database.seconds_since_outage(tenant))

    async def others_wait(self, tenant: str) -> bool:
        """Return whether the spool of another process has exchanges of the tenant. Raises `StoreUnavailable`."""
        async with self._database.reading(tenant) as connection:
            return await spool_marks.is_marked_by_others(connection, tenant, self._process, self._clock())

    async def is_unchanged(self, tenant: str, session: Session) -> bool:
        """Return whether a session is stored as it was read, and no other process has exchanges of the tenant in its
        spool. Raises `StoreUnavailable`.
        """
        async with self._database.reading(tenant) as connection:
            return await spool_marks.is_unchanged(
                connection, tenant, session.id, session.version, session.created_at, self._process, self._clock()
            )
