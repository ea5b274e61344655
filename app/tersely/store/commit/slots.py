"""Limit how many transactions run at once; a slow transaction makes room for others."""

from __future__ import annotations

import asyncio

# Seconds after which a transaction frees its slot for another tenant, since it may wait for rows that its own tenant
# has locked. By whether the write is large.
SLOW_AFTER = {False: 0.1, True: 5.0}


class Slots:
    """Slots for transactions that run at once. A slow transaction moves to one of as many spare slots."""

    def __init__(self, count: int, slow_after: float) -> None:
        self.free = asyncio.Semaphore(count)
        self.free_for_slow = count
        self.slow_after = slow_after

    def take(self) -> Slot:
        """Return a slot, which is held for the length of an ``async with`` block."""
        return Slot(self)


class Slot:
    """A slot of one transaction."""

    __slots__ = ("_is_slow", "_slots", "_timer")

    _timer: asyncio.TimerHandle

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._is_slow = False

    async def __aenter__(self) -> None:
        await self._slots.free.acquire()
        self._timer = asyncio.get_running_loop().call_later(self._slots.slow_after, self._move)

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._is_slow:
            self._slots.free_for_slow += 1
        else:
            self._slots.free.release()

    def _move(self) -> None:
        """Move to a spare slot, if one is free."""
        if self._slots.free_for_slow:
            self._is_slow = True
            self._slots.free_for_slow -= 1
            self._slots.free.release()
