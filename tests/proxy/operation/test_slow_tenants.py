"""A tenant whose transactions take too long harms itself alone; a database that has stopped is noticed in time."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import pytest

from tersely.embedded_postgres import open_embedded_postgres
from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Store
from tersely.store.db.migrations import migrate
from tersely.store.ops import keys
from tests.conftest import Database, data_directory
from tests.store.test_distribution import on_one_server
from tests.support.conversations import waits_for_spool
from tests.support.http import STORED, Answered, body_of, post
from tests.support.loops import eventually
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

LIMIT = 1.0
TENANTS = ("north", "south", "east", "west", "up", "down")
POOL = 10
# More than the service has connections.
MANY = 16


@asynccontextmanager
async def superuser(database: Database) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def make_keys(database: Database) -> dict[str, str]:
    store = Store(dsn=database.dsn)
    await store.open()
    try:
        made = {}
        for name in TENANTS:
            made[name], stored = new_key(
                name, "", now=datetime.now(UTC), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32)
            )
            await keys.add(store, stored)
        return made
    finally:
        await store.close()


@pytest.fixture
async def tsk(database: Database) -> dict[str, str]:
    """A key of each tenant."""
    return await make_keys(database)


@pytest.fixture
def service(database: Database, model: Model, tmp_path: Path) -> Iterator[Service]:
    with serve(database, model.url, database_timeout=LIMIT, auth="keys", data_dir=tmp_path) as running:
        yield running


async def ask(service: Service, tsk: str, session: str, text: str = "hello") -> Answered:
    return await post(service, body_of(text), X_Tersely_Key=tsk, X_Tersely_Session=session)


async def ask_for(service: Service, tsk: str, seconds: float) -> list[Answered]:
    """Calls in new and in known sessions, one after the other."""
    answers: list[Answered] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        session = f"calm-{len(answers) // 2}"
        answers.append(await ask(service, tsk, session, f"question {len(answers)}"))
        await asyncio.sleep(0.02)
    return answers


async def fail_open_calls(service: Service) -> float:
    text = (await post(service, b"", method="GET", path="/metrics")).body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("tersely_fail_open_total{"))


async def is_ready(service: Service) -> bool:
    return (await post(service, b"", method="GET", path="/readyz?strict=1")).status == 200


async def running_statements(database: Database) -> int:
    async with superuser(database) as connection:
        return int(
            await connection.fetchval(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = $1 AND state = 'active' AND pid <> pg_backend_pid()",
                database.name,
            )
        )


def are_undisturbed(answers: list[Answered]) -> bool:
    assert len(answers) > 5
    assert {answer.status for answer in answers} == {200}
    assert {answer.context for answer in answers} <= STORED
    assert max(answer.seconds for answer in answers) < LIMIT
    return True


async def test_locked_rows_of_one_tenant_hold_up_no_other(
    service: Service, database: Database, tsk: dict[str, str]
) -> None:
    for name in TENANTS:
        assert (await ask(service, tsk[name], "first")).context in STORED
    async with superuser(database) as locker:
        await locker.execute("BEGIN")
        await locker.execute("SELECT FROM sessions WHERE tenant_id = 'north' FOR UPDATE")
        held_up = asyncio.gather(*(ask(service, tsk["north"], "first", f"held up {n}") for n in range(MANY)))
        answers = await ask_for(service, tsk["south"], 4 * LIMIT)
        assert await is_ready(service)
        assert await running_statements(database) <= POOL
        assert {answer.status for answer in await held_up} <= {200, 503}
        assert are_undisturbed(answers)
        assert await fail_open_calls(service) == 0
        await locker.execute("ROLLBACK")
    await waits_for_spool(service.url)
    acknowledged = [answer for answer in await held_up if answer.status == 200]
    assert {answer.context for answer in acknowledged} <= STORED
    stored = await query(service, "SELECT convert_from(raw, 'UTF8') AS raw FROM messages WHERE role = 'user'")
    for n, answer in enumerate(await held_up):
        assert sum(f'held up {n}"' in row["raw"] for row in stored) == (answer.status == 200)


async def test_locked_rows_of_five_tenants_hold_up_no_sixth(
    service: Service, database: Database, tsk: dict[str, str]
) -> None:
    *stuck, calm = TENANTS
    for name in TENANTS:
        assert (await ask(service, tsk[name], "first")).context in STORED
    async with superuser(database) as locker:
        await locker.execute("BEGIN")
        for name in stuck:
            await locker.execute("SELECT FROM sessions WHERE tenant_id = $1 FOR UPDATE", name)
        held_up = asyncio.gather(*(ask(service, tsk[name], "first", "held up") for name in stuck))
        await asyncio.sleep(0.2)
        answers = await ask_for(service, tsk[calm], LIMIT)
        assert are_undisturbed(answers)
        assert {answer.status for answer in await held_up} <= {200, 503}
        await locker.execute("ROLLBACK")
    await waits_for_spool(service.url)


@on_one_server  # a policy that waits cannot be distributed
async def test_slow_reads_of_one_tenant_hold_up_no_other(
    service: Service, database: Database, tsk: dict[str, str]
) -> None:
    for name in TENANTS:
        for n in range(MANY):
            assert (await ask(service, tsk[name], f"slow-{n}")).context in STORED
    async with superuser(database) as owner:
        await owner.execute(
            "CREATE POLICY slow ON messages AS RESTRICTIVE FOR SELECT "
            "USING (tenant_id <> 'north' OR pg_sleep(3) IS NOT NULL)"
        )
        try:
            sessions = range(MANY)
            path = "/api/sessions/slow-{}/messages"
            held_up = asyncio.gather(
                *(post(service, b"", method="GET", path=path.format(n), X_Tersely_Key=tsk["north"]) for n in sessions)
            )
            await asyncio.sleep(0.1)
            answers = await ask_for(service, tsk["south"], 3 * LIMIT)
            assert await is_ready(service)
            assert await running_statements(database) <= POOL
            assert are_undisturbed(answers)
        finally:
            await owner.execute("DROP POLICY slow ON messages")
        await held_up
    assert await fail_open_calls(service) == 0


@on_one_server  # the coordinator does not list the connections of nodes
async def test_a_lost_connection_is_no_lost_database(service: Service, database: Database, tsk: dict[str, str]) -> None:
    for name in TENANTS:
        assert (await ask(service, tsk[name], "first")).context in STORED
    async with superuser(database) as locker, superuser(database) as killer:
        await locker.execute("BEGIN")
        await locker.execute("SELECT FROM sessions WHERE tenant_id = 'north' FOR UPDATE")
        held_up = asyncio.create_task(ask(service, tsk["north"], "first"))
        calm = asyncio.create_task(ask_for(service, tsk["south"], LIMIT))
        killed = 0
        while not calm.done():
            killed += await killer.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = $1 AND wait_event_type = 'Lock'",
                database.name,
            )
            await asyncio.sleep(0.1)
        assert killed > 1
        assert are_undisturbed(await calm)
        assert (await held_up).status == 200
        await locker.execute("ROLLBACK")
    assert await fail_open_calls(service) == 0


@contextmanager
def stopped(backend: int) -> Iterator[None]:
    """Hold all processes of a server, found by one of its own, as a machine that hangs does."""
    postmaster = int(Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[1])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    processes = [postmaster, *map(int, children)]
    for each in processes:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in processes:
            os.kill(each, signal.SIGCONT)


@pytest.fixture
def own_server() -> Iterator[Database]:
    """A database on a server that no other test uses."""
    quick = {"fsync": "off", "full_page_writes": "off"}
    directory = data_directory() / secrets.token_hex(4)  # the server's own account may pass here
    with open_embedded_postgres(directory, settings=quick) as postgres:
        yield Database(name="tersely", dsn=postgres.admin_dsn, admin_dsn=postgres.admin_dsn)


async def test_a_server_that_stops_is_noticed_within_the_time_limit(
    own_server: Database, model: Model, tmp_path: Path
) -> None:
    await migrate(own_server.dsn)
    with serve(own_server, model.url, database_timeout=2 * LIMIT, data_dir=tmp_path / "data") as service:
        async with superuser(own_server) as connection:
            backend = await connection.fetchval("SELECT pg_backend_pid()")
            assert (await post(service, body_of("one"), X_Tersely_Session="a")).context in STORED
            with stopped(backend):
                begun = time.monotonic()
                first = await post(service, body_of("stopped"))
                assert (first.status, first.context) == (200, "fail-open")
                assert time.monotonic() - begun < 2 * LIMIT + 0.5
                for n in range(5):
                    answer = await post(service, body_of(f"soon {n}"))
                    assert (answer.status, answer.context) == (200, "fail-open")
                    assert answer.seconds < 0.3
                delta = await post(service, body_of("delta"), X_Tersely_Session="a")
                assert (delta.status, delta.headers["retry-after"]) == (503, "2")
                assert not await is_ready(service)

            async def is_back() -> bool:
                return (await post(service, body_of("back"))).context in STORED

            await eventually(is_back)
            await waits_for_spool(service.url)
            stored = await query(service, "SELECT convert_from(raw, 'UTF8') AS raw FROM messages WHERE role = 'user'")
            assert sum("soon" in row["raw"] or "stopped" in row["raw"] for row in stored) == 6
