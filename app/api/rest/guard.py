"""What every route under ``/api`` has in common: who is calling, and a body that is bounded and read once.

The caller is known before the first byte of a body is read.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from app.api.body import Disconnected, read_body
from app.api.rest.problems import UnsupportedMedia
from app.dialects import raw_json
from app.domain.errors import InvalidRequest
from app.service.auth import Auth
from app.service.metrics import Metrics

# Stands for an encoded slash inside a session id while a path is taken apart; no id can contain it.
SLASH = "\x01"
PREFIX = "/api/sessions/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """``max_body`` in bytes, ``body_timeout`` in seconds."""

    auth: Auth
    max_body: int
    body_timeout: float

    async def admit(self, request: Request, *, has_body: bool) -> Request:
        """The request with its tenant and its body. Raises `TerselyError`, `UnsupportedMedia`, `Disconnected`."""
        caller = await self.auth.caller(dict(request.headers))
        request.state.tenant = caller.tenant
        if not has_body or _is_empty(request):
            return request
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise UnsupportedMedia
        body = await read_body(request.scope, request.receive, limit=self.max_body, deadline=self.body_timeout)
        request.state.body = body
        admitted = Request(request.scope, request.receive)
        admitted._body = body  # noqa: SLF001 where Starlette keeps a body that was read
        admitted._json = parse(body)  # noqa: SLF001
        return admitted


def _is_empty(request: Request) -> bool:
    """Whether nothing was sent, not even the kind of it: for routes whose body says what may be left unsaid."""
    headers = request.headers
    is_unsaid = "transfer-encoding" not in headers and "content-type" not in headers
    return is_unsaid and headers.get("content-length", "0") == "0"


def parse(body: bytes) -> Any:
    """A body as JSON. Raises `InvalidRequest` that says what is wrong."""
    try:
        return raw_json.load(body)
    except raw_json.TooDeep as error:
        raise InvalidRequest("the JSON of the body is nested too deep") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


def guarded(guard: Guard) -> type[APIRoute]:
    """A class of routes that admit their requests through ``guard``."""

    class GuardedRoute(APIRoute):
        @override
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            has_body = self.body_field is not None
            known = frozenset(_query_names(self.dependant))

            async def admit(request: Request) -> Response:
                try:
                    admitted = await guard.admit(request, has_body=has_body)
                except Disconnected:
                    return Response(status_code=499)
                _refuse_unknown(request, known)
                return await handle(admitted)

            return admit

    return GuardedRoute


def _query_names(dependant: Dependant) -> Iterator[str]:
    """The query parameters that a route takes."""
    for parameter in dependant.query_params:
        yield parameter.alias
    for each in dependant.dependencies:
        yield from _query_names(each)


def _refuse_unknown(request: Request, known: frozenset[str]) -> None:
    """A parameter that would be ignored may be one that was meant to hold something back."""
    for name in request.query_params:
        if name not in known:
            shown = name[:60]
            rest = f"; there are {', '.join(sorted(known))}" if known else ""
            raise InvalidRequest(f"there is no query parameter {shown!r} here{rest}", field=shown)


def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    return session_id.replace(SLASH, "/")


def verbatim_items(request: Request, name: str) -> list[bytes]:
    """The elements of the array ``name`` of the body, byte for byte as they came."""
    members = raw_json.split_object(request.state.body)
    return raw_json.split_array(members[name]) if name in members else []


Tenant = Annotated[str, Depends(_tenant)]
SessionId = Annotated[str, Depends(_session_id)]


class RestEdge:
    """ASGI around the REST application: session ids may contain encoded slashes, and requests are counted."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not scope["path"].startswith(("/api/", "/mcp")):
            await self._app(scope, receive, send)
            return
        route = "api" if scope["path"].startswith("/api/") else "mcp"
        status = 499

        async def count(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(_with_slashes(scope), receive, count)
        finally:
            self._metrics.requests.labels(route, "", "", str(status)).inc()


def _with_slashes(scope: Scope) -> Scope:
    """The same request, with slashes that were encoded in the session id marked as such in the decoded path."""
    raw: bytes = scope.get("raw_path") or b""
    if b"%2f" not in raw.lower() or not raw.startswith(PREFIX.encode()):
        return scope
    path = str(scope["path"]).removeprefix(PREFIX)
    encoded = raw.partition(b"?")[0].removeprefix(PREFIX.encode()).split(b"/", 1)[0]
    slashes = encoded.lower().count(b"%2f")
    pieces = path.split("/", slashes + 1)
    session_id = SLASH.join(pieces[: slashes + 1])
    rest = f"/{pieces[slashes + 1]}" if len(pieces) > slashes + 1 else ""
    return {**scope, "path": PREFIX + session_id + rest}
