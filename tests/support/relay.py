"""A TCP relay to the database that can be cut, refused or frozen; on a cluster, to each of its nodes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit, urlunsplit

from tersely.store.db import connection
from tersely.store.db.cluster import Address
from tersely.store.db.server import DatabaseServer, ServerKind
from tests.conftest import Database
from tests.support.loops import Background, background


class _Line:
    """A port of this machine that leads to a Postgres server."""

    def __init__(self, host: str, port: int | None) -> None:
        """``port``: None if ``host`` is the path of a socket."""
        self._host = host
        self._target_port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        listener.close()

    async def open(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    async def freeze(self) -> None:
        await self.open()
        self._flowing.clear()

    async def close(self) -> None:
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
        if self._target_port is None:
            return await asyncio.open_unix_connection(self._host)
        return await asyncio.open_connection(self._host, self._target_port)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


class Relay:
    """The TCP ways to the database, which can be cut, refused or frozen. ``dsn`` goes through them: a store that is
    opened with it reaches the other nodes of a cluster by relays too.
    """

    def __init__(self, database: Database) -> None:
        target = urlsplit(database.dsn)
        query = parse_qs(target.query)
        if "host" in query:
            line = _Line(f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}", None)
        else:
            line = _Line(target.hostname or "127.0.0.1", target.port or 5432)
        self._nodes = {node: _Line(*node) for node in database.nodes}
        self._lines = (line, *self._nodes.values())
        self._there: Background | None = None
        user = target.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(target._replace(netloc=f"{user}@127.0.0.1:{line.port}", query=""))

    def freeze_node(self, node: tuple[str, int]) -> None:
        """Let one node of a cluster accept, and say nothing more."""
        self._run(self._nodes[node].freeze())

    def restore(self) -> None:
        """Let everything through."""
        self._run(*(line.open() for line in self._lines))

    def freeze(self) -> None:
        """Accept, and say nothing more."""
        self._run(*(line.freeze() for line in self._lines))

    def cut(self) -> None:
        """Break all connections and refuse new ones."""
        self._run(*(line.close() for line in self._lines))

    def _run(self, *works: Coroutine[Any, Any, None]) -> None:
        assert self._there is not None
        for work in works:
            self._there.run(work)

    def address(self, node: Address) -> Address:
        """The relay's own address of a node. The coordinator's is that of ``dsn``."""
        return None if node is None else ("127.0.0.1", self._nodes[node].port)


@contextmanager
def _nodes_by(relay: Relay) -> Iterator[None]:
    """Let stores that are opened with the relay's address reach nodes by relays."""
    connect = connection.Database._connect

    def connect_by_relay(store: connection.Database, kind: ServerKind, address: Address) -> DatabaseServer:
        return connect(store, kind, relay.address(address) if store._dsn == relay.dsn else address)

    with patch.object(connection.Database, "_connect", connect_by_relay):
        yield


@contextmanager
def relay(database: Database) -> Iterator[Relay]:
    """A way to ``database`` for the length of the block; open at first."""
    made = Relay(database)
    with background() as there, _nodes_by(made):
        made._there = there
        made.restore()
        try:
            yield made
        finally:
            made.cut()
