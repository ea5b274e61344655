"""Delete sessions that have long been idle, if the operator or their strategy asks for it.

Of the reference documents only CowAgent's deletes sessions, after 30 days. So that is the default for sessions under
``trim``; every other session stays until it is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tersely.domain.errors import InvalidRequest, StoreUnavailable
from tersely.service.context.context_configs import ContextConfigs
from tersely.store.db.connection import Database
from tersely.store.ops import cleanup, limits
from tersely.store.ops.cleanup import IdleSession
from tersely.strategies.presets import Trim

_log = logging.getLogger(__name__)

TRIM_DAYS = 30
EVERY = timedelta(hours=6)
# The lease of the one replica that cleans up. It is renewed with each page. Another one takes over after it.
LEASE = timedelta(minutes=10)
# Sessions that one transaction deletes.
PAGE = 200
_END = datetime(9999, 1, 1, tzinfo=UTC)


class Cleanup:
    """Deletes idle sessions, now and then or at the operator's word."""

    def __init__(
        self,
        database: Database,
        configs: ContextConfigs,
        *,
        clock: Callable[[], datetime],
        days: int | None = None,
        name: str = "operator",
    ) -> None:
        """``days``: idle days after which all sessions are deleted, whatever their strategy; None: only those under
        ``trim``.

        ``name`` identifies this process among those that might clean up.
        """
        self._database = database
        self._configs = configs
        self._clock = clock
        self._days = days
        self._name = name

    async def run(self, days: int | None = None, *, tenant: str | None = None, has_lease: bool = False) -> int:
        """Delete sessions idle for ``days``, of one tenant or of all. Return their number.

        Without ``days`` the tenant's own retention counts, or else the configured one. ``has_lease``: stop when another
        process has the cleaner's lease. Raises `StoreUnavailable`.
        """
        own = {} if days is not None else await limits.retentions(self._database)
        count = 0
        for each in [tenant] if tenant is not None else await cleanup.tenants(self._database):
            wanted = days if days is not None else own.get(each, self._days)
            before = self._clock() - timedelta(days=TRIM_DAYS if wanted is None else wanted)
            cursor = (_END, "")
            while found := await cleanup.idle(self._database, each, before, older_than=cursor, limit=PAGE):
                if has_lease and not await self._take_lease():
                    return count
                chosen = [session.id for session in found if wanted is not None or self._forgets(session)]
                count += await cleanup.delete_idle(self._database, each, chosen, before)
                cursor = (found[-1].created_at, found[-1].id)
        return count

    async def run_if_due(self) -> int:
        """Delete idle sessions unless another process does, or has done so within `EVERY`. Return their number.

        Raises `StoreUnavailable`.
        """
        if not await self._take_lease():
            return 0
        count = await self.run(has_lease=True)
        await cleanup.end_lease(self._database, self._name, until=self._clock() + EVERY)
        return count

    async def _take_lease(self) -> bool:
        now = self._clock()
        return await cleanup.take_lease(self._database, self._name, until=now + LEASE, now=now)

    def _forgets(self, session: IdleSession) -> bool:
        try:
            return isinstance(self._configs.choose(strategy=session.strategy).strategy, Trim)
        except InvalidRequest:
            return False  # a setting of another version: better kept than guessed at

    async def keep_clean(self) -> None:
        """Clean up at intervals until cancelled. One of all processes does it; the others see to it that it is done."""
        while True:
            try:
                if count := await self.run_if_due():
                    _log.info("idle sessions deleted: %d", count)
            except StoreUnavailable:
                _log.info("no cleanup: the database is away")
            await asyncio.sleep(LEASE.total_seconds())
