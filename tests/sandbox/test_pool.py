"""Child processes: one session each, so many in all, gone when they have nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tersely.domain.errors import Busy
from tersely.sandbox.child import QueryLimits
from tersely.sandbox.pool import ChildPool
from tersely.sandbox.process import Child, ChildDied, frame

ROW = [1, 1, "user", "text", "live", "hello", None, "2026-01-01T10:00:00.5Z", 3, [], []]
CONTENTS = "SELECT content FROM messages"


@pytest.fixture
async def pool() -> AsyncIterator[ChildPool[list[str]]]:
    """Two processes."""
    pool: ChildPool[list[str]] = ChildPool(list, width=2)
    yield pool
    await pool.close()


async def ask(pool: ChildPool[list[str]], key: str, *add: str) -> list[object]:
    async with pool.slot("tenant", key) as desk:
        for text in add:
            await desk.child.feed(frame({"add": [[*ROW[:5], text, *ROW[6:]]]}))
            desk.known.append(text)
        reply = await desk.child.run(CONTENTS)
    found: list[object] = [cell for (cell,) in reply["rows"]]
    return found


async def test_a_session_s_rows_are_kept_for_its_next_query_and_for_no_other(pool: ChildPool[list[str]]) -> None:
    assert await ask(pool, "a", "mine") == ["mine"]
    assert await ask(pool, "b") == []
    assert await ask(pool, "a") == ["mine"]


async def test_an_idle_child_is_ended_after_a_while() -> None:
    pool: ChildPool[list[str]] = ChildPool(list, idle=0.1)
    await ask(pool, "a", "mine")
    await asyncio.sleep(0.3)
    assert await ask(pool, "a") == []
    await pool.close()


async def test_the_longest_at_rest_makes_room(pool: ChildPool[list[str]]) -> None:
    await ask(pool, "a", "a")
    await ask(pool, "b", "b")
    assert await ask(pool, "c") == []
    assert await ask(pool, "b") == ["b"]
    assert await ask(pool, "a") == []


async def test_after_a_failure_a_child_is_not_used_again(pool: ChildPool[list[str]]) -> None:
    await ask(pool, "a", "mine")
    with pytest.raises(RuntimeError):
        async with pool.slot("tenant", "a"):
            raise RuntimeError
    assert await ask(pool, "a") == []


async def test_a_killed_child_says_so(pool: ChildPool[list[str]]) -> None:
    async with pool.slot("tenant", "a") as desk:
        desk.child.kill()
        with pytest.raises(ChildDied):
            await desk.child.run(CONTENTS)


async def test_after_closing_nothing_is_started() -> None:
    pool: ChildPool[list[str]] = ChildPool(list)
    await ask(pool, "a")
    await pool.close()
    with pytest.raises(Busy):
        await ask(pool, "a")


async def test_rows_are_added_changed_and_cleared() -> None:
    child = await Child.start(QueryLimits())
    call = [["c", "read_file"]]
    rows = [
        [1, 0, "system", "text", "live", "rules", None, "2026-01-01T10:00:00Z", 1, [], []],
        [2, 1, "assistant", "tool_call", "live", "read_file", "read_file", "2026-01-01T10:00:00Z", 1, call, []],
        [3, 1, "tool", "tool_result", "live", "one", None, "2026-01-01T10:00:00Z", 1, [], ["c"]],
        [4, 1, "tool", "tool_result", "live", "two", None, "2026-01-01T10:00:00Z", 1, [], ["unknown"]],
    ]
    await child.feed(frame({"add": rows}))
    await child.ready()
    result = await child.run("SELECT id, tool_name, created_at FROM messages WHERE turn = 1")
    time = "2026-01-01 10:00:00"
    assert result["rows"] == [[2, "read_file", time], [3, "read_file", time], [4, None, time]]
    await child.feed(frame({"mark": {"dropped": [3], "removed": [4]}}))
    assert (await child.run("SELECT id, status FROM messages"))["rows"] == [[2, "live"], [3, "dropped"]]
    await child.feed(frame({"mark": {"dropped": [], "removed": []}}))
    assert (await child.run("SELECT id, status FROM messages"))["rows"] == [[2, "live"], [3, "live"]]
    await child.feed(frame({"clear": True}))
    assert (await child.run("SELECT * FROM messages"))["rows"] == []
    child.kill()
    await child.ended()
