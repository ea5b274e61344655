"""Reading a request body under absolute limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from app.domain.errors import InvalidRequest, TooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Disconnected(Exception):
    """The client went away before its request was there."""


async def read_body(scope: Scope, receive: Receive, *, limit: int, deadline: float) -> bytes:
    """The whole body. Raises `TooLarge` over ``limit`` bytes, `InvalidRequest` when it is not there after ``deadline``
    seconds, `Disconnected`.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value[:20]) > limit:
            raise TooLarge(f"the request body is over {limit} bytes")
    try:
        async with asyncio.timeout(deadline):
            return await _collect(receive, limit)
    except TimeoutError:
        raise InvalidRequest(f"the request body did not arrive within {deadline:g} s") from None


async def _collect(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise TooLarge(f"the request body is over {limit} bytes")
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
