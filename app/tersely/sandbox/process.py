"""A child process: started, fed, asked, killed."""

from __future__ import annotations

import asyncio
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec

from tersely.domain.errors import Busy
from tersely.sandbox import child
from tersely.sandbox.child import QueryLimits

PROGRAM = Path(child.__file__)
# Bytes of a reply: more than `child.ANSWER` can become in JSON.
MAX_REPLY = 4 * 1024 * 1024
# Seconds that a child may take to read its input.
FEED_LIMIT = 10.0

ChildReply = dict[str, Any]

_encoder = msgspec.json.Encoder()


def frame(command: object) -> bytes:
    """A command as it is sent. Texts must be free of lone surrogates."""
    body = _encoder.encode(command)
    return struct.pack(">I", len(body)) + body


class Child:
    """One child process. It never holds rows of more than one session.

    After any failure it is dead; then only `kill` may be called.
    """

    def __init__(self, process: asyncio.subprocess.Process, limits: QueryLimits) -> None:
        self._process = process
        self._limits = limits
        self._is_killed = False

    @classmethod
    async def start(cls, limits: QueryLimits) -> Child:
        """Return a child without environment, descriptors of ours, or a terminal. Raises `Busy`."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(PROGRAM), *map(str, limits)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise Busy("no process can be started at the moment") from error
        return cls(process, limits)

    @property
    def is_alive(self) -> bool:
        """Return whether it can be used, as far as known."""
        return not self._is_killed and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Return whether it has been collected."""
        return self._process.returncode is not None

    async def feed(self, command: bytes) -> None:
        """Send a frame; no reply comes. Raises `ChildDied`."""
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(FEED_LIMIT):
                self._process.stdin.write(command)
                await self._process.stdin.drain()
        except (OSError, TimeoutError) as error:
            self.kill()
            raise ChildDied from error

    async def ready(self) -> None:
        """Wait until the child has stored all rows. Raises `TookTooLong` and `ChildDied`."""
        await self._ask({"ready": True}, FEED_LIMIT)

    async def run(self, sql: str) -> ChildReply:
        """Return the reply to a query. Raises `TookTooLong` after killing the process, and `ChildDied`."""
        return await self._ask({"run": sql}, self._limits.hard)

    async def _ask(self, command: object, limit: float) -> ChildReply:
        await self.feed(frame(command))
        try:
            async with asyncio.timeout(limit):
                return await self._reply()
        except TimeoutError as error:
            self.kill()
            raise TookTooLong from error
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            self.kill()
            raise ChildDied from error

    async def _reply(self) -> ChildReply:
        source = self._process.stdout
        assert source is not None
        (length,) = struct.unpack(">I", await source.readexactly(4))
        if length > MAX_REPLY:
            raise ValueError("a reply over the limit")
        reply: ChildReply = msgspec.json.decode(await source.readexactly(length), type=dict[str, Any])
        return reply

    def kill(self) -> None:
        """End the process at once; the event loop collects it."""
        self._is_killed = True
        if not self.has_ended:
            self._process.kill()

    async def ended(self) -> None:
        """Wait until the process has been collected."""
        await self._process.wait()


class ChildDied(Exception):
    """The process ended without a reply: it exceeded a limit of the system, or was killed."""


class TookTooLong(Exception):
    """The query did not end, nor could it be interrupted."""
