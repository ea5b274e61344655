"""`query_db` under attack: every statement is refused or bounded, and the service goes on serving."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tersely.sandbox import child
from tests.api.conftest import Api, serve
from tests.conftest import Database

LIMITS = child.QueryLimits()
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
# A text of 4 MiB; a function that spins over it cannot be interrupted, only killed.
LONG = (
    "(WITH RECURSIVE r(s, n) AS (SELECT 'aaaaaaaa', 1 UNION ALL SELECT s || s, n + 1 FROM r WHERE n < 20) "
    "SELECT s FROM r WHERE n = 20)"
)
SPINNING = (
    f"SELECT s LIKE '%_a_a_a_a_a_a_a_a_a_a_a_a_a_a_a_a_a_ab%_c' OR instr(s, substr(s, 1, 2000000) || 'b') FROM {LONG}"
)

REFUSED = [
    "DELETE FROM messages",
    "WITH x AS (SELECT 1) UPDATE messages SET content = ''",
    "WITH x AS (SELECT 1) INSERT INTO messages SELECT * FROM messages",
    "SELECT 1; DELETE FROM messages",
    "CREATE TABLE t (a)",
    "CREATE TEMP VIEW v AS SELECT 1",
    "PRAGMA query_only = OFF",
    "ATTACH '/etc/passwd' AS x",
    "SELECT load_extension('/tmp/x.so')",
    "SELECT readfile('/etc/passwd')",
    "SELECT edit('x')",
    "SELECT * FROM sqlite_master",
    "SELECT count(*) FROM sqlite_master",
    "SELECT count(*) FROM sqlite_schema",
    "SELECT 1 FROM sqlite_temp_schema, messages",
    "SELECT * FROM pragma_database_list",
    "SELECT count(*) FROM pragma_function_list",
    "SELECT * FROM dbstat",
    "SELECT count(*) FROM dbstat",
    "SELECT count(*) FROM fts5vocab",
    "SELECT 1 FROM sqlite_stmt",
    "SELECT * FROM bytecode('SELECT 1')",
    "SELECT sqlite_compileoption_get(0)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT zeroblob(1000000000)",
    "EXPLAIN SELECT 1",
    "BEGIN",
    "VACUUM INTO '/tmp/x'",
]
DOUBLING = [
    "c0 AS (SELECT id FROM messages)",
    *(f"c{n} AS (SELECT a.id FROM c{n - 1} a, c{n - 1} b)" for n in range(1, 25)),
]
BOUNDED = [
    ENDLESS,
    "SELECT count(*) FROM messages a, messages b, messages c, messages d",
    "SELECT group_concat(a.content || b.content) FROM messages a, messages b, messages c",
    "SELECT count(*) FROM (SELECT DISTINCT a.content || b.content || c.id FROM messages a, messages b, messages c)",
    f"SELECT s, s, s, s, s, s, s, s, s, s FROM {LONG}",
    f"SELECT hex(hex(s)) FROM {LONG}",
    f"SELECT replace(s, 'a', s) FROM {LONG}",
    f"SELECT json_array(s, s, s) FROM {LONG}",
    SPINNING,
    "SELECT " + "(" * 5_000 + "1" + ")" * 5_000,
    "SELECT " + " + ".join(["1"] * 5_000),
    " UNION ALL ".join(["SELECT 1"] * 500),
    "SELECT " + ", ".join(f"'{'x' * 100}' AS \"{'n' * 1_000}{number}\"" for number in range(15)),
    f"WITH {', '.join(DOUBLING)} SELECT count(*) FROM c24",
]


def children() -> list[psutil.Process]:
    """The processes that queries run in."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if str(Path(child.__file__)) in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


async def ask(api: Api, sql: str, session: str = "s") -> httpx.Response:
    return await api.post_raw(f"/api/sessions/{session}/query", json.dumps({"sql": sql}).encode())


async def fill(api: Api, *, count: int = 300) -> None:
    text = "abc 0123456789 lorem ipsum " * 10
    roles = ("user", "assistant")
    await api.append("s", *({"role": roles[n % 2], "content": f"{n} {text}"} for n in range(count)))
    await api.append("other", {"role": "user", "content": "SECRET_OTHER"})


@asynccontextmanager
async def others_served(api: Api, *, within: float) -> AsyncIterator[None]:
    """Asks for the service's health all the while; each answer comes ``within`` so many seconds."""
    slowest = 0.0

    async def watch() -> None:
        nonlocal slowest
        while True:
            start = time.monotonic()
            assert (await api.http.get("/healthz")).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.02)

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        yield
        assert not watching.done(), watching.exception()
    finally:
        watching.cancel()
    assert slowest < within


async def attack(api: Api, sql: str, expected: str) -> str | None:
    """Return the fault of the answer; None if there is none."""
    start = time.monotonic()
    answer = await ask(api, sql)
    took = time.monotonic() - start
    where = f"{expected}: {sql[:80]!r}"
    if answer.status_code != 422 and (expected == "refused" or answer.status_code != 200):
        return f"{where} was answered with {answer.status_code}"
    if "SECRET_OTHER" in answer.json().get("rows", "").__repr__() or len(answer.content) > 2_000_000:
        return f"{where} gave more than it may"
    # The bounds of the query itself, and what a loaded machine needs to start a new process after a kill.
    return f"{where} took {took:.1f} s" if took > LIMITS.hard + 8 else None


@pytest.mark.parametrize("sql", REFUSED)
async def test_attacks_are_refused(api: Api, sql: str) -> None:
    await fill(api, count=4)
    assert await attack(api, sql, "refused") is None
    assert (await ask(api, "SELECT count(*) FROM messages")).json()["rows"] == [[4]]


@pytest.mark.slow
async def test_bounded_while_others_are_served(api: Api) -> None:
    await fill(api)
    async with others_served(api, within=2.0):
        for sql in BOUNDED:
            assert await attack(api, sql, "bounded") is None
    assert (await ask(api, "SELECT count(*) FROM messages")).json()["rows"] == [[300]]


@pytest.mark.slow
async def test_collected_attacks(api: Api, shared_data: Path) -> None:
    collected = shared_data / "sql_attacks_dev.json"
    if not collected.is_file():
        pytest.skip(f"no collected attacks at {collected}")
    attacks = json.loads(collected.read_text())
    assert attacks
    await fill(api, count=2_000)
    async with others_served(api, within=2.0):
        wrong = [await attack(api, each["sql"], each["expect"]) for each in attacks]
    assert [each for each in wrong if each] == []


async def test_a_runaway_is_stopped_and_a_spinning_one_killed(api: Api) -> None:
    await fill(api, count=4)
    for sql in (ENDLESS, SPINNING):
        start = time.monotonic()
        async with others_served(api, within=1.5):
            answer = await ask(api, sql)
        assert answer.status_code == 422
        assert "more than 2 seconds" in answer.json()["detail"]
        assert time.monotonic() - start < LIMITS.hard + 3
    assert (await ask(api, "SELECT count(*) FROM messages")).json()["rows"] == [[4]]


async def test_twenty_attacks_at_once_are_bounded(api: Api) -> None:
    await fill(api, count=50)
    sqls = [f"SELECT count(*) + {n} FROM messages" for n in range(20)]
    answers = await asyncio.gather(*(ask(api, sql, ("s", "other")[n % 2]) for n, sql in enumerate(sqls)))
    assert [each.json()["rows"] for each in answers] == [[[(50, 1)[n % 2] + n]] for n in range(20)]
    assert 1 <= len(children()) <= 4


async def test_children_that_somebody_kills_are_replaced(api: Api) -> None:
    await fill(api, count=4)
    counting = "SELECT count(*) FROM messages"
    assert (await ask(api, counting)).json()["rows"] == [[4]]
    (resting,) = children()
    resting.kill()
    resting.wait(5)
    await asyncio.sleep(0.1)
    assert (await ask(api, counting)).json()["rows"] == [[4]]
    running = asyncio.get_running_loop().create_task(ask(api, ENDLESS))
    await asyncio.sleep(0.5)
    for process in children():
        process.kill()
    assert (await running).status_code == 422
    assert (await ask(api, counting)).json()["rows"] == [[4]]


async def test_sandboxed_process_has_no_files_environment_or_free_limits(api: Api) -> None:
    await fill(api, count=4)
    await ask(api, "SELECT 1")
    (process,) = children()
    assert process.cwd() == "/"
    if os.name == "posix" and Path("/proc").is_dir():
        proc = Path("/proc") / str(process.pid)
        assert sorted(each.name for each in (proc / "fd").iterdir()) == ["0", "1", "2"]
        assert b"=" not in (proc / "environ").read_bytes()
        limits = {line[:25].strip(): line[25:].split()[0] for line in (proc / "limits").read_text().splitlines()}
        assert limits["Max open files"] == "3"
        assert limits["Max file size"] == limits["Max processes"] == limits["Max core file size"] == "0"
        assert limits["Max address space"] == str(LIMITS.address_space)
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
        assert status["NoNewPrivs"] == "1"
        if os.geteuid() == 0:
            assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(child.NOBODY)}
            assert status["Groups"].split() == []


async def test_nothing_is_left_after_closing(database: Database) -> None:
    async with serve(database.dsn) as api:
        await fill(api, count=4)
        await asyncio.gather(*(ask(api, "SELECT 1", name) for name in ("s", "other")))
        await ask(api, SPINNING)
        assert children()
        running = asyncio.get_running_loop().create_task(ask(api, ENDLESS))
        await asyncio.sleep(0.3)
    assert children() == []
    assert not [each for each in psutil.Process().children() if each.status() == psutil.STATUS_ZOMBIE]
    assert (await running).status_code in (422, 500, 503)


async def test_a_caller_who_goes_away_leaves_nothing_running(api: Api) -> None:
    await fill(api, count=4)
    running = asyncio.get_running_loop().create_task(ask(api, ENDLESS))
    await asyncio.sleep(0.5)
    assert len(children()) == 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for _ in range(50):
        if not children():
            break
        await asyncio.sleep(0.05)
    assert children() == []
