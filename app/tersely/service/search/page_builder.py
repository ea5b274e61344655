"""Build search and term pages in the background, after the commits that fill them.

A page costs much more than the commit of its messages, and most sessions are never searched. So a session's pages are
built when a few wait, or when it has been left alone for a while. A search builds what is still missing itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tersely.domain.errors import StoreUnavailable

# So many full pages of a session are built at once, and after so many seconds also fewer.
PAGES = 4
QUIET = 30.0
# Sessions that wait at most. Pages of others are built by their first search.
WAITING = 10_000
# Seconds of a pause after a failure of the database.
REST = 5.0

_log = logging.getLogger(__name__)


class PageBuilder:
    """Calls ``build`` with tenant and session id for sessions with full pages, one after the other. Rests as long as it
    worked, so that calls keep most of the processor.
    """

    def __init__(
        self, build: Callable[[str, str], Awaitable[None]], *, pages: int = PAGES, quiet: float = QUIET
    ) -> None:
        self._build = build
        self._pages = pages
        self._quiet = quiet
        self._filled: dict[tuple[str, str], tuple[int, asyncio.TimerHandle]] = {}
        self._due: dict[tuple[str, str], None] = {}
        self._wanted = asyncio.Event()
        self._working: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start working."""
        self._working = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop, wherever it is."""
        for _, timer in self._filled.values():
            timer.cancel()
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])

    def schedule(self, tenant: str, session_id: str, pages: int) -> None:
        """Note that ``pages`` of a session were filled. Never waits."""
        key = tenant, session_id
        if key in self._due:
            return
        count, timer = self._filled.pop(key, (0, None))
        if timer is not None:
            timer.cancel()
        if count + pages >= self._pages:
            self._make_due(key)
        elif len(self._filled) < WAITING:
            timer = asyncio.get_running_loop().call_later(self._quiet, self._make_due, key)
            self._filled[key] = count + pages, timer

    def _make_due(self, key: tuple[str, str]) -> None:
        self._filled.pop(key, None)
        if len(self._due) < WAITING:
            self._due[key] = None
            self._wanted.set()

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            key = next(iter(self._due))
            del self._due[key]
            if not self._due:
                self._wanted.clear()
            began = time.monotonic()
            try:
                await self._build(*key)
            except StoreUnavailable:
                await asyncio.sleep(REST)
            except Exception as error:  # noqa: BLE001 one session's pages must not stop those of all others
                _log.warning("search pages were not built: %s", type(error).__name__)
            await asyncio.sleep(time.monotonic() - began)
