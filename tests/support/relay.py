"""A TCP relay to the database that can be cut, refused or frozen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from tests.conftest import Database
from tests.support.loops import Background, background


class Relay:
    """A TCP way to the database that can be cut, refused or frozen. ``dsn`` goes through it."""

    def __init__(self, database: Database) -> None:
        self._target = urlsplit(database.dsn)
        self._there: Background | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        listener.close()

    @property
    def dsn(self) -> str:
        user = self._target.netloc.rpartition("@")[0]
        return urlunsplit(self._target._replace(netloc=f"{user}@127.0.0.1:{self.port}", query=""))

    def restore(self) -> None:
        """Let everything through."""
        self._run(self._open())

    def freeze(self) -> None:
        """Accept, and say nothing more."""
        self._run(self._freeze())

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._run(self._close())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._there is not None
        self._there.run(work)

    async def _open(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def _freeze(self) -> None:
        await self._open()
        self._flowing.clear()

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._connect()
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, OSError):
                return
            raise
        if self._server is None:  # it was cut meanwhile
            writer.transport.abort()
            back.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back))
                group.create_task(self._pump(there, writer))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, back):
                self._writers.discard(each)
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._target.query)
        if "host" in query:
            return await asyncio.open_unix_connection(f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}")
        return await asyncio.open_connection(self._target.hostname, self._target.port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


@contextmanager
def relay(database: Database) -> Iterator[Relay]:
    """A way to ``database`` for the length of the block; open at first."""
    made = Relay(database)
    with background() as there:
        made._there = there
        made.restore()
        try:
            yield made
        finally:
            made.cut()
