"""So many at a time, and tenants take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tersely.domain.errors import Busy


class Gate:
    """Lets ``width`` queries run at once, and one fewer of a single tenant, so that others need not wait for all of
    them.

    Waiting tenants take turns; the queries of one tenant keep their order. Raises `Busy` if ``waiting`` queries of the
    tenant wait already, and after ``patience`` seconds.
    """

    def __init__(self, *, width: int, waiting: int, patience: float) -> None:
        self._free = width
        self._most = max(1, width - 1)
        self._waiting = waiting
        self._patience = patience
        self._inside: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def enter(self, tenant: str) -> AsyncIterator[None]:
        """A place inside."""
        await self._wait(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _wait(self, tenant: str) -> None:
        queue = self._queues.setdefault(tenant, deque())
        if len(queue) >= self._waiting:
            raise Busy("too many of your queries are waiting")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._let_in()
        try:
            async with asyncio.timeout(self._patience):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave(tenant)  # let in at the very moment of giving up
            else:
                with suppress(ValueError):
                    queue.remove(turn)
                self._forget(tenant)
            if isinstance(error, TimeoutError):
                raise Busy("too many queries are running") from error
            raise

    def _let_in(self) -> None:
        """Let queries run while there is room: of the tenants whose turn it is, the one that waited longest."""
        while self._free:
            tenant = next((each for each in self._queues if self._inside[each] < self._most), None)
            if tenant is None:
                return
            turn = self._queues[tenant].popleft()
            self._queues.move_to_end(tenant)
            self._forget(tenant)
            if not turn.done():
                self._free -= 1
                self._inside[tenant] += 1
                turn.set_result(None)

    def _leave(self, tenant: str) -> None:
        self._free += 1
        self._inside[tenant] -= 1
        self._inside += Counter()  # drop tenants without waiting queries
        self._let_in()

    def _forget(self, tenant: str) -> None:
        if not self._queues.get(tenant, True):
            del self._queues[tenant]
