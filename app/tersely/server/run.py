"""Running the service: the database, the scripted model, the workers."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from urllib.parse import urlsplit

import uvicorn
from typing_extensions import override

from tersely.api.transport.protocol import DeadlineProtocol
from tersely.api.transport.request_ids import current as current_request_id
from tersely.composition.application import build
from tersely.fakellm.scripted import ScriptedModel, run_scripted
from tersely.server.database import AWAY, database_of, plainly
from tersely.server.embedded_server import KEEP_ALIVE
from tersely.server.errors import CommandError
from tersely.server.host_check import check_hosts_in_background
from tersely.server.workers import GracefulServer, Workers
from tersely.settings import (
    LOOPBACK,
    Settings,
    load_settings,
    unknown_settings,
    unknown_settings_in_files,
)
from tersely.store.db.migrations import migrate

_log = logging.getLogger("tersely")

DATABASE_VARIABLE = "TERSELY_RUNNING_DATABASE_URL"
UPSTREAM_VARIABLE = "TERSELY_RUNNING_UPSTREAM"
LOCAL_VARIABLE = "TERSELY_RUNNING_LOCAL"
# What is left to do after the calls have ended, in seconds.
LAST_SECONDS = 5
BACKLOG = 2048
# A worker that does not answer its parent for so long is replaced. On a busy machine its imports alone may take 5 s.
HEALTH_SECONDS = 60
# While the database is prepared, a line says so this often.
REPORT_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `tersely serve`."""

    host: str
    port: int
    workers: int
    is_scripted: bool


def serve_forever(serving: ServeOptions) -> None:
    """Serve as configured until a signal ends the service. Raises `CommandError` for an insecure configuration."""
    with plainly():
        _serve(load_settings(), serving)


def _serve(settings: Settings, serving: ServeOptions) -> None:
    if serving.host not in LOOPBACK and settings.auth != "keys" and not settings.insecure:
        raise CommandError(
            f"{serving.host} is not loopback: set TERSELY_AUTH=keys (and create a key), "
            "or TERSELY_INSECURE=1 to let everybody in"
        )
    log_as_json(settings.log_level)
    for complaint in (*unknown_settings(os.environ), *unknown_settings_in_files()):
        _log.warning("%s", complaint)
    _limit_headers(settings)
    # The server raises a signal again once it is done. By default that would end the process with the database left
    # running.
    signal.signal(signal.SIGTERM, _leave)
    _on_hangup(_leave)
    sockets = bind(serving.host, serving.port)
    if not serving.is_scripted:
        _check_hosts(settings, serving.host, sockets[0].getsockname()[1])
    with ExitStack() as stack, suppress(KeyboardInterrupt):
        with _progress("preparing the database"):
            url = stack.enter_context(database_of(settings, is_command=False))
            _migrate_if_there(url)
        upstream = stack.enter_context(_scripted()) if serving.is_scripted else None
        if serving.workers == 1:
            _serve_here(settings, serving, url, upstream, sockets)
        else:
            _serve_in_workers(settings, serving, url, upstream, sockets, stack)


@contextmanager
def _progress(work: str) -> Iterator[None]:
    """Report every few seconds that ``work`` goes on: as text on a terminal, else as a log line."""
    is_done = threading.Event()
    began = time.monotonic()

    def report() -> None:
        while not is_done.wait(REPORT_SECONDS):
            text = f"{work}: {time.monotonic() - began:.0f} s so far; a first start takes longest"
            if sys.stderr.isatty():
                print(text, file=sys.stderr, flush=True)
            else:
                _log.info("%s", text)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _check_hosts(settings: Settings, host: str, port: int) -> None:
    """Raise `CommandError` if a model host is this service: it would send every call to itself without an end."""
    own = LOOPBACK | {host, "0.0.0.0", "::"}  # noqa: S104 these are compared, not bound
    for name, address in settings.base_urls():
        parts = urlsplit(address)
        if parts.hostname in own and (parts.port or (443 if parts.scheme == "https" else 80)) == port:
            raise CommandError(f"{name}: {parts.hostname}:{port} is this service itself: name the model host")


def _limit_headers(settings: Settings) -> None:
    for name in ("header_timeout", "header_bytes", "header_count", "header_connections"):
        setattr(DeadlineProtocol, name, getattr(settings, name))


def _leave(number: int, _frame: object) -> None:
    """End in order; a second signal does not disturb that."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(0)


def _on_hangup(handler: Callable[[int, FrameType | None], object]) -> None:
    """End the service when its terminal is closed, unless it was started to survive that (``nohup``)."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets for all addresses of ``host``, on one port. Raises `CommandError`."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound_port = sockets[0].getsockname()[1] if sockets else port
            one = socket.socket(family, socket.SOCK_STREAM)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind((address[0], bound_port, *address[2:]))
            except OSError as error:
                one.close()
                if error.errno != errno.EADDRNOTAVAIL or len(found) == 1:
                    raise
                continue  # a name may have an address that this machine lacks
            one.set_inheritable(True)
            sockets.append(one)
    except OSError as error:
        raise _unusable(host, port, error) from error
    if not sockets:
        raise CommandError(f"cannot listen on {host}:{port}: this machine does not have that address")
    return sockets


def _unusable(host: str, port: int, error: OSError) -> CommandError:
    if error.errno == errno.EADDRINUSE:
        return CommandError(f"port {port} of {host} is in use: choose another one with --port")
    return CommandError(f"cannot listen on {host}:{port}: {error.strerror or type(error).__name__}")


def _serve_here(
    settings: Settings, serving: ServeOptions, url: str, upstream: str | None, sockets: list[socket.socket]
) -> None:
    application = build(_behind(settings, upstream), database_url=url, is_local=serving.host in LOOPBACK)
    config = _config(application, serving)
    server = _AnnouncingServer(config, settings, is_scripted=serving.is_scripted)
    _on_hangup(lambda _, frame: server.handle_exit(signal.SIGTERM, frame))
    try:
        server.run(sockets)
    except OSError as error:  # another server was quicker
        raise _unusable(serving.host, serving.port, error) from error


def _serve_in_workers(
    settings: Settings,
    serving: ServeOptions,
    url: str,
    upstream: str | None,
    sockets: list[socket.socket],
    stack: ExitStack,
) -> None:
    """Serve with several worker processes. They get their configuration through the environment."""
    directory = tempfile.mkdtemp(prefix="tersely-metrics-")
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
    os.environ[DATABASE_VARIABLE] = url
    if serving.host in LOOPBACK:
        os.environ[LOCAL_VARIABLE] = "1"
    if upstream is not None:
        os.environ[UPSTREAM_VARIABLE] = upstream
    workers = Workers(_config("tersely.server.run:worker", serving), sockets)
    address = sockets[0].getsockname()

    def greet() -> None:
        if workers.wait_until_listening(address):
            _greet(settings, serving.host, address[1], is_scripted=serving.is_scripted)

    threading.Thread(target=greet, name="greeting", daemon=True).start()
    workers.run()
    if workers.has_failed:
        try:
            for one in sockets:
                one.listen()
        except OSError as error:  # another server was quicker
            raise _unusable(serving.host, serving.port, error) from error
        raise CommandError("the workers do not start")


def worker() -> object:
    """Return the application of one worker."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the parent is told too, and ends its workers in order
    settings = load_settings()
    log_as_json(settings.log_level)
    _limit_headers(settings)
    threading.Thread(target=_follow_parent, name="parent", daemon=True).start()
    return build(
        _behind(settings, os.environ.get(UPSTREAM_VARIABLE)),
        database_url=os.environ[DATABASE_VARIABLE],
        is_local=LOCAL_VARIABLE in os.environ,
    )


def _behind(settings: Settings, upstream: str | None) -> Settings:
    """Return the settings with one host for all providers, if there is one."""
    if upstream is None:
        return settings
    others = dict.fromkeys(("anthropic_base_url", "gemini_base_url", "gemini_gca_base_url"), upstream)
    return settings.model_copy(update={**others, "openai_base_url": f"{upstream}/v1"})


def _follow_parent() -> None:
    """End a worker whose parent was killed: it would keep the port, and the database that was started for it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _config(application: object, serving: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        application,  # type: ignore[arg-type]
        factory=isinstance(application, str),
        host=serving.host,
        port=serving.port,
        workers=serving.workers,
        loop="uvloop",
        http=DeadlineProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=LAST_SECONDS,
        timeout_worker_healthcheck=HEALTH_SECONDS,
        backlog=BACKLOG,
    )


class _AnnouncingServer(GracefulServer):
    """The server. It prints the next steps once it listens."""

    def __init__(self, config: uvicorn.Config, settings: Settings, *, is_scripted: bool) -> None:
        super().__init__(config)
        self._settings = settings
        self._is_scripted = is_scripted

    @override
    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        await super().startup(sockets)  # type: ignore[arg-type]
        if self.started and self.servers:
            port = self.servers[0].sockets[0].getsockname()[1]
            _greet(self._settings, self.config.host, port, is_scripted=self._is_scripted)


def _greet(settings: Settings, host: str, port: int, *, is_scripted: bool) -> None:
    base = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if is_scripted:
        upstream = "the built-in scripted model: no key needed"
    else:
        parts = urlsplit(settings.openai_base_url)
        upstream = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
    print(
        f"Look at it: {base}/console (with a demo that needs no model key)\n"
        f"Tersely serves on {base}\n"
        f"  models:   {upstream}\n"
        f"  use it:   export OPENAI_BASE_URL={base}/v1   ANTHROPIC_BASE_URL={base}\n"
        f"  more:     {base}/docs   {base}/metrics\n"
        f"  stop:     Ctrl-C",
        flush=True,
    )
    if not is_scripted:
        check_hosts_in_background(settings)


def _migrate_if_there(url: str) -> None:
    """Bring the database up to date; without it, start all the same: calls go through, and the rest heals."""
    try:
        asyncio.run(migrate(url))
    except AWAY as error:
        _log.warning("the database is away, starting without it: %s", type(error).__name__)


@contextmanager
def _scripted() -> Iterator[str]:
    """The scripted model on a loopback port, in a thread of its own."""
    ready: threading.Event = threading.Event()
    stop: asyncio.Event | None = None
    loop = asyncio.new_event_loop()
    address = ""

    async def run() -> None:
        nonlocal stop, address
        stop = asyncio.Event()
        async with run_scripted("127.0.0.1", 0, ScriptedModel(takes_unknown=True)) as server:
            address = server.root
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="scripted-model", daemon=True)
    thread.start()
    if not ready.wait(10):
        raise CommandError("the scripted model did not start")
    try:
        yield address
    finally:
        assert stop is not None
        loop.call_soon_threadsafe(stop.set)
        thread.join(5)


class _JsonLines(logging.Formatter):
    """Format one JSON object per line.

    Of exceptions only type and location are logged, since texts may hold content.
    """

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        if isinstance(call := getattr(record, "call", None), dict):
            line |= call
        if record.exc_info and record.exc_info[0] is not None:
            frames = traceback.extract_tb(record.exc_info[2])[-12:]
            line["error"] = record.exc_info[0].__name__
            line["where"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
        return json.dumps(line, ensure_ascii=True)


def log_as_json(level: str) -> None:
    """Log to stderr, one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("alembic", "asyncio", "aiohttp.access", "uvicorn.access", "uvicorn.error", "httpx", "mcp"):
        quiet = max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()])
        logging.getLogger(noisy).setLevel(quiet if level != "debug" else logging.INFO)
