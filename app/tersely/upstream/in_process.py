"""A model host within this process: requests go to a function, and no socket is opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

from typing_extensions import override

from tersely.upstream.client import Timeouts, Upstream, UpstreamReply
from tersely.upstream.connection import Connection, Headers

Respond = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]
"""From a path and a request body to a status and a body of JSON."""


@dataclass(slots=True)
class _WholeBody:
    """A complete reply, with the part of a connection's interface that `UpstreamReply` uses."""

    status: int
    headers: Headers
    body: bytes

    def take(self) -> bytes:
        """Return the body once, then its end."""
        taken, self.body = self.body, b""
        return taken

    async def wait(self, deadline: float) -> bool:
        """Everything is there already."""
        del deadline
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
    async def send(self, method: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> UpstreamReply:
        """Return the function's answer."""
        del method, headers
        status, answer = await self._respond(path, body)
        reply = _WholeBody(status, [("content-type", "application/json")], answer)
        return UpstreamReply(cast("Connection", reply), _forget, idle=1.0)


def _forget(connection: Connection) -> None:
    del connection
