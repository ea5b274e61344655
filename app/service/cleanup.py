"""Sessions that nobody uses any more are deleted, where the operator or their strategy wants that.

Of the reference documents only CowAgent's forgets: its sessions are cleaned up after 30 days. So that is the default
for sessions under ``trim``; every other session stays until it is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from app.domain.errors import InvalidRequest, StoreUnavailable
from app.service.recipes import Recipes
from app.store import cleanup
from app.store.cleanup import IdleSession
from app.store.connection import Database
from app.strategies.presets import Trim

_log = logging.getLogger(__name__)

TRIM_DAYS = 30
EVERY = timedelta(hours=6)
# Sessions that are looked at in one go. There is no index by their last use, which would cost every call something:
# each look reads the table once.
PAGE = 2_000
_BEGINNING = datetime(1, 1, 1, tzinfo=UTC)


class Cleanup:
    """Deletes idle sessions, now and then or at the operator's word."""

    def __init__(
        self, database: Database, recipes: Recipes, *, clock: Callable[[], datetime], days: int | None = None
    ) -> None:
        """``days``: after how many all sessions go, whatever their strategy; None: only those under ``trim``."""
        self._database = database
        self._recipes = recipes
        self._clock = clock
        self._days = days

    async def run(self, days: int | None = None, *, tenant: str | None = None) -> int:
        """Delete what is idle for ``days`` (None: as configured), of one tenant or of all; how many it were.

        Raises `StoreUnavailable`.
        """
        wanted = self._days if days is None else days
        before = self._clock() - timedelta(days=TRIM_DAYS if wanted is None else wanted)
        place, count = (_BEGINNING, "", ""), 0
        while found := await cleanup.idle(self._database, before, after=place, limit=PAGE):
            for session in found:
                is_meant = tenant in (None, session.tenant) and (wanted is not None or self._forgets(session))
                if is_meant and await cleanup.delete_idle(self._database, session, before):
                    count += 1
            last = found[-1]
            place = (last.updated_at, last.tenant, last.id)
        return count

    def _forgets(self, session: IdleSession) -> bool:
        try:
            return isinstance(self._recipes.choose(strategy=session.strategy).strategy, Trim)
        except InvalidRequest:
            return False  # a setting of another version: better kept than guessed at

    async def keep_clean(self) -> None:
        """Clean up now and then, until cancelled."""
        while True:
            try:
                if count := await self.run():
                    _log.info("idle sessions deleted: %d", count)
            except StoreUnavailable:
                _log.info("no cleanup: the database is away")
            await asyncio.sleep(EVERY.total_seconds())
