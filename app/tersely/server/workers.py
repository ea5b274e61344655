"""Servers that end in order, and the supervisor of worker processes.

Workers are forked from a process that has imported everything and started nothing (`tersely.server.preloaded`): one
that was killed is replaced in a moment, whatever else the machine does, and all share what was imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from typing_extensions import override
from uvicorn._subprocess import subprocess_started
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess, multiprocess
from uvicorn.supervisors.multiprocess import Process

from tersely.api.proxy import ProxyRoutes

# Seconds between looks at whether a worker listens, and between signals to workers that are to end.
LOOK_EVERY = 0.05
TELL_EVERY = 0.2
# How often the start of a worker is tried.
MOST_STARTS = 10
# What a worker's exit code is if the process that it was forked from was killed.
UNKNOWN = 255

_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["tersely.server.preloaded"])


class GracefulServer(uvicorn.Server):
    """Listens on while open calls end, and refuses new ones meanwhile; a second signal ends them at once."""

    is_hurried = False

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        application = self.config.loaded_app
        if isinstance(application, ProxyRoutes):
            await application.shutdown.drain(lambda: self.is_hurried)
        await super().shutdown(sockets)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.is_hurried = self.should_exit
        super().handle_exit(sig, frame)
        self.force_exit = False  # what was stored until now is still to be written


class _WorkerServer(GracefulServer):
    """The server of one worker. Its parent tells it to hurry, since a signal may come to the whole group and from the
    parent.
    """

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError:  # it cannot listen, and so could no other one
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)

    def hurry(self) -> None:
        """Give up on requests that are under way."""
        self.is_hurried = True


class _Worker(Process):
    """A worker process, with a server that ends in order."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        arguments = {"config": config, "target": self.target, "sockets": sockets, "stdin_fileno": None}
        self.process = _forking.Process(target=subprocess_started, kwargs=arguments)  # type: ignore[assignment]
        self._pinged_at: float | None = None

    @override
    def start(self) -> None:
        for left in reversed(range(MOST_STARTS)):
            try:
                super().start()
            except (EOFError, ConnectionError) as error:
                # The process that workers are forked from was killed meanwhile. The next start makes another one.
                if not left:
                    raise RuntimeError("no worker can be started: what they are forked from ends each time") from error
                time.sleep(LOOK_EVERY)
            else:
                return

    @property
    @override
    def server(self) -> uvicorn.Server:
        if self._server is None:
            self._server = _WorkerServer(config=self.config)
        return self._server

    @override
    def target(self, sockets: list[socket.socket] | None = None) -> None:
        server = self.server
        assert isinstance(server, _WorkerServer)
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_DFL)  # which the process it was forked from ignores
        signal.signal(signal.SIGUSR1, lambda *_: server.hurry())
        super().target(sockets)

    @override
    def is_alive(self, timeout: float = 5) -> bool:
        """Return False if the process has ended, or has not answered a ping for ``timeout`` seconds.

        uvicorn waits for the answer. Meanwhile it would replace no worker that is killed, not even this one.
        """
        if not self.process.is_alive():
            return False
        try:
            if self._pinged_at is None:
                self.parent_conn.send(b"ping")
                self._pinged_at = time.monotonic()
            if self.parent_conn.poll():
                self.parent_conn.recv()
                self._pinged_at = None
        except (OSError, EOFError):
            return False
        return self._pinged_at is None or time.monotonic() - self._pinged_at < timeout

    @override
    def kill(self) -> None:
        if self.exitcode == UNKNOWN and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        super().kill()


class Workers(Multiprocess):
    """The supervisor of workers. It ends when the terminal is closed, where uvicorn would restart its workers. A second
    signal hurries them.
    """

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        hangup = signal.getsignal(signal.SIGHUP)
        super().__init__(config, sockets)
        self._ends = 0
        self.has_failed = False
        if hangup is signal.SIG_IGN:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def wait_until_listening(self, address: tuple[Any, ...]) -> bool:
        """Wait until a worker takes connections: only then does anybody listen, so that a client or a load balancer
        goes elsewhere until then. Return False if the service ends before.
        """
        while not self.should_exit.wait(LOOK_EVERY):
            with suppress(OSError), socket.create_connection(address[:2], timeout=1):
                return True
        return False

    @override
    def init_processes(self) -> None:
        multiprocess.Process = _Worker  # type: ignore[misc]
        super().init_processes()

    @override
    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        self.has_failed = any(each.exitcode == STARTUP_FAILURE for each in self.processes)

    @override
    def handle_int(self) -> None:
        self._ends += 1
        super().handle_int()

    @override
    def handle_term(self) -> None:
        self._ends += 1
        super().handle_term()

    @override
    def handle_hup(self) -> None:
        self.handle_term()

    @override
    def join_all(self) -> None:
        while running := [each for each in self.processes if each.exitcode is None]:
            # A worker that was still starting may have kept the parent from hearing the first signal in time.
            self._ends += sum(sig in (signal.SIGTERM, signal.SIGINT) for sig in self.signal_queue)
            self.signal_queue.clear()
            if self._ends > 1:
                self._ends = 1
                for each in running:
                    if each.pid is not None:
                        os.kill(each.pid, signal.SIGUSR1)
            running[0].process.join(TELL_EVERY)
            for each in running:  # one that was just forked may not have heard it
                if each.pid is not None and each.exitcode is None:
                    os.kill(each.pid, signal.SIGTERM)
