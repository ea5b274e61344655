"""Fixtures of all tests: a private Postgres, a fresh database per test, the shared data, hypothesis's profiles.

One embedded server serves all workers of a run (the first starts it, the others join it), without flushing to disk.
``TEST_DATABASE_URL``, a superuser's, names a server to be used instead. The schema is migrated once into a template;
each test that asks for ``database`` gets a copy of it. ``TERSELY_TEST_DISTRIBUTED_URL``, a superuser's, names the
coordinator of a Citus cluster to be used instead: there the template is distributed, and copied on every node.
"""

from __future__ import annotations

import asyncio
import compileall
import fcntl
import gc
import hashlib
import itertools
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import fastapi.dependencies.models
import pytest
from hypothesis import HealthCheck, settings

from tersely.embedded_postgres import open_embedded_postgres
from tersely.store.db.distribution import distribute
from tersely.store.db.migrations import migrate
from tests.support.tls import share_contexts

T = TypeVar("T")

# The console script of the environment that runs the tests: what a user calls.
TERSELY = str(Path(sys.executable).with_name("tersely"))

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"

# The service's login in tests: owns the tables, as the user of a rented database does, and is no superuser.
OWNER = "tersely_test_owner"

_DISTRIBUTED = "TERSELY_TEST_DISTRIBUTED_URL"
# Few parts make few files to copy for each test, and each worker still gets some.
SHARDS = 6

_RUN_DIR = "TERSELY_TEST_RUN_DIR"
_TEMPLATE_LOCK = "template.lock"

# FastAPI remembers every route function for good, and with it the service that the function belongs to.
_ROUTE_CACHES = [each for each in vars(fastapi.dependencies.models).values() if hasattr(each, "cache_clear")]

# Every so many tests the services of past tests are collected: they are cyclic garbage.
TESTS_BETWEEN_COLLECTIONS = 25
_tests = itertools.count(1)

# The same examples at every run: what fails, fails because of a change. HYPOTHESIS_PROFILE=random looks for more.
settings.register_profile(
    "same", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "same")

share_contexts()


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A Postgres server for tests, its superuser's address, and the name of the migrated template."""

    admin_dsn: str
    password: str
    template: str
    nodes: tuple[tuple[str, int], ...] = ()
    """The workers of a Citus cluster, beside the server itself."""

    @property
    def admin_dsns(self) -> list[str]:
        """The superuser's addresses of the server and the other nodes."""
        return [self.admin_dsn, *(_at(self.admin_dsn, host, port) for host, port in self.nodes)]

    def dsn(self, database: str, *, user: str | None = None) -> str:
        """The address of ``database`` for ``user``, by default for the superuser."""
        return _address(self.admin_dsn, database=database, user=user, password=self.password if user else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A test's own database: ``dsn`` for the service, ``admin_dsn`` for a superuser's look behind row security."""

    name: str
    dsn: str
    admin_dsn: str
    nodes: tuple[tuple[str, int], ...] = ()
    """The workers of a Citus cluster, by host and port."""


def pytest_configure(config: pytest.Config) -> None:
    """The run, or with xdist its controller, makes a directory that the workers inherit by name."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: the servers of the tests would keep to that
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if not hasattr(config, "workerinput"):
        # Hundreds of tests start processes, each of which would compile the service for .6 s where Python may not keep
        # bytecode (PYTHONDONTWRITEBYTECODE).
        compileall.compile_dir(ROOT / "app", quiet=2)
        run_dir = Path(tempfile.mkdtemp(prefix="tersely-test-", dir=quickest_directory()))
        if os.geteuid() == 0:
            run_dir.chmod(0o711)  # root's Postgres runs as somebody else, who has to pass
        os.environ[_RUN_DIR] = str(run_dir)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whoever made the run's directory removes what is left; its server has been stopped by the last user."""
    if hasattr(config, "workerinput"):
        return
    run_dir = Path(os.environ.pop(_RUN_DIR))
    given = _given_server()
    if given and (run_dir / _TEMPLATE_LOCK).exists():
        _outside_of_any_loop(_drop_template(given, _template_name(run_dir)))
    shutil.rmtree(run_dir, ignore_errors=True)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Packed bytes are named by their parameter: gzip writes the time into them, and workers must name tests alike."""
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_runtest_logfinish() -> None:
    """Free the services of past tests: a service has the collector run rarely."""
    if next(_tests) % TESTS_BETWEEN_COLLECTIONS == 0:
        for cache in _ROUTE_CACHES:
            cache.cache_clear()
        gc.collect()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of shared test data; without it the test is skipped."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no shared test data at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The Postgres server of this run, with the schema in a template database."""
    from tests.support.rows import close_looks  # which imports this module

    run_dir = Path(os.environ[_RUN_DIR])
    given = _given_server()
    with ExitStack() as stack:
        if not given:
            quick = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "300"}
            given = stack.enter_context(open_embedded_postgres(run_dir, settings=quick)).admin_dsn
        stack.callback(close_looks)
        yield _prepared(run_dir, given)


@pytest.fixture
async def database(server: Server) -> AsyncIterator[Database]:
    """A fresh database with the current schema, dropped at the end."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    await _execute(server, _copy(server, name))
    yield _database(server, name)
    await _execute(server, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def _database(server: Server, name: str) -> Database:
    dsn = server.dsn(name, user=OWNER)
    return Database(name=name, dsn=dsn, admin_dsn=server.dsn(name), nodes=server.nodes)


def _copy(server: Server, name: str) -> str:
    return f"CREATE DATABASE {name} TEMPLATE {server.template} OWNER {OWNER} STRATEGY FILE_COPY"


async def _execute(server: Server, statement: str) -> None:
    """Execute a statement on every node."""
    for dsn in server.admin_dsns:
        admin = await asyncpg.connect(dsn)
        try:
            await admin.execute(statement)
        finally:
            await admin.close()


@contextmanager
def new_database(server: Server) -> Iterator[Database]:
    """A database with the current schema for the length of the block."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    with ThreadPoolExecutor(max_workers=1) as pool:

        def run(statement: str) -> None:
            pool.submit(asyncio.run, _execute(server, statement)).result()

        run(_copy(server, name))
        try:
            yield _database(server, name)
        finally:
            run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def store(server: Server) -> Iterator[Database]:
    """A database for the module, with the current schema."""
    with new_database(server) as made:
        yield made


def data_directory() -> Path:
    """The data directory of services that run in the tests' own process."""
    return Path(os.environ[_RUN_DIR]) / "data"


def quickest_directory(*, runs_programs: bool = False) -> str:
    """Memory if there is enough of it, and if programs that lie there may run where that is needed. Cloning a database
    there takes 15 ms, on a busy disk ten times that; a server that flushes to a busy disk waits for seconds.
    """
    memory = Path("/dev/shm")
    if (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free > 4_000_000_000
        and not (runs_programs and os.statvfs(memory).f_flag & os.ST_NOEXEC)
    ):
        return str(memory)
    return "/tmp"


def _prepared(run_dir: Path, admin_dsn: str) -> Server:
    """The server with its template, which the first worker makes while the others wait."""
    with (run_dir / _TEMPLATE_LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        password = lock.read()
        nodes = _outside_of_any_loop(_workers(admin_dsn)) if os.environ.get(_DISTRIBUTED) else ()
        server = Server(
            admin_dsn=admin_dsn,
            password=password or secrets.token_hex(16),
            template=_template_name(run_dir),
            nodes=nodes,
        )
        if not password:
            _outside_of_any_loop(_make_template(server))
            lock.write(server.password)
            lock.flush()
    return server


def _given_server() -> str | None:
    return os.environ.get(_DISTRIBUTED) or os.environ.get("TEST_DATABASE_URL")


async def _workers(admin_dsn: str) -> tuple[tuple[str, int], ...]:
    """Return host and port of the cluster's workers."""
    admin = await asyncpg.connect(admin_dsn)
    try:
        found = await admin.fetch("SELECT nodename, nodeport FROM pg_dist_node WHERE groupid > 0 ORDER BY groupid")
    finally:
        await admin.close()
    assert found, f"{_DISTRIBUTED} names no Citus coordinator with workers"
    return tuple((node["nodename"], node["nodeport"]) for node in found)


async def _make_template(server: Server) -> None:
    for dsn in server.admin_dsns:
        admin = await asyncpg.connect(dsn)
        try:
            if server.nodes:
                await admin.execute("SET citus.enable_ddl_propagation = off")
            if not await admin.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", OWNER):
                await admin.execute(f"CREATE ROLE {OWNER}")
            await admin.execute(
                f"ALTER ROLE {OWNER} LOGIN NOSUPERUSER NOBYPASSRLS CREATEROLE PASSWORD '{server.password}'"
            )
            await admin.execute(f"CREATE DATABASE {server.template} OWNER {OWNER}")
        finally:
            await admin.close()
    if server.nodes:
        await _join_template(server)
    owner = server.dsn(server.template, user=OWNER)
    await migrate(owner)
    if server.nodes:
        await distribute(owner, shards=SHARDS, report=print)
        await _execute(server, f"ALTER DATABASE {server.template} WITH ALLOW_CONNECTIONS false")
        await _execute(
            server, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{server.template}'"
        )


async def _join_template(server: Server) -> None:
    """Make a cluster of the template's databases. What Citus knows of its nodes is in the database, and copied with
    it.
    """
    for dsn in reversed(server.admin_dsns):  # the coordinator last, which adds the others
        admin = await asyncpg.connect(_address(dsn, database=server.template))
        try:
            await admin.execute("CREATE EXTENSION citus")
            if dsn == server.admin_dsn:
                at = urlsplit(dsn)
                await admin.fetch("SELECT citus_set_coordinator_host($1, $2)", at.hostname, at.port or 5432)
                for host, port in server.nodes:
                    await admin.fetch("SELECT citus_add_node($1, $2)", host, port)
        finally:
            await admin.close()


async def _drop_template(admin_dsn: str, template: str) -> None:
    nodes = await _workers(admin_dsn) if os.environ.get(_DISTRIBUTED) else ()
    server = Server(admin_dsn=admin_dsn, password="", template=template, nodes=nodes)
    await _execute(server, f"DROP DATABASE IF EXISTS {template} WITH (FORCE)")


def _template_name(run_dir: Path) -> str:
    return f"tersely_template_{hashlib.sha256(run_dir.name.encode()).hexdigest()[:12]}"


def _outside_of_any_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end without touching the event loop of the calling thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()


def _at(dsn: str, host: str, port: int) -> str:
    """The same address on another node."""
    parts = urlsplit(dsn)
    login, separator, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{separator}{host}:{port}"))


def _address(dsn: str, *, database: str, user: str | None = None, password: str | None = None) -> str:
    parts = urlsplit(dsn)
    netloc = parts.netloc
    if user is not None:
        netloc = f"{quote(user)}:{quote(password or '')}@{netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, path=f"/{database}"))
