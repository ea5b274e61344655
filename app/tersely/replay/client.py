"""The client's side of a replay: it makes calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tersely.transcripts.answers import read_answer
from tersely.transcripts.conversations import ReplayRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReply:
    """The client's view of a reply. ``message`` is None when the call failed; then ``body`` says why."""

    status: int
    headers: Mapping[str, str]
    message: Mapping[str, Any] | None = None
    has_usage: bool = False
    body: bytes = b""

    @property
    def session(self) -> str:
        """Return the session that the proxy names."""
        return self.headers.get("x-tersely-session", "")

    @property
    def epoch(self) -> str:
        """Return the epoch whose beginning the model was sent."""
        return self.headers.get("x-tersely-epoch", "")


async def ask(
    http: aiohttp.ClientSession, address: str, request: ReplayRequest, headers: Mapping[str, str]
) -> ClientReply:
    """Make one call. A broken connection counts as a reply without a message."""
    sent = {"content-type": "application/json", **request.headers, **headers}
    try:
        async with http.post(f"{address}{request.target}", data=request.body, headers=sent) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return ClientReply(status=0, headers={}, body=f"the connection broke off: {error!r}".encode())
    names = {name.lower(): value for name, value in response.headers.items()}
    if response.status != 200:
        return ClientReply(status=response.status, headers=names, body=body)
    try:
        message, has_usage = read_answer(request.dialect, body, is_streamed=request.is_streamed)
    except (ValueError, KeyError, TypeError) as error:
        return ClientReply(status=response.status, headers=names, body=f"unreadable: {error}".encode())
    return ClientReply(status=response.status, headers=names, message=message, has_usage=has_usage)
