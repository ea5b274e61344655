"""The memory for request bodies in flight: over proxy routes, REST and MCP, with known lengths and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tersely.api.transport.body import COPIES, COUNTED_FROM, LARGE_PART, OBJECT_BYTES, SMALL, BodyBudget
from tersely.domain.errors import Busy
from tests.api.conftest import Api, serve
from tests.conftest import Database

MIB = 1024 * 1024


class Gauge:
    """A gauge that remembers its value."""

    value = 0.0

    def set(self, value: float) -> None:
        self.value = value


@pytest.fixture
def gauge() -> Gauge:
    return Gauge()


@pytest.fixture
def budget(gauge: Gauge) -> Iterator[BodyBudget]:
    yield BodyBudget(1000 * COPIES, level=gauge, return_freed_memory=lambda: None)
    assert gauge.value == 0, "something was not given back"


def test_bodies_fit_until_the_budget_is_used_up(budget: BodyBudget, gauge: Gauge) -> None:
    first, second, third = budget.open(), budget.open(), budget.open()
    first.grow_to(600)
    second.grow_to(400)
    assert gauge.value == 1000 * COPIES
    with pytest.raises(Busy):
        third.grow_to(1)
    first.release()
    third.grow_to(600)
    second.release()
    third.release()


def test_a_body_that_grows_counts_once(budget: BodyBudget, gauge: Gauge) -> None:
    one = budget.open()
    for size in (10, 500, 500, 900):
        one.grow_to(size)
    assert gauge.value == 900 * COPIES
    one.release()
    one.release()


def test_a_body_that_is_alone_always_fits(budget: BodyBudget) -> None:
    one, other = budget.open(), budget.open()
    one.grow_to(5000)
    one.grow_to(9000, objects=7)
    with pytest.raises(Busy):
        other.grow_to(1)
    one.release()


def test_parsed_objects_count_against_the_budget(budget: BodyBudget, gauge: Gauge) -> None:
    one = budget.open()
    one.grow_to(10, objects=3)
    assert gauge.value == 10 * COPIES + 3 * OBJECT_BYTES
    one.release()


async def test_what_a_call_under_way_reads_is_counted_and_not_refused(budget: BodyBudget, gauge: Gauge) -> None:
    one, other = budget.open(), budget.open()
    one.grow_to(600)
    body = b"{}" * COUNTED_FROM
    await other.grow_to_objects(body, may_refuse=False)
    assert gauge.value == 600 * COPIES + len(body) * COPIES + COUNTED_FROM * OBJECT_BYTES
    with pytest.raises(Busy):
        one.grow_to(601)
    other.release()


def test_refused_body_releases_its_share_of_the_budget(budget: BodyBudget, gauge: Gauge) -> None:
    one, other = budget.open(), budget.open()
    one.grow_to(600)
    other.grow_to(300)
    with pytest.raises(Busy):
        other.grow_to(401)
    assert gauge.value == 600 * COPIES
    one.release()


def test_a_check_takes_nothing(budget: BodyBudget, gauge: Gauge) -> None:
    one, other = budget.open(), budget.open()
    one.check_room_for(900)
    other.check_room_for(900)
    assert gauge.value == 0
    one.grow_to(600)
    with pytest.raises(Busy):
        other.check_room_for(401)
    other.check_room_for(400)
    one.release()


async def test_large_bodies_leave_room_for_small_ones(gauge: Gauge) -> None:
    budget = BodyBudget(8 * SMALL * COPIES, level=gauge, return_freed_memory=lambda: None)
    large, other, small = budget.open(), budget.open(), budget.open()
    large.grow_to(int(8 * SMALL * LARGE_PART) - SMALL)
    with pytest.raises(Busy):
        other.grow_to(2 * SMALL)
    small.grow_to(SMALL)
    small.grow_to(SMALL // 2)
    other.grow_to(SMALL)
    for each in (large, other, small):
        each.release()


@pytest.fixture
async def small(database: Database) -> AsyncIterator[Api]:
    """A service that has room for one large body."""
    async with serve(database.dsn, body_memory=16, max_body=64 * MIB) as running:
        yield running


def _large(words: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": words * (2 * MIB)}]}).encode()


async def _in_pieces(body: bytes, gate: asyncio.Event) -> AsyncIterator[bytes]:
    """``body`` but for its end, which waits for ``gate``."""
    yield body[:-1]
    await gate.wait()
    yield body[-1:]


@pytest.mark.parametrize("path", ["/api/sessions/two/messages", "/v1/chat/completions", "/v1/messages", "/mcp"])
@pytest.mark.parametrize("is_length_known", [True, False])
async def test_a_body_without_room_is_refused_and_may_come_again(
    small: Api, path: str, *, is_length_known: bool
) -> None:
    gate = asyncio.Event()
    headers = {"content-type": "application/json"}
    first = asyncio.create_task(
        small.http.post("/api/sessions/one/messages", content=_in_pieces(_large("first "), gate), headers=headers)
    )
    body = _large("second ")

    async def send() -> httpx.Response:
        if is_length_known:
            return await small.http.post(path, content=body, headers=headers)
        at_once = asyncio.Event()
        at_once.set()
        return await small.http.post(path, content=_in_pieces(body, at_once), headers=headers)

    while b"tersely_body_memory_bytes 0.0" in (await small.http.get("/metrics")).content:
        await asyncio.sleep(0.01)
    refused = await send()
    assert refused.status_code == 503, refused.text
    assert refused.headers["retry-after"].isdigit()
    assert "in flight" in refused.text
    gate.set()
    assert (await first).status_code == 201
    assert b"tersely_body_memory_bytes 0.0" in (await small.http.get("/metrics")).content
    assert (await send()).status_code != 503


async def test_announced_bodies_that_never_come_take_no_room(small: Api) -> None:
    """Twenty clients announce 22 MiB each and send one byte."""
    gate = asyncio.Event()
    body = _large("some words ")
    headers = {"content-type": "application/json", "content-length": str(len(body))}

    async def announce() -> AsyncIterator[bytes]:
        yield body[:1]
        await gate.wait()
        yield body[1:]

    paths = ["/api/sessions/one/messages", "/v1/chat/completions"] * 10
    idle = [asyncio.create_task(small.http.post(path, content=announce(), headers=headers)) for path in paths]
    while b"tersely_body_memory_bytes 0.0" in (await small.http.get("/metrics")).content:
        await asyncio.sleep(0.01)
    small_body = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"x" * SMALL)
    answer = await small.http.post(
        "/api/sessions/two/messages", content=small_body, headers={"content-type": headers["content-type"]}
    )
    assert answer.status_code == 201, answer.text
    for task in idle:
        task.cancel()
    await asyncio.gather(*idle, return_exceptions=True)
