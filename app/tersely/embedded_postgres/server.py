"""Start, join, watch and stop the embedded Postgres.

A lock that all server processes inherit shows whether the server lives; pid files are not used. The kernel releases the
lock with the last process. A second lock, shared by every service, shows who uses the server. A third lock is held
while a process starts, joins or leaves the server, so that no two processes decide at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from tersely.embedded_postgres.cluster import (
    DATABASE,
    PORT,
    SUPERUSER,
    Layout,
    choose_layout,
    create_cluster,
    forget_dead_server,
    make_home,
    server_environment,
)
from tersely.embedded_postgres.errors import EmbeddedPostgresError
from tersely.embedded_postgres.locks import FileLock, exclusive, is_held
from tersely.embedded_postgres.postmaster import find_postmaster, is_listening, readiness

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_POLL_SECONDS = 0.02
_WATCH_SECONDS = 1.0
_PROGRESS_SECONDS = 10.0
_LONGEST_PAUSE_SECONDS = 30.0
_LOG_BYTES = 4_000_000

# Settings on the command line, which the code relies on whatever postgresql.conf contains. The log has errors without
# statements and values, since these are conversations.
_FIXED_SETTINGS = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "full_page_writes": "on",
    "logging_collector": "off",
    "log_destination": "stderr",
    "log_checkpoints": "off",
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
    "log_parameter_max_length_on_error": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedPostgres:
    """A running server. ``started``: by this process, rather than joined."""

    socket_dir: Path
    database: str
    started: bool

    @property
    def admin_dsn(self) -> str:
        """For migrations: the role that owns the cluster, exempt from row-level security."""
        return self.dsn_for(SUPERUSER)

    def dsn_for(self, role: str, *, database: str | None = None) -> str:
        """For ``role``, which must exist; in ``database`` instead of Tersely's own, if given."""
        name = quote(database or self.database, safe="")
        return f"postgresql://{quote(role, safe='')}@/{name}?host={quote(str(self.socket_dir))}&port={PORT}"


@asynccontextmanager
async def embedded_postgres(
    data_dir: Path,
    *,
    start_timeout: float = 600.0,
    stop_timeout: float = 30.0,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[EmbeddedPostgres]:
    """Start the Postgres of ``data_dir``, or join it if it runs already; leave it at the end.

    While the block runs, a server that dies is started again under the same address. At the end the last user stops it.
    ``start_timeout`` (seconds) limits the wait for a server that is still recovering, not for one that has failed.
    ``stop_timeout`` limits the orderly stop, after which the server is killed and recovers at its next start.
    ``settings`` are added to Postgres's command line, and count only if this process starts the server. Raises
    EmbeddedPostgresError.
    """
    server = _PostgresServer(data_dir, start_timeout=start_timeout, stop_timeout=stop_timeout, settings=settings or {})
    running = await _to_the_end(server.open, on_cancel=server.abandon, undo=server.close)
    try:
        yield running
    finally:
        await _to_the_end(server.close)


@contextmanager
def open_embedded_postgres(
    data_dir: Path,
    *,
    start_timeout: float = 600.0,
    stop_timeout: float = 30.0,
    silent_timeout: float | None = None,
    turn_timeout: float | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[EmbeddedPostgres]:
    """``embedded_postgres`` for code without an event loop.

    ``silent_timeout`` (seconds) limits the wait for another process's server that accepts connections and answers none,
    and ``turn_timeout`` that for another process which starts or stops the server; by default ``start_timeout`` alone
    does.
    """
    server = _PostgresServer(
        data_dir,
        start_timeout=start_timeout,
        stop_timeout=stop_timeout,
        silent_timeout=silent_timeout,
        turn_timeout=turn_timeout,
        settings=settings or {},
    )
    running = server.open()
    try:
        yield running
    finally:
        server.close()


class _PostgresServer:
    """One process's part in a server: opened once, watched by a thread of its own, closed once."""

    def __init__(
        self,
        data_dir: Path,
        *,
        start_timeout: float,
        stop_timeout: float,
        settings: Mapping[str, str],
        silent_timeout: float | None = None,
        turn_timeout: float | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._silent_timeout = start_timeout if silent_timeout is None else silent_timeout
        self._turn_timeout = start_timeout if turn_timeout is None else turn_timeout
        self._settings = settings
        self._child: subprocess.Popen[bytes] | None = None
        self._leaving = threading.Event()
        self._watcher: threading.Thread | None = None
        self._start_lock: Path
        self._layout: Layout
        self._use: FileLock

    def open(self) -> EmbeddedPostgres:
        """Start or join."""
        self._start_lock = make_home(self._data_dir) / "start.lock"
        with self._deciding(self._turn_timeout):
            self._layout = choose_layout(self._start_lock.parent)
            self._use = FileLock(self._layout.service_lock)
            try:
                if not self._use.try_shared():
                    raise EmbeddedPostgresError(f"another process holds {self._layout.service_lock} for itself alone")
                self._ensure_running()
            except BaseException:
                self._leave()
                raise
        self._watcher = threading.Thread(target=self._watch, name="embedded-postgres", daemon=True)
        self._watcher.start()
        return EmbeddedPostgres(socket_dir=self._layout.socket_dir, database=DATABASE, started=self._child is not None)

    def abandon(self) -> None:
        """Make a pending ``open`` give up soon."""
        self._leaving.set()

    def close(self) -> None:
        """Leave the server, and stop it if nobody else uses it."""
        self._leaving.set()
        if self._watcher is not None:
            self._watcher.join()
        try:
            with exclusive(
                self._start_lock,
                deadline=time.monotonic() + self._stop_timeout,
                abandoned=lambda: False,
            ):
                self._leave()
        except EmbeddedPostgresError:
            # Another process is starting or joining the server, and will stop it.
            _log.warning("the embedded Postgres keeps running for another process")
            self._use.close()

    def _deciding(self, timeout: float) -> contextlib.AbstractContextManager[None]:
        return exclusive(self._start_lock, deadline=time.monotonic() + timeout, abandoned=self._leaving.is_set)

    def _ensure_running(self) -> None:
        """Return when a server is ready, started now if none lived. Under the start lock."""
        deadline = time.monotonic() + self._start_timeout
        while True:
            if is_listening(self._layout.socket):
                if self._wait_until_ready(deadline):
                    return
            elif not is_held(self._layout.cluster_lock):
                self._start()
                if self._wait_until_ready(deadline):
                    return
            # Otherwise a server without a listener is alive: it has just been started, or its main process was killed
            # and the others are about to notice.
            self._pause(deadline)

    def _start(self) -> None:
        layout = self._layout
        durable = self._settings.get("fsync", "on") == "on"
        lock = FileLock(layout.cluster_lock)
        try:
            if not lock.try_exclusive():
                return
            create_cluster(layout, durable=durable)
            forget_dead_server(layout)
            self._child = self._spawn(lock)
        finally:
            lock.close()

    def _spawn(self, lock: FileLock) -> subprocess.Popen[bytes]:
        layout = self._layout
        settings = {**_FIXED_SETTINGS, "unix_socket_directories": str(layout.socket_dir), **self._settings}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log = os.open(layout.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            return subprocess.Popen(
                [str(layout.install.program("postgres")), "-D", str(layout.cluster), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=dict(server_environment()),
                pass_fds=(lock.fd,),
                # A session of its own: Ctrl-C in a terminal is for the service, which stops the server when it is done.
                start_new_session=True,
                **layout.account.popen_arguments(),
            )
        finally:
            os.close(log)

    def _wait_until_ready(self, deadline: float) -> bool:
        """Return True when the server is ready, False if it is gone and was started by another process.

        Raise an error if our own server ended, or if another process's server listens and is silent. Only ``deadline``
        limits our own start: recovery takes as long as there is log to replay, and a busy machine delays the first
        answer.
        """
        progress = time.monotonic() + _PROGRESS_SECONDS
        silent_since: float | None = None
        while (state := readiness(self._layout)) != "ready":
            if self._child is not None and self._child.poll() is not None:
                status, self._child = self._child.returncode, None
                raise EmbeddedPostgresError(f"Postgres ended with status {status} while starting; {self._log_tail()}")
            if self._child is None and not is_held(self._layout.cluster_lock):
                return False
            if state != "silent" or self._child is not None or not is_listening(self._layout.socket):
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > self._silent_timeout:
                raise EmbeddedPostgresError(
                    f"the embedded Postgres in {self._layout.home} accepts connections and answers none: its processes "
                    "are stopped, or the machine is overloaded; try again, or restart the service"
                )
            if time.monotonic() > progress:
                progress += _PROGRESS_SECONDS
                _log.info("the embedded Postgres is still starting: %s", state)
            self._pause(deadline)
        return True

    def _pause(self, deadline: float) -> None:
        if self._leaving.wait(_POLL_SECONDS):
            raise EmbeddedPostgresError("the start of Postgres was cancelled")
        if time.monotonic() > deadline:
            raise EmbeddedPostgresError(f"Postgres was not ready after {self._start_timeout:.0f} s; {self._log_tail()}")

    def _leave(self) -> None:
        """Stop the server if nobody else uses it. The start lock must be held."""
        try:
            if self._use.try_exclusive():
                self._stop()
        finally:
            self._use.close()
            if self._child is not None and self._child.poll() is None:
                # The server continues for others, who will stop it. Popen would warn about a child without a wait.
                self._child.returncode = 0

    def _stop(self) -> None:
        """Ask for an orderly stop, then insist. Returns when no process of the server is left."""
        send, release = self._signaller()
        try:
            for number, patience in (
                (signal.SIGINT, self._stop_timeout),
                (signal.SIGQUIT, 10.0),
                (signal.SIGKILL, 5.0),
            ):
                send(number)
                deadline = time.monotonic() + patience
                while time.monotonic() < deadline:
                    if self._has_ended():
                        return
                    time.sleep(_POLL_SECONDS)
        finally:
            release()
        _log.warning("the embedded Postgres could not be stopped")

    def _signaller(self) -> tuple[Callable[[signal.Signals], None], Callable[[], None]]:
        """Return a function that signals the server, and one to call afterwards."""
        if self._child is not None and self._child.poll() is None:
            return self._child.send_signal, lambda: None
        postmaster = find_postmaster(self._layout)
        if postmaster is None:
            return (lambda _: None), (lambda: None)
        return postmaster.send, postmaster.close

    def _has_ended(self) -> bool:
        if self._child is not None and self._child.poll() is None:
            return False
        return not is_held(self._layout.cluster_lock)

    def _is_alive(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return is_held(self._layout.cluster_lock)

    def _watch(self) -> None:
        """Bring a server back that died, until leaving. The body of a thread."""
        pause = _WATCH_SECONDS
        while not self._leaving.wait(pause):
            pause = _WATCH_SECONDS
            try:
                self._bound_log()
                if self._is_alive():
                    continue
                _log.error("the embedded Postgres has died; starting it again")
                self._child = None
                with self._deciding(self._start_timeout):
                    self._ensure_running()
                _log.info("the embedded Postgres is back")
            except (EmbeddedPostgresError, OSError) as error:
                if not self._leaving.is_set():
                    _log.error("the embedded Postgres does not come back: %s", error)
                pause = _LONGEST_PAUSE_SECONDS

    def _bound_log(self) -> None:
        """Rotate the server's log when it is large. The server appends, so it continues at the beginning."""
        with contextlib.suppress(FileNotFoundError):
            if self._layout.log.stat().st_size > _LOG_BYTES:
                shutil.copyfile(self._layout.log, self._layout.log.with_name("server.log.1"))
                os.truncate(self._layout.log, 0)

    def _log_tail(self) -> str:
        try:
            text = self._layout.log.read_text(errors="replace")
        except OSError as error:
            return f"its log {self._layout.log} cannot be read: {error.strerror}"
        return f"the end of its log {self._layout.log}: {text[-1500:].strip()}"


async def _to_the_end(
    work: Callable[[], _T], *, on_cancel: Callable[[], None] | None = None, undo: Callable[[], None] | None = None
) -> _T:
    """Run ``work`` in a thread. When cancelled, still wait for it, so that nothing continues unseen.

    ``on_cancel`` tells it to hurry; ``undo`` reverts what it achieved meanwhile.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work))  # noqa: TID251 -- awaited below, in every case
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        await asyncio.wait([task])
        if task.exception() is None and undo is not None:
            await asyncio.to_thread(undo)
        raise
