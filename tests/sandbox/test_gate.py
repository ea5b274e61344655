"""Admission of queries: so many at once, tenants in turns."""

from __future__ import annotations

import asyncio

import pytest

from tersely.domain.errors import Busy
from tersely.sandbox.gate import Gate


class Crowd:
    """Callers that stay inside until they are let go."""

    def __init__(self, *, width: int = 2, waiting: int = 8, patience: float = 5.0) -> None:
        self.gate = Gate(width=width, waiting=waiting, patience=patience)
        self.inside: list[str] = []
        self.order: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str) -> None:
        """Callers by name; the letter in front is the tenant."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self._tasks[name] = asyncio.get_running_loop().create_task(self._stay(name))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    async def _stay(self, name: str) -> None:
        async with self.gate.enter(name[0]):
            self.inside.append(name)
            self.order.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)

    async def go(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await asyncio.sleep(0.01)

    async def give_up(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await asyncio.sleep(0.01)

    async def all_go(self) -> None:
        while self.inside:
            await self.go(self.inside[0])


async def test_one_tenant_never_takes_every_place() -> None:
    crowd = Crowd(width=3)
    await crowd.come("a1", "a2", "a3", "b1")
    assert crowd.inside == ["a1", "a2", "b1"]
    await crowd.go("b1")
    assert crowd.inside == ["a1", "a2"]
    await crowd.go("a1")
    assert crowd.inside == ["a2", "a3"]
    await crowd.all_go()


async def test_single_place_is_granted_in_order() -> None:
    crowd = Crowd(width=1)
    await crowd.come("a1", "a2")
    await crowd.all_go()
    assert crowd.order == ["a1", "a2"]


async def test_tenants_take_turns_however_many_queries_one_has() -> None:
    crowd = Crowd(width=2)
    await crowd.come("a1", "b1", "a2", "a3", "a4", "b2", "c1")
    await crowd.all_go()
    assert crowd.order.index("c1") < crowd.order.index("a3")
    assert crowd.order.index("b2") < crowd.order.index("a4")
    assert sorted(crowd.order) == ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]


async def test_a_cancelled_waiter_frees_its_place() -> None:
    crowd = Crowd(width=2)
    await crowd.come("a1", "b1", "a2", "a3")
    await crowd.give_up("a2")
    await crowd.give_up("a1")
    assert crowd.inside == ["b1", "a3"]
    await crowd.all_go()
    await crowd.come("a4", "b2")
    assert crowd.inside == ["a4", "b2"]
    await crowd.all_go()


async def test_too_many_of_one_tenant_are_sent_away() -> None:
    crowd = Crowd(width=2, waiting=1)
    await crowd.come("a1", "a2")
    with pytest.raises(Busy):
        async with crowd.gate.enter("a"):
            pass
    await crowd.come("b1")
    assert crowd.inside == ["a1", "b1"]
    await crowd.all_go()


async def test_waiting_for_a_place_times_out() -> None:
    crowd = Crowd(width=2, patience=0.05)
    await crowd.come("a1")
    with pytest.raises(Busy):
        async with crowd.gate.enter("a"):
            pass
    await crowd.go("a1")
    async with crowd.gate.enter("a"):
        pass
