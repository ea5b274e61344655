"""Everything that can fail: three replicas behind nginx, Postgres, PgBouncer, the model's host and the summarizer's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import aiohttp
import asyncpg
import psutil

from tersely.embedded_postgres import open_embedded_postgres
from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tersely.store.db.connection import Database
from tersely.store.db.migrations import migrate
from tests.conftest import TERSELY, quickest_directory
from tests.faults.ways import Way, open_way
from tests.support.conversations import script
from tests.support.processes import ROOT, postgres_of, postmaster
from tests.support.tenants import tenant
from tests.support.upstreams import Model, scripted

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
OWNER = "faults_owner"
DATABASE = "faults"
DISK_BYTES = 48 * 1024 * 1024
CONNECTIONS = 60
OPTIONS = {
    "TERSELY_DATABASE_TIMEOUT": "2",
    "TERSELY_DATABASE_POOL": "6",
    "TERSELY_FAIL_OPEN": "on",
    "TERSELY_CONNECT_TIMEOUT": "2",
    "TERSELY_FIRST_BYTE_TIMEOUT": "3",
    "TERSELY_IDLE_TIMEOUT": "3",
    "TERSELY_SUMMARIZER_MODEL": "m",
    "TERSELY_SUMMARIZER_API_KEY": "k",
    "TERSELY_SUMMARIZER_TIMEOUT": "2",
    "TERSELY_SUMMARIZER_DAILY_CALLS": "1000000",
    "TERSELY_SUMMARIZER_DAILY_TOKENS": "1000000000",
    "TERSELY_STRATEGY": json.dumps({"name": "trim", "max_context_turns": 4}),
    "TERSELY_LOG_LEVEL": "warning",
}
_NGINX = """
daemon off; pid {home}/nginx.pid; error_log {home}/nginx.log error; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off; {paths}
    upstream all {{ {all} }}
    upstream sharing {{ {sharing} }}
    {servers}
}}
"""
# A request that could not be handed to a replica goes to another one; one that was sent is not sent again.
_SERVER = """
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 128m;
        location / {{
            proxy_pass http://{name}; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_set_header Host 127.0.0.1; proxy_buffering off; proxy_request_buffering off;
            proxy_connect_timeout 2s; proxy_read_timeout 60s; proxy_next_upstream error;
        }}
    }}
"""


@dataclass(slots=True)
class Program:
    """A process that can be killed, stopped, resumed and started again."""

    command: list[str]
    home: Path
    name: str
    port: int
    environment: dict[str, str] | None = None
    account: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = (self.home / f"{self.name}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, **self.account
            )

    def family(self) -> list[psutil.Process]:
        """The process and its children; without those that run the agents' SQL."""
        if self.process is None:
            return []
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def send(self, number: int) -> None:
        for each in self.family():
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    async def kill(self) -> None:
        """Kill -9 the process alone; its children have to notice. Return when all are gone."""
        family = self.family()
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait, 10)
        await asyncio.to_thread(end, family[1:])

    async def restart(self) -> None:
        """Kill it and start it again."""
        await self.kill()
        self.start()


def end(processes: list[psutil.Process]) -> None:
    """Wait for processes that were left alone, then end what does not go."""
    for each in psutil.wait_procs(processes, 10)[1]:
        with suppress(psutil.NoSuchProcess):
            each.kill()


class Summaries:
    """A summarizer that answers at once."""

    def __call__(self, received: ReceivedRequest) -> ScriptedReply:
        return ScriptedReply(message={"role": "assistant", "content": f"A summary of {len(received.body)} bytes."})


@dataclass(slots=True)
class Rig:
    """The running system and what the faults take hold of."""

    home: Path
    postgres_dir: Path
    admin_dsn: str
    replicas: list[Program]
    nginx: Program
    pgbouncer: Program | None
    disk: Path | None
    data_dir: Path
    model: Model
    model_way: Way
    summarizer_way: Way
    url: str = ""
    sharing_url: str = ""
    key: str = ""
    starting: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    start_times: list[float] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """The further headers of a client of the rig."""
        return {"X-Tersely-Key": self.key} if self.key else {}

    def note_start(self, replica: Program) -> None:
        """Leave a replica out of what is expected to be healthy until it takes calls."""
        if earlier := self.starting.pop(replica.name, None):
            earlier.cancel()

        async def follow() -> None:
            began = time.monotonic()
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as http:
                await _takes_calls(http, f"http://127.0.0.1:{replica.port}")
            self.start_times.append(time.monotonic() - began)
            del self.starting[replica.name]

        self.starting[replica.name] = asyncio.create_task(follow())

    async def wait_started(self) -> None:
        """Wait until all replicas that were started again take calls."""
        while self.starting:
            await next(iter(self.starting.values()))

    def url_for(self, kind: str) -> str:
        """Deltas move between the replicas that share a spool; everything else between all."""
        return self.sharing_url if "delta" in kind or "named" in kind else self.url

    def postgres(self) -> list[psutil.Process]:
        return postgres_of(self.postgres_dir)

    def postmaster(self) -> psutil.Process:
        return postmaster(self.postgres_dir)

    @property
    def spool(self) -> Path:
        return self.data_dir / "spool"

    async def wait_healthy(self, limit: float, note: Callable[[str], None] = lambda _: None) -> float:
        """Wait until each replica takes a call and stores it; return after how many seconds that was.

        ``note`` takes a line on each replica.
        """
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=5)
        urls = {each.name: f"http://127.0.0.1:{each.port}" for each in self.replicas if each.name not in self.starting}

        async def wait(http: aiohttp.ClientSession, name: str, url: str) -> None:
            failures = await _takes_calls(http, url)
            note(f"{name} healthy after {time.monotonic() - began:.2f} s; before: {dict(failures)}")

        async with aiohttp.ClientSession(timeout=timeout, headers=self.headers) as http, asyncio.timeout(limit):
            through = {"nginx": self.url, "nginx sharing": self.sharing_url}
            await asyncio.gather(*(wait(http, name, url) for name, url in {**urls, **through}.items()))
        return time.monotonic() - began

    async def wait_for_spool(self, limit: float) -> float:
        """Wait until no exchange waits on disk; return after how many seconds that was."""
        began = time.monotonic()
        async with asyncio.timeout(limit):
            while any(path.stat().st_size > 16 for path in _existing(self.spool.glob("*/*.spool"))):
                await asyncio.sleep(0.05)
        return time.monotonic() - began

    def refused(self) -> list[str]:
        return [path.name for path in self.spool.glob("*/*.refused")]


def _existing(paths: Iterator[Path]) -> Iterator[Path]:
    return (path for path in paths if path.exists())


async def _takes_calls(http: aiohttp.ClientSession, url: str) -> Counter[str]:
    """Wait until a call is answered with the store; return how earlier ones failed."""
    failures: Counter[str] = Counter()
    while True:
        body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": f"hello {secrets.token_hex(8)}"}]}
        try:
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                text = (await response.read()).decode("utf-8", "replace")
                context = response.headers.get("x-tersely-context")
                if response.status == 200 and context in {"built", "passthrough"}:
                    return failures
                failures[f"{response.status} {context if response.status == 200 else text[:100]}"] += 1
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            failures[type(error).__name__] += 1
        await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@contextmanager
def small_disk(home: Path) -> Iterator[Path | None]:
    """A disk of its own for the spool, so that it can be filled; None where that is not permitted."""
    place = home / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)], capture_output=True, check=False
    )
    try:
        yield place if mounted.returncode == 0 else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=False)


async def _prepare(admin_dsn: str, owner_dsn: str, *, has_key: bool) -> str:
    """Make the schema, and a tenant with a key where one is needed. Returns the key."""
    admin = await asyncpg.connect(admin_dsn)
    try:
        await admin.execute(f"CREATE ROLE {OWNER} LOGIN NOSUPERUSER CREATEROLE PASSWORD 'faults'")
        await admin.execute(f"CREATE DATABASE {DATABASE} OWNER {OWNER}")
    finally:
        await admin.close()
    await migrate(owner_dsn)
    if not has_key:
        return ""
    store = Database(dsn=owner_dsn, size=1, timeout=10)
    await store.open()
    try:
        return (await tenant(store)).key
    finally:
        await store.close()


def _replica(home: Path, name: str, dsn: str, data_dir: Path, settings: Mapping[str, str], *more: str) -> Program:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TERSELY", "DATABASE"))}
    port = free_port()
    environment = {**clean, **OPTIONS, **settings, "DATABASE_URL": dsn, "TERSELY_DATA_DIR": str(data_dir)}
    return Program([TERSELY, "serve", "--port", str(port), *more], home, name, port, environment)


def _nginx(home: Path, replicas: list[Program], ports: tuple[int, int]) -> Program:
    assert NGINX is not None
    servers = [f"server 127.0.0.1:{each.port} max_fails=1 fail_timeout=1s;" for each in replicas]
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    text = _NGINX.format(
        home=home,
        paths="".join(f"{name}_temp_path {home}/{name};" for name in names),
        all=" ".join(servers),
        sharing=" ".join(servers[:2]),
        servers=_SERVER.format(port=ports[0], name="all") + _SERVER.format(port=ports[1], name="sharing"),
    )
    (home / "nginx.conf").write_text(text)
    return Program([NGINX, "-p", str(home), "-c", str(home / "nginx.conf")], home, "nginx", ports[0])


def _bouncer(home: Path, admin_dsn: str) -> Program | None:
    if PGBOUNCER is None:
        return None
    query = parse_qs(urlsplit(admin_dsn).query)
    owner = Path(query["host"][0]).stat()
    port = free_port()
    (home / "users").write_text(f'"{OWNER}" "faults"\n')
    (home / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={query['host'][0]} port={query['port'][0]}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = trust\n"
        f"auth_file = {home / 'users'}\npool_mode = transaction\ndefault_pool_size = 4\nserver_login_retry = 1\n"
    )
    account: dict[str, Any] = (
        {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    )
    return Program([PGBOUNCER, "-q", str(home / "pgbouncer.ini")], home, "pgbouncer", port, None, account)


async def wait_for_port(port: int, limit: float = 20) -> None:
    async with asyncio.timeout(limit):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def open_rig(rng: random.Random, **options: str) -> AsyncIterator[Rig]:
    """The whole system for the length of the block. ``options``: further variables of the replicas."""
    home = Path(tempfile.mkdtemp(prefix="tersely-faults-", dir=quickest_directory()))
    home.chmod(0o755)
    async with AsyncExitStack() as stack:
        enter: Callable[[Any], Any] = stack.enter_context
        stack.callback(shutil.rmtree, home, ignore_errors=True)
        disk = enter(small_disk(home))
        postgres_dir = home / "postgres"
        settings = {"max_connections": str(CONNECTIONS), "shared_buffers": "32MB"}
        postgres = await stack.enter_async_context(_in_thread(open_embedded_postgres(postgres_dir, settings=settings)))
        stack.callback(_end_postgres, postgres_dir)
        query = parse_qs(urlsplit(postgres.admin_dsn).query)
        place = f"host={quote(query['host'][0])}&port={query['port'][0]}"
        dsn = f"postgresql://{OWNER}:faults@/{DATABASE}?{place}"
        key = await _prepare(postgres.admin_dsn, dsn, has_key=options.get("TERSELY_AUTH") == "keys")
        model, summarizer = enter(scripted()), enter(scripted())
        model.state.script, summarizer.state.script = script, Summaries()
        way = await stack.enter_async_context(open_way(int(model.url.split(":")[2].split("/")[0]), rng))
        other = await stack.enter_async_context(open_way(int(summarizer.url.split(":")[2].split("/")[0]), rng))
        root = f"http://127.0.0.1:{way.port}"
        hosts = {
            "TERSELY_OPENAI_BASE_URL": f"{root}/v1",
            "TERSELY_ANTHROPIC_BASE_URL": root,
            "TERSELY_GEMINI_BASE_URL": root,
            "TERSELY_GEMINI_GCA_BASE_URL": root,
            "TERSELY_SUMMARIZER_BASE_URL": f"http://127.0.0.1:{other.port}/v1",
            **options,
        }
        bouncer = _bouncer(home, postgres.admin_dsn)
        data_dir = (disk or home) / "data"
        third = dsn if bouncer is None else f"postgresql://{OWNER}:faults@127.0.0.1:{bouncer.port}/{DATABASE}"
        replicas = [
            _replica(home, "workers", dsn, data_dir, hosts, "--workers", "2"),
            _replica(home, "replica", dsn, data_dir, hosts),
            _replica(home, "pooled", third, data_dir, hosts),
        ]
        ports = free_port(), free_port()
        nginx = _nginx(home, replicas, ports)
        for program in (bouncer, *replicas, nginx):
            if program is not None:
                program.start()
                stack.callback(_end, program)
        rig = Rig(
            home=home,
            postgres_dir=postgres_dir,
            admin_dsn=postgres.admin_dsn.replace("/tersely?", f"/{DATABASE}?"),
            replicas=replicas,
            nginx=nginx,
            pgbouncer=bouncer,
            disk=disk,
            data_dir=data_dir,
            model=model,
            model_way=way,
            summarizer_way=other,
            url=f"http://127.0.0.1:{ports[0]}",
            sharing_url=f"http://127.0.0.1:{ports[1]}",
            key=key,
        )
        await rig.wait_healthy(300)
        yield rig


@asynccontextmanager
async def _in_thread(context: Any) -> AsyncIterator[Any]:
    value = await asyncio.to_thread(context.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def _end(program: Program) -> None:
    family = program.family()
    program.send(signal.SIGCONT)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family, 10)
    if program.process is not None:
        program.process.wait(10)


def _end_postgres(directory: Path) -> None:
    for each in postgres_of(directory):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGCONT)
