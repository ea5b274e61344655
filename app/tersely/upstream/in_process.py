"""A model host within this process: requests go to a function, and no socket is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from tersely.upstream.client import PendingReply, ReplySource, Timeouts, Upstream, UpstreamReply
from tersely.upstream.connection import Headers, Receive

Respond = Callable[[bytes], Awaitable[tuple[int, bytes]]]
"""From a request's body to a status and a body of JSON."""


@dataclass(slots=True)
class _WholeBody(ReplySource):
    """A complete reply."""

    status: int
    headers: Headers
    body: bytes
    received_at: float = 0.0

    @override
    def take(self) -> bytes:
        """Return the body once, then its end."""
        taken, self.body = self.body, b""
        return taken

    @override
    async def wait(self, deadline: float, receive: Receive | None = None, pause: float = 0.0) -> bool:
        """Everything is there already."""
        return True


class InProcessUpstream(Upstream):
    """Answers every request with a function's result."""

    def __init__(self, respond: Respond) -> None:
        super().__init__("http://in-process.invalid", Timeouts())
        self._respond = respond

    @override
    async def open(self) -> None:
        """There is nothing to open."""

    @override
    def begin(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[str, str]],
        pieces: Sequence[bytes],
        *,
        heads: MutableMapping[object, Any] | None = None,
        added: Iterable[tuple[str, str]] = (),
    ) -> PendingReply:
        """Take the request."""
        return PendingReply(self, None, method, b"", pieces)

    @override
    async def wait_for(self, pending: PendingReply) -> UpstreamReply:
        """Return the function's answer."""
        status, answer = await self._respond(b"".join(pending.pieces))
        reply = _WholeBody(status, [("content-type", "application/json")], answer)
        return UpstreamReply(reply, release=None, idle=1.0)
