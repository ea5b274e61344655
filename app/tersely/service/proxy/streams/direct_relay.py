"""Send the events of a stream on in the callback that received them.

Most events of a stream are short and arrive alone. To wake the call's task for each, through all that wraps a call,
costs more than to read the event and to write it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Protocol

from typing_extensions import override

from tersely.service.proxy.streams.client_stream import ClientStream
from tersely.upstream.connection import Receive


class PartWriter(Protocol):
    """Sends parts of a reply to the client without waiting."""

    @property
    def is_ready(self) -> bool:
        """Return whether a part may be written now; False while the client is behind."""

    def write(self, part: bytes) -> None:
        """Send a part, which is not empty."""


class DirectRelay:
    """Feeds chunks of a host to ``stream``, and writes what the client gets of them, while its writer is ready.

    ``last_sent``: when the client was sent something, in the loop's time.
    """

    def __init__(self, stream: ClientStream, heartbeat: float) -> None:
        """``heartbeat``: after how many seconds without a part the call's task looks what the client is to be sent."""
        self._stream = stream
        self._heartbeat = heartbeat
        self._now = asyncio.get_running_loop().time
        self._writer: PartWriter | None = None
        self._rest = b""
        self._failure: Exception | None = None
        self.last_sent = self._now()

    def write_to(self, writer: PartWriter) -> None:
        """Send chunks on from the next one on that is awaited."""
        self._writer = writer

    @property
    def receive(self) -> Receive | None:
        """Return what gets the chunks; None before there is a writer."""
        return None if self._writer is None else self._send_on

    def take_rest(self) -> bytes:
        """Return the last chunk if it was not fed. Raises what was raised when it was."""
        if self._failure is not None:
            raise self._failure
        rest, self._rest = self._rest, b""
        return rest

    def _send_on(self, chunk: bytes) -> bool:
        """Return whether the next chunk can be sent on too. If not, the call's task goes on."""
        assert self._writer is not None
        try:
            out = self._stream.feed_at_once(chunk) if self._writer.is_ready else None
            if out:
                self._writer.write(out)
        except Exception as error:  # noqa: BLE001 it is raised in the call's task
            self._failure = error
            return False
        if out is None:
            self._rest = chunk
            return False
        if out:
            self.last_sent = self._now()
        elif self._now() - self.last_sent >= self._heartbeat:
            return False
        return not self._stream.end.is_seen


class DirectChunks(AsyncGenerator[bytes, None]):
    """Chunks for the client, of which some may be written to it directly while the next one is awaited.

    Whoever changes the chunks of a reply, or looks at them, makes a plain generator of them: then none passes by it.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], write_to: Callable[[PartWriter], None]) -> None:
        """``write_to`` is called with the client's writer, if it has one."""
        self._chunks = chunks
        self.write_to = write_to

    @override
    async def asend(self, value: None) -> bytes:
        return await self._chunks.asend(value)

    @override
    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> bytes:
        return await self._chunks.athrow(typ, val, tb)  # type: ignore[arg-type]

    @override
    async def aclose(self) -> None:
        await self._chunks.aclose()
