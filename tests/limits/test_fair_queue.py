"""Places in which calls are prepared go to tenants in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tersely.service.limits.fair_queue import FairQueue


async def enter(queue: FairQueue, tenant: str, order: list[str], leaving: list[Callable[[], None]]) -> None:
    leave = await queue.enter(tenant)
    order.append(tenant)
    leaving.append(leave)


async def test_a_tenant_that_is_alone_has_all_places_and_beside_others_its_share() -> None:
    now = 0.0
    queue = FairQueue(monotonic=lambda: now, width=4, share=1)
    alone = [await queue.enter("north") for _ in range(4)]
    for leave in alone:
        leave()
    await queue.enter("south")
    await queue.enter("north")
    second = asyncio.create_task(queue.enter("north"))
    await asyncio.sleep(0.01)
    assert not second.done()
    second.cancel()


async def test_those_who_wait_take_turns_by_tenant_and_who_goes_away_takes_no_place() -> None:
    queue = FairQueue(monotonic=lambda: 0.0, width=1, share=1)
    order: list[str] = []
    leaving: list[Callable[[], None]] = []
    first = await queue.enter("north")
    waiting = [asyncio.create_task(enter(queue, "north", order, leaving)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(enter(queue, "south", order, leaving)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    first()
    for _ in range(5):
        await asyncio.sleep(0.01)
        leaving.pop()()
    assert order == ["north", "south", "north", "south", "north"]
    leave = await asyncio.wait_for(queue.enter("west"), 1)
    leave()


async def test_a_tenant_that_is_alone_again_has_all_places_for_calls_that_wait() -> None:
    now = 0.0
    queue = FairQueue(monotonic=lambda: now, width=4, share=1)
    order: list[str] = []
    leaving: list[Callable[[], None]] = []
    (await queue.enter("south"))()
    first = await queue.enter("north")
    waiting = [asyncio.create_task(enter(queue, "north", order, leaving)) for _ in range(6)]
    await asyncio.sleep(0)
    assert not order
    now = 10.0
    first()
    await asyncio.sleep(0)
    assert order == ["north"] * 4
    while leaving:
        leaving.pop()()
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
