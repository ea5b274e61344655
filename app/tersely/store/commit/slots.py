"""Limit how many transactions run at once; a slow transaction makes room for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# Seconds after which a transaction frees its slot for another tenant, since it may wait for rows that its own tenant
# has locked. By whether the write is large.
SLOW_AFTER = {False: 0.1, True: 5.0}


class Slots:
    """Slots for transactions that run at once. A slow transaction moves to one of as many spare slots."""

    def __init__(self, count: int, slow_after: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._free_for_slow = count
        self._slow_after = slow_after

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a slot for the length of the block."""
        await self._free.acquire()
        is_slow = False

        def move() -> None:
            nonlocal is_slow
            if self._free_for_slow:
                is_slow = True
                self._free_for_slow -= 1
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._slow_after, move)
        try:
            yield
        finally:
            timer.cancel()
            if is_slow:
                self._free_for_slow += 1
            else:
                self._free.release()
