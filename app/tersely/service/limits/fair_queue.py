"""Tenants take turns: a worker prepares few calls at a time, and waiting calls are served by tenant, in turn.

Preparing a call uses the worker's CPU. Without turns a tenant with a hundred calls at once would get a hundred shares
of it. A tenant alone may use all slots; beside others it gets few, so that one is always free soon.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial

# Number of calls that a worker prepares at a time, and how many of them may belong to one tenant among others.
WIDTH = 16
SHARE = 1
# Seconds after its last call for which a tenant counts as active.
ABOUT = 5.0


class FairQueue:
    """Admits calls to preparation. `enter` waits for a slot and returns a function that frees it."""

    def __init__(self, *, monotonic: Callable[[], float], width: int = WIDTH, share: int = SHARE) -> None:
        self._monotonic = monotonic
        self._width = width
        self._share = share
        self._busy: dict[str, int] = {}
        self._total = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        # Tenants by the time of their last call, the latest last.
        self._seen: OrderedDict[str, float] = OrderedDict()

    async def enter(self, tenant: str) -> Callable[[], None]:
        """Return when a call of that tenant may be prepared; the result ends its turn."""
        self._note(tenant)
        if tenant in self._waiting or not self._has_slot(tenant):
            slot = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(slot)
            try:
                await slot
            except asyncio.CancelledError:
                if slot.done() and not slot.cancelled():
                    self._leave(tenant)
                raise
        else:
            self._take(tenant)
        return partial(self._leave, tenant)

    def _note(self, tenant: str) -> None:
        self._seen[tenant] = self._monotonic()
        self._seen.move_to_end(tenant)
        self._forget_idle()

    def _forget_idle(self) -> None:
        least = self._monotonic() - ABOUT
        while self._seen and self._seen[first := next(iter(self._seen))] < least:
            del self._seen[first]

    def _has_slot(self, tenant: str) -> bool:
        most = self._width if len(self._seen) <= 1 else self._share
        return self._total < self._width and self._busy.get(tenant, 0) < most

    def _take(self, tenant: str) -> None:
        self._total += 1
        self._busy[tenant] = self._busy.get(tenant, 0) + 1

    def _leave(self, tenant: str) -> None:
        self._total -= 1
        self._busy[tenant] -= 1
        if not self._busy[tenant]:
            del self._busy[tenant]
        if self._waiting:
            self._call_next()

    def _call_next(self) -> None:
        """Give free slots to waiting calls: one call of each tenant in turn, until no call may have one."""
        self._forget_idle()
        are_given = True
        while are_given:
            are_given = False
            for tenant, calls in list(self._waiting.items()):
                while calls and calls[0].done():
                    calls.popleft()  # its client went away
                if calls and self._has_slot(tenant):
                    self._take(tenant)
                    calls.popleft().set_result(None)
                    self._waiting.move_to_end(tenant)
                    are_given = True
                if not calls:
                    del self._waiting[tenant]
