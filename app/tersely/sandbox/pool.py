"""Manage the child processes: one for each running query, and some that keep a session for its next query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tersely.domain.errors import Busy
from tersely.sandbox.child import DEFAULT_LIMITS, QueryLimits
from tersely.sandbox.gate import Gate
from tersely.sandbox.process import Child

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class ChildSlot(Generic[K]):
    """A child process and its user's record of its rows. ``key`` is the only session that it will ever hold."""

    key: Hashable
    child: Child
    known: K
    expiry: asyncio.TimerHandle | None = field(default=None)


class ChildPool(Generic[K]):
    """Holds at most ``width`` processes. An unused one ends after ``idle`` seconds, or when another session needs room.

    A tenant's query waits at most ``patience`` seconds for its turn.
    """

    def __init__(
        self,
        new: Callable[[], K],
        *,
        limits: QueryLimits = DEFAULT_LIMITS,
        width: int = 4,
        idle: float = 30.0,
        waiting: int = 64,
        patience: float = 30.0,
    ) -> None:
        """``new`` makes the record for an empty child; ``limits`` apply to each query."""
        self._new = new
        self.limits = limits
        self._width = width
        self._idle = idle
        self._gate = Gate(width=width, waiting=waiting, patience=patience)
        self._resting: list[ChildSlot[K]] = []  # longest unused first
        self._children: set[Child] = set()
        self._busy = 0
        self._is_closed = False

    @asynccontextmanager
    async def slot(self, tenant: str, key: Hashable) -> AsyncIterator[ChildSlot[K]]:
        """Yield a child with rows of ``key``, or an empty one, for exclusive use. Raises `Busy`.

        After an exception the child is ended, because its state is unknown.
        """
        async with self._gate.enter(tenant):
            self._busy += 1
            try:
                slot = self._resume(key) or await self._open(key)
                try:
                    yield slot
                except BaseException:
                    slot.child.kill()
                    raise
                self._rest(slot)
            finally:
                self._busy -= 1

    async def close(self) -> None:
        """End all processes."""
        self._is_closed = True
        for slot in self._resting:
            assert slot.expiry is not None
            slot.expiry.cancel()
        self._resting.clear()
        for child in self._children:
            child.kill()
        await asyncio.gather(*(child.ended() for child in self._children))

    def _resume(self, key: Hashable) -> ChildSlot[K] | None:
        for slot in reversed(self._resting):
            if slot.key == key:
                self._wake(slot)
                if slot.child.is_alive:
                    return slot
                break
        return None

    async def _open(self, key: Hashable) -> ChildSlot[K]:
        self._children = {child for child in self._children if not child.has_ended}
        while self._resting and self._busy + len(self._resting) > self._width:
            self._dismiss(self._resting[0])
        self._check_open()
        child = await Child.start(self.limits)
        self._children.add(child)
        try:
            self._check_open()
        except Busy:
            child.kill()
            raise
        return ChildSlot(key=key, child=child, known=self._new())

    def _check_open(self) -> None:
        if self._is_closed:
            raise Busy("the service is shutting down")

    def _rest(self, slot: ChildSlot[K]) -> None:
        if self._is_closed or not slot.child.is_alive:
            slot.child.kill()
            return
        slot.expiry = asyncio.get_running_loop().call_later(self._idle, self._dismiss, slot)
        self._resting.append(slot)

    def _wake(self, slot: ChildSlot[K]) -> None:
        self._resting.remove(slot)
        if slot.expiry is not None:
            slot.expiry.cancel()

    def _dismiss(self, slot: ChildSlot[K]) -> None:
        self._wake(slot)
        slot.child.kill()
