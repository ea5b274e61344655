"""The values of one proxied call: the request, the response, and Tersely's own headers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal, Protocol

import msgspec

from tersely.dialects.headers import Headers, is_compressed
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.sessions import check_session_id

ContextKind = Literal["built", "passthrough", "bypass", "fail-open", "command"]


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Tersely's own request headers."""

    session_id: str | None = None
    strategy: str | None = None
    epoch: str | None = None
    shadow: str | None = None
    bypass: bool = False


class ReserveObjects(Protocol):
    """Reserves the memory that the JSON objects of a body take when all of it is parsed."""

    async def __call__(self, *, may_refuse: bool = True) -> None:
        """Raise `Busy` where that is more than there is, if this ``may_refuse``."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A request to be proxied. ``path`` follows the upstream's base URL and carries the query, still encoded.

    Header names are in lower case; ``received`` is a monotonic time in seconds. ``key_headers`` carried a Tersely key
    and stay here. ``model`` and ``streams`` are what the address says, where the body does not. ``host`` is the name of
    the model host; empty for the default one of the dialect. ``max_messages``: the most elements of a list in the body;
    None: any number. ``reserve`` is awaited before all of the body is parsed. ``by_headers`` keeps what follows from
    method, path and headers, for all calls that have the same.
    """

    tenant: str
    method: str
    path: str
    headers: Headers
    body: bytes
    options: CallOptions
    received: float
    key_headers: frozenset[str] = frozenset()
    model: str = ""
    streams: bool = False
    request_id: str = ""
    host: str = ""
    max_messages: int | None = None
    reserve: ReserveObjects | None = None
    by_headers: dict[object, Any] = msgspec.field(default_factory=dict)

    @property
    def header_map(self) -> dict[str, str]:
        """Headers by name; of a repeated one the last. Not to be changed."""
        found: dict[str, str] | None = self.by_headers.get(dict)
        if found is None:
            found = self.by_headers[dict] = dict(self.headers)
        return found

    @property
    def is_compressed(self) -> bool:
        """True if the body is compressed, by its headers."""
        found: bool | None = self.by_headers.get(is_compressed)
        if found is None:
            found = self.by_headers[is_compressed] = is_compressed(self.headers)
        return found


class ProxyResponse(msgspec.Struct, kw_only=True):
    """The answer to the client: a body at once, or chunks as they come."""

    status: int
    headers: Headers
    body: bytes = b""
    chunks: AsyncGenerator[bytes, None] | None = None


class ContextLabels(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a call in its response headers."""

    context: ContextKind
    strategy: str = ""
    session_id: str = ""
    source: str = ""
    epoch: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    overhead_ms: float | None = None
    extra: Headers = []

    def headers(self) -> Headers:
        """As headers."""
        found: Headers = [("x-tersely-context", self.context)]
        if self.session_id:
            found.append(("x-tersely-session", self.session_id))
        if self.source:
            found.append(("x-tersely-session-source", self.source))
        if self.strategy:
            found.append(("x-tersely-strategy", self.strategy))
        if self.epoch is not None:
            found.append(("x-tersely-epoch", str(self.epoch)))
        if self.tokens_before is not None:
            found.append(("x-tersely-tokens-before", str(self.tokens_before)))
        if self.tokens_after is not None:
            found.append(("x-tersely-tokens-after", str(self.tokens_after)))
        if self.overhead_ms is not None:
            found.append(("x-tersely-overhead-ms", f"{self.overhead_ms:.2f}"))
        return found + self.extra


def read_options(headers: dict[str, str]) -> CallOptions:
    """Read Tersely's own headers. Raises `InvalidRequest` for an unusable session id or flag."""
    session_id = headers.get("x-tersely-session")
    if session_id is not None:
        session_id = check_session_id(session_id, "X-Tersely-Session")
    bypass = headers.get("x-tersely-bypass", "false").strip().lower()
    if bypass not in {"true", "false", "1", "0", "on", "off"}:
        raise InvalidRequest("X-Tersely-Bypass must be true or false", field="X-Tersely-Bypass")
    return CallOptions(
        session_id=session_id,
        strategy=headers.get("x-tersely-strategy") or None,
        epoch=headers.get("x-tersely-epoch") or None,
        shadow=headers.get("x-tersely-shadow") or None,
        bypass=bypass in {"true", "1", "on"},
    )
