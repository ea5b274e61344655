"""Parse the first line and the headers of a model call, and cache the result: clients repeat both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tersely.api.host_table import split_name
from tersely.api.routes import Target, find_target
from tersely.api.transport.body import Scope
from tersely.dialects.clients.names import client_name
from tersely.dialects.free_routes import is_model_call
from tersely.dialects.headers import Headers, is_compressed, own_headers
from tersely.service.common.auth import read_credentials
from tersely.service.proxy.call.call import CallOptions, read_options

# The most heads in the cache, and the most bytes of address and headers of one.
MAX_KEPT = 512
MAX_BYTES = 8 * 1024


# "text" may be JSON: some clients name no other type. "other" is a file or a form.
BodyKind = Literal["json", "text", "other"]
_TEXTS = frozenset({"text/plain", "application/x-www-form-urlencoded"})


class RequestHead:
    """The parsed first line and headers of a request.

    ``host`` is the name of the host in the path, or empty; ``raw`` is path and query behind it, encoded. ``headers``
    are the caller's, without the length of the body, ``credentials`` what they say of the caller, ``own`` those that
    the host may see; ``known`` is kept with them, see `Call`. ``body`` is the kind of the body by headers and path,
    ``is_compressed`` whether it is compressed. ``is_model_call``: a model works for the request.
    """

    __slots__ = (
        "_options",
        "body",
        "client",
        "credentials",
        "headers",
        "host",
        "is_compressed",
        "is_model_call",
        "is_websocket",
        "known",
        "own",
        "raw",
        "target",
    )

    def __init__(self, target: Target, host: str, raw: str, headers: Headers, *, is_model_call: bool) -> None:
        self.target = target
        self.host = host
        self.raw = raw
        self.headers = target.with_keys(headers)
        self.own = own_headers(target.dialect, self.headers)
        self.credentials = read_credentials(self.headers)
        by_name = dict(self.headers)
        self.client = client_name(by_name)
        self.body = _kind_of_body(raw, by_name.get("content-type", ""))
        self.is_compressed = is_compressed(headers)
        self.is_model_call = is_model_call
        self.is_websocket = by_name.get("upgrade", "").lower() == "websocket"
        self.known: dict[object, Any] = {}
        self._options: CallOptions | None = None

    def options(self) -> CallOptions:
        """Return Tersely's own headers. Raises `InvalidRequest`."""
        if self._options is None:
            self._options = read_options(dict(self.headers))
        return self._options


class RequestHeads:
    """A bounded cache of heads, by first line and headers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], RequestHead] = {}

    def read(self, scope: Scope) -> RequestHead | None:
        """Return the head of a request (its first line and headers); None if the request is for no model host."""
        headers = tuple([header for header in scope["headers"] if header[0] != b"content-length"])
        key = scope["method"], scope["path"], scope.get("raw_path"), scope.get("query_string"), headers
        found = self._kept.get(key)
        if found is None:
            found = _read(scope, headers)
            if found is not None and len(found.raw) + _size(headers) <= MAX_BYTES:
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = found
        return found


def _read(scope: Scope, headers: Sequence[tuple[bytes, bytes]]) -> RequestHead | None:
    found = texts(headers)
    host, path = split_name(scope["path"])
    raw = split_name(raw_target(scope))[1]
    target = find_target(scope["method"], path, raw, dict(found))
    if target is None:
        return None
    uses_model = target.is_call or is_model_call(scope["method"], target.account_path(path))
    return RequestHead(target, host, raw, found, is_model_call=uses_model)


def _kind_of_body(path: str, content_type: str) -> BodyKind:
    kind = content_type.partition(";")[0].strip().lower()
    if path.startswith("/upload/"):
        return "other"
    if not kind or kind == "application/json" or kind.endswith("+json"):
        return "json"
    return "text" if kind in _TEXTS else "other"


def _size(headers: Sequence[tuple[bytes, bytes]]) -> int:
    return sum([len(name) + len(value) for name, value in headers])


def raw_target(scope: Scope) -> str:
    """Return path and query as the client encoded them."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path: str = raw.decode("latin-1").partition("?")[0]
    query: str = scope.get("query_string", b"").decode("latin-1")
    return f"{path}?{query}" if query else path


def texts(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return headers as text."""
    try:
        return [(name.decode(), value.decode()) for name, value in headers]
    except UnicodeDecodeError:
        return [(_text(name), _text(value)) for name, value in headers]


def _text(header: bytes) -> str:
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")
