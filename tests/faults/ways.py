"""The way to a model host, which can misbehave as hosts do."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

Mode = Literal["open", "refuse", "reset", "hang", "garbage", "drip"]
MODES: tuple[Mode, ...] = ("refuse", "reset", "hang", "garbage", "drip")
# What a broken host or something in front of it answers.
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is not HTTP\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 27\r\n\r\n<html>Please log in.</html>",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 900\r\n\r\n" + b'{"choices": [' * 8,
    b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {"id": [\x00\xff\r\n\r\n',
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: text/html\r\ncontent-length: 11\r\n\r\nBad Gateway",
)  # fmt: skip
# Bytes and seconds of a host that drips.
DROP, DROP_SECONDS = 16, 0.01
_RESET = struct.pack("ii", 1, 0)


class Way:
    """A TCP relay to a port of this machine. ``mode`` counts for connections that stand, too."""

    def __init__(self, target: int, rng: random.Random) -> None:
        self.mode: Mode = "open"
        self.port = 0
        self._target = target
        self._rng = rng
        self._changed = asyncio.Event()
        self._connections: set[asyncio.StreamWriter] = set()

    def become(self, mode: Mode) -> None:
        """Behave like that from now on."""
        self.mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "refuse":
            for each in list(self._connections):
                reset(each)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection."""
        if self.mode == "refuse":
            reset(writer)
            return
        back: asyncio.StreamWriter | None = None
        self._connections.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, back))
                group.create_task(self._replies(there, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(writer)
            writer.transport.abort()
            if back is not None:
                back.transport.abort()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError

    async def _replies(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            while self.mode == "hang":
                await self._changed.wait()
            match self.mode:
                case "reset":
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    reset(writer)
                    raise ConnectionResetError
                case "garbage":
                    writer.write(self._rng.choice(GARBAGE))
                    await writer.drain()
                    raise ConnectionResetError
                case "drip":
                    for start in range(0, len(data), DROP):
                        writer.write(data[start : start + DROP])
                        await writer.drain()
                        if self.mode == "drip":
                            await asyncio.sleep(DROP_SECONDS)
                case _:
                    writer.write(data)
                    await writer.drain()
        raise ConnectionResetError


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a reset."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


@asynccontextmanager
async def open_way(target: int, rng: random.Random) -> AsyncIterator[Way]:
    """Relay for the length of the block."""
    way = Way(target, rng)
    server = await asyncio.start_server(way.handle, "127.0.0.1", 0)
    way.port = server.sockets[0].getsockname()[1]
    try:
        yield way
    finally:
        server.close()
        way.become("refuse")
