"""A real PgBouncer in transaction mode between the service and Postgres: commands, migrations, and calls."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest

from tersely.store.db import liveness
from tersely.store.db.connection import Database as Store
from tersely.store.db.migrations import migrate
from tests.conftest import OWNER, TERSELY, Database, Server
from tests.store.test_distribution import on_one_server
from tests.support.conversations import Conversation, compare, converse, script, waits_for_spool
from tests.support.http import STORED
from tests.support.services import serve
from tests.support.upstreams import Model, scripted

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="pgbouncer is not installed")


def _version() -> tuple[int, ...]:
    if PROGRAM is None:
        return ()
    text = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in text.split()[1].split("."))


# What an operator may have set so that any client gets in.
IGNORING = "ignore_startup_parameters = role,plan_cache_mode,extra_float_digits"

# Its connections to the server.
POOL_SIZE = 3


@dataclass(slots=True)
class Bouncer:
    """A running PgBouncer."""

    port: int
    password: str
    process: subprocess.Popen[bytes]
    start: Callable[[], subprocess.Popen[bytes]]

    def dsn(self, database: str) -> str:
        return f"postgresql://{OWNER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def restart(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process = self.start()


# PgBouncer keeps prepared statements from 1.21 on.
KEEPS = "keeps statements"


@pytest.fixture(params=["refuses parameters", "ignores parameters", "is small", KEEPS])
def bouncer(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bouncer]:
    """PgBouncer in front of the tests' server."""
    parts = urlsplit(server.admin_dsn)
    query = parse_qs(parts.query)
    if "host" not in query:
        pytest.skip("the tests' server has no socket directory")
    owner = Path(query["host"][0]).stat()
    if request.param == KEEPS and _version() < (1, 21):
        pytest.skip("this pgbouncer keeps no prepared statements")
    home = tmp_path_factory.mktemp("bouncer")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (home / "users").write_text(f'"{OWNER}" "{server.password}"\n')
    keeps = "max_prepared_statements = 200" if request.param == KEEPS else ""
    more = {"ignores parameters": IGNORING, "is small": "max_client_conn = 3"}.get(request.param, keeps)
    (home / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={query['host'][0]} port={query['port'][0]}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {home / 'users'}\npool_mode = transaction\ndefault_pool_size = {POOL_SIZE}\n{more}\n"
    )
    is_root = os.geteuid() == 0
    for path in (home, *home.parents):
        if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
            path.chmod(0o755)  # readable for the account of the server, which PgBouncer runs under too

    def start() -> subprocess.Popen[bytes]:
        assert PROGRAM is not None
        account: dict[str, Any] = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if is_root else {}
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [PROGRAM, "-q", str(home / "pgbouncer.ini")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **account,
        )
        end = time.monotonic() + 10
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return process
            time.sleep(0.02)
        raise AssertionError("pgbouncer did not start")

    made = Bouncer(port, server.password, start(), start)
    yield made
    made.process.kill()
    made.process.wait(10)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with scripted() as running:
        running.state.script = script
        yield running


async def test_long_work_goes_on_while_all_connections_to_the_server_are_in_use(
    bouncer: Bouncer, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "ASK_EVERY", 0.3)
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 1.0)
    dsn = bouncer.dsn(database.name)
    connections = [await asyncpg.connect(dsn, statement_cache_size=0) for _ in range(POOL_SIZE)]
    try:
        for each in connections:
            await each.execute("BEGIN")
        async with liveness.ended_when_silent(dsn, connections[0]):
            await connections[0].execute("SELECT pg_sleep(2.5)")
        assert not connections[0].is_closed()
    finally:
        for each in connections:
            each.terminate()


async def test_migrations_and_keys_go_through_it(bouncer: Bouncer, server: Server, database: Database) -> None:
    empty = f"{database.name}_empty"
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {empty} OWNER {OWNER}")
        for _ in range(2):
            await migrate(bouncer.dsn(empty))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
        for arguments in (("keys", "create", "--tenant", "acme"), ("keys", "list"), ("migrate",)):
            done = await asyncio.to_thread(
                subprocess.run,
                [TERSELY, *arguments],
                cwd=ROOT,
                env={**clean, "DATABASE_URL": bouncer.dsn(empty)},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            if arguments[1:2] == ("create",):
                assert done.stdout.startswith("tsk_")
    finally:
        await admin.execute(f"DROP DATABASE IF EXISTS {empty} WITH (FORCE)")
        await admin.close()


async def test_calls_are_stored_through_it(bouncer: Bouncer, database: Database, model: Model, tmp_path: Path) -> None:
    dsn = bouncer.dsn(database.name)
    with serve(database, model.url, dsn=dsn, data_dir=tmp_path, database_timeout=3.0) as service:
        made = [Conversation(service.url, kind) for kind in ("chat", "chat delta", "anthropic stream", "responses") * 4]
        for found in await asyncio.gather(*(converse(each, 4) for each in made)):
            assert {got.context for got in found} <= STORED, found
        compared = await compare(database.admin_dsn, made)
        assert compared.is_right
        assert compared.acknowledged == 64

        bouncer.restart()
        await asyncio.gather(*(converse(each, 2) for each in made))
        await waits_for_spool(service.url)
        assert (await compare(database.admin_dsn, made)).is_right
        again = Conversation(service.url, "chat")
        assert {got.context for got in await converse(again, 2)} <= STORED


async def test_declared_as_keeping_statements_it_is_used_as_it_is(
    bouncer: Bouncer, database: Database, model: Model, tmp_path: Path
) -> None:
    """One that keeps none is found out at the first statement that it does not know."""
    dsn = bouncer.dsn(database.name)
    with serve(
        database, model.url, dsn=dsn, data_dir=tmp_path, database_timeout=3.0, database_pooler="prepared"
    ) as service:
        made = [Conversation(service.url, kind) for kind in ("chat", "chat delta", "anthropic stream", "responses") * 4]
        await asyncio.gather(*(converse(each, 3) for each in made))
        await waits_for_spool(service.url)
        again = [Conversation(service.url, "chat") for _ in range(4)]
        for found in await asyncio.gather(*(converse(each, 3) for each in again)):
            assert {got.context for got in found} <= STORED, found
        assert (await compare(database.admin_dsn, [*made, *again])).is_right


async def test_statements_outlive_transactions_where_it_keeps_them(
    request: pytest.FixtureRequest, bouncer: Bouncer, database: Database
) -> None:
    if request.node.callspec.params["bouncer"] != KEEPS:
        pytest.skip("it keeps none")
    store = Store(dsn=bouncer.dsn(database.name), size=1, timeout=5, pooler="prepared")
    await store.open()
    try:
        for _ in range(3):
            async with store.statements("north") as connection:
                assert await connection.fetchval("SELECT count(*) FROM sessions") == 0
        async with store.statements("north") as connection:
            kept = await connection.fetch("SELECT statement, generic_plans FROM pg_prepared_statements")
        assert [row["generic_plans"] for row in kept if row["statement"] == "SELECT count(*) FROM sessions"] == [3]
    finally:
        await store.close()


async def test_two_services_share_its_connections(
    bouncer: Bouncer, database: Database, model: Model, tmp_path: Path
) -> None:
    dsn = bouncer.dsn(database.name)
    with (
        serve(database, model.url, dsn=dsn, data_dir=tmp_path / "a", database_pool=1) as one,
        serve(database, model.url, dsn=dsn, data_dir=tmp_path / "b", database_pool=1) as other,
    ):
        made = [Conversation(service.url, "chat") for service in (one, other) * 6]
        for found in await asyncio.gather(*(converse(each, 4) for each in made)):
            assert {got.context for got in found} <= STORED, found
        assert (await compare(database.admin_dsn, made)).is_right


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InvalidSQLStatementNameError('prepared statement "__asyncpg_stmt_1__" does not exist'),
        asyncpg.DuplicatePreparedStatementError('prepared statement "__asyncpg_stmt_1__" already exists'),
        asyncpg.InvalidCachedStatementError("cached plan must not change result type"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_lost_statement_counts_as_away_and_heals(database: Database, error: Exception) -> None:
    store = Store(dsn=database.dsn, size=1, timeout=5)
    await store.open()
    try:
        with pytest.raises(Exception, match="the database is away"):
            async with store.transaction("north"):
                raise error
        async with store.transaction("north") as connection:
            assert await connection.fetchval("SELECT 1") == 1
    finally:
        await store.close()


@on_one_server  # no pooler stands before a node
async def test_a_real_lost_statement_heals(database: Database) -> None:
    """Another client of a pooler has thrown away all prepared statements."""
    store = Store(dsn=database.dsn, size=1, timeout=5)
    await store.open()
    try:
        async with store.statements("north") as connection:
            assert await connection.fetchval("SELECT count(*) FROM sessions") == 0
            await connection.execute("DEALLOCATE ALL")
        with pytest.raises(Exception, match="the database is away"):
            async with store.statements("north") as connection:
                await connection.fetchval("SELECT count(*) FROM sessions")
        for _ in range(2):
            async with store.statements("north") as connection:
                assert await connection.fetchval("SELECT count(*) FROM sessions") == 0
    finally:
        await store.close()


async def test_a_server_without_a_free_connection_is_waited_for(server: Server, database: Database) -> None:
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"ALTER DATABASE {database.name} CONNECTION LIMIT 2")
    finally:
        await admin.close()
    store = Store(dsn=database.dsn, size=8, timeout=5)
    await store.open()
    try:

        async def work() -> int:
            async with store.transaction("north") as connection:
                return int(await connection.fetchval("SELECT 1 FROM pg_sleep(0.2)"))

        assert await asyncio.gather(*(work() for _ in range(8))) == [1] * 8
        assert not store.is_away()
    finally:
        await store.close()


async def test_calls_wait_for_a_server_without_a_free_connection(
    server: Server, database: Database, model: Model, tmp_path: Path
) -> None:
    with serve(database, model.url, data_dir=tmp_path, database_pool=8, database_timeout=10.0) as service:
        admin = await asyncpg.connect(server.admin_dsn)
        try:
            await admin.execute(f"ALTER DATABASE {database.name} CONNECTION LIMIT 2")
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", database.name
            )
        finally:
            await admin.close()
        made = [Conversation(service.url, kind) for kind in ("chat", "chat delta", "anthropic stream", "responses") * 4]
        for found in await asyncio.gather(*(converse(each, 3) for each in made)):
            assert {got.context for got in found} <= STORED, found
