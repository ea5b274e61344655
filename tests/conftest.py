"""What all tests share: a private Postgres, a fresh database per test, the shared data, hypothesis's profiles.

One embedded server serves all workers of a run (the first starts it, the others join it), without flushing to disk.
``TEST_DATABASE_URL``, a superuser's, names a server to be used instead. The schema is migrated once into a template;
each test that asks for ``database`` gets a copy of it.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import hashlib
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import fastapi.dependencies.models
import pytest
from hypothesis import HealthCheck, settings

from tersely.embedded_postgres import open_embedded_postgres
from tersely.store.db.migrations import migrate

# The console script of the environment that runs the tests: what a user calls.
TERSELY = str(Path(sys.executable).with_name("tersely"))

SHARED_DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"

# The service's login in tests: owns the tables, as the user of a rented database does, and is no superuser.
OWNER = "tersely_test_owner"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A Postgres server for tests, its superuser's address, and the name of the migrated template."""

    admin_dsn: str
    password: str
    template: str

    def dsn(self, database: str, *, user: str | None = None) -> str:
        """The address of ``database`` for ``user``, by default for the superuser."""
        return _address(self.admin_dsn, database=database, user=user, password=self.password if user else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A test's own database: ``dsn`` for the service, ``admin_dsn`` for a superuser's look behind row security."""

    name: str
    dsn: str
    admin_dsn: str


def pytest_configure(config: pytest.Config) -> None:
    """The run, or with xdist its controller, makes a directory that the workers inherit by name."""
    if not hasattr(config, "workerinput"):
        run_dir = Path(tempfile.mkdtemp(prefix="tersely-test-", dir=_quickest_directory()))
        if os.geteuid() == 0:
            run_dir.chmod(0o711)  # root's Postgres runs as somebody else, who has to pass
        os.environ[_RUN_DIR] = str(run_dir)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Whoever made the run's directory removes what is left; its server has been stopped by the last user."""
    if hasattr(config, "workerinput"):
        return
    run_dir = Path(os.environ.pop(_RUN_DIR))
    given = os.environ.get("TEST_DATABASE_URL")
    if given and (run_dir / _TEMPLATE_LOCK).exists():
        _outside_of_any_loop(_drop_template(given, _template_name(run_dir)))
    shutil.rmtree(run_dir, ignore_errors=True)


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
    run_dir = Path(os.environ[_RUN_DIR])
    given = os.environ.get("TEST_DATABASE_URL")
    if given:
        yield _prepared(run_dir, given)
        return
    quick = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off", "max_connections": "300"}
    with open_embedded_postgres(run_dir, settings=quick) as postgres:
        yield _prepared(run_dir, postgres.admin_dsn)


@pytest.fixture
async def database(server: Server) -> AsyncIterator[Database]:
    """A fresh database with the current schema, dropped at the end."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {server.template} OWNER {OWNER} STRATEGY FILE_COPY")
    finally:
        await admin.close()
    yield Database(name=name, dsn=server.dsn(name, user=OWNER), admin_dsn=server.dsn(name))
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
    finally:
        await admin.close()


async def _execute(server: Server, statement: str) -> None:
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        await admin.execute(statement)
    finally:
        await admin.close()


@pytest.fixture(scope="module")
def store(server: Server) -> Iterator[Database]:
    """A database for the module, with the current schema."""
    name = f"tersely_test_{secrets.token_hex(6)}"
    with ThreadPoolExecutor(max_workers=1) as pool:

        def run(statement: str) -> None:
            pool.submit(asyncio.run, _execute(server, statement)).result()

        run(f"CREATE DATABASE {name} TEMPLATE {server.template} OWNER {OWNER} STRATEGY FILE_COPY")
        yield Database(name=name, dsn=server.dsn(name, user=OWNER), admin_dsn=server.dsn(name))
        run(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def data_directory() -> Path:
    """The data directory of services that run in the tests' own process."""
    return Path(os.environ[_RUN_DIR]) / "data"


def _quickest_directory() -> str:
    """Memory if there is enough of it: cloning a database there takes 15 ms, on a busy disk ten times that."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4_000_000_000:
        return str(memory)
    return "/tmp"


def _prepared(run_dir: Path, admin_dsn: str) -> Server:
    """The server with its template, which the first worker makes while the others wait."""
    with (run_dir / _TEMPLATE_LOCK).open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        password = lock.read()
        template = _template_name(run_dir)
        if not password:
            password = secrets.token_hex(16)
            server = Server(admin_dsn=admin_dsn, password=password, template=template)
            _outside_of_any_loop(_make_template(server))
            lock.write(password)
            lock.flush()
    return Server(admin_dsn=admin_dsn, password=password, template=template)


async def _make_template(server: Server) -> None:
    admin = await asyncpg.connect(server.admin_dsn)
    try:
        if not await admin.fetchval("SELECT 1 FROM pg_roles WHERE rolname = $1", OWNER):
            await admin.execute(f"CREATE ROLE {OWNER}")
        await admin.execute(f"ALTER ROLE {OWNER} LOGIN NOSUPERUSER NOBYPASSRLS CREATEROLE PASSWORD '{server.password}'")
        await admin.execute(f"CREATE DATABASE {server.template} OWNER {OWNER}")
        await migrate(server.dsn(server.template, user=OWNER))
    finally:
        await admin.close()


async def _drop_template(admin_dsn: str, template: str) -> None:
    admin = await asyncpg.connect(admin_dsn)
    try:
        await admin.execute(f"DROP DATABASE IF EXISTS {template} WITH (FORCE)")
    finally:
        await admin.close()


def _template_name(run_dir: Path) -> str:
    return f"tersely_template_{hashlib.sha256(run_dir.name.encode()).hexdigest()[:12]}"


def _outside_of_any_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end without touching the event loop of the calling thread."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, work).result()


def _address(dsn: str, *, database: str, user: str | None, password: str | None) -> str:
    parts = urlsplit(dsn)
    netloc = parts.netloc
    if user is not None:
        netloc = f"{quote(user)}:{quote(password or '')}@{netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=netloc, path=f"/{database}"))
