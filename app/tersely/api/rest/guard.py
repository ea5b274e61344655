"""Guard every route under ``/api``: identify the caller, then read the bounded body once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import unquote_plus

from fastapi import Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import override

from tersely.api.rest.problems import UnsupportedMedia, plain_problem
from tersely.api.transport.body import RESERVATION, Disconnected, read_body
from tersely.dialects.clients.names import client_name
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.lengths import check_lengths
from tersely.domain.errors import InvalidRequest
from tersely.service.common.auth import Auth, read_credentials
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.limits.accounts import RequestNeed
from tersely.service.limits.limiter import Limiter

# Raises once the caller's key does not hold any more.
PermissionCheck = Callable[[], Awaitable[object]]
# Replaces an encoded slash inside a session id while a path is split. No id can contain it.
SLASH = "\x01"
PREFIX = "/api/sessions/"
IMPORT = "/api/sessions/import"
# The limit on messages applies to requests, not to sessions; an import is one request.
IMPORT_FACTOR = 4
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Checks requests. ``max_body`` in bytes, ``max_messages`` in one list of a body, ``body_timeout`` in seconds.

    ``admin_key`` opens ``/api/admin``; None: it is closed.
    """

    auth: Auth
    limiter: Limiter
    max_body: int
    body_timeout: float
    max_messages: int = 20_000
    admin_key: str | None = None

    async def admit(self, request: Request, *, has_body: bool) -> Request:
        """Return the request with its tenant and its body.

        Raises `TerselyError`, `UnsupportedMedia`, `Disconnected`.
        """
        credentials = read_credentials(dict(request.headers))
        caller = await self.auth.caller(credentials)
        caller.check_rest(request.method, request.url.path)
        request.state.tenant = caller.tenant
        request.state.permission = partial(self.auth.caller, credentials)
        name = client_name(request.headers)
        add_fields(tenant=caller.tenant, client=name)
        caller.check_client(name)
        # A full tenant may still delete and read.
        stores = has_body and request.method != "DELETE" and not caller.only_reads(request.method, request.url.path)
        await self.limiter.admit(caller.tenant, caller.key_id, RequestNeed(stores=stores))
        return await self.read(request, has_body=has_body)

    async def read(self, request: Request, *, has_body: bool) -> Request:
        """Return the request with its body. Raises as `admit`."""
        request.state.body = b""
        if not has_body or _is_empty(request):
            return request
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise UnsupportedMedia
        body = await read_body(request.scope, request.receive, limit=self.max_body, deadline=self.body_timeout)
        if (reservation := request.scope.get(RESERVATION)) is not None:
            await reservation.grow_to_objects(body)
        request.state.body = body
        admitted = Request(request.scope, request.receive)
        admitted._body = body  # noqa: SLF001 where Starlette keeps a body that was read
        most = self.max_messages * (IMPORT_FACTOR if request.url.path == IMPORT else 1)
        await run_in_thread_if_large(len(body), check_lengths, body, most)
        admitted._json = await run_in_thread_if_large(len(body), parse, body)  # noqa: SLF001
        return admitted


def _is_empty(request: Request) -> bool:
    """Return whether the request has neither a body nor a content type, for routes with an optional body."""
    headers = request.headers
    is_unsaid = "transfer-encoding" not in headers and "content-type" not in headers
    return is_unsaid and headers.get("content-length", "0") == "0"


def parse(body: bytes) -> Any:
    """Parse a body as JSON. Raises `InvalidRequest` with the error."""
    try:
        return raw_json.load(body)
    except raw_json.TooDeep as error:
        raise InvalidRequest("the JSON of the body is nested too deep") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error


class GuardedRoute(APIRoute):
    """A route that admits its requests through the `Guard` of the application."""

    async def admit(self, guard: Guard, request: Request, *, has_body: bool) -> Request:
        """Check the request's key and read its body."""
        return await guard.admit(request, has_body=has_body)

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None
        known = known_parameters(self.dependant)

        async def serve(request: Request) -> Response:
            try:
                admitted = await self.admit(request.app.state.guard, request, has_body=has_body)
            except Disconnected:
                return Response(status_code=499)
            refuse_unknown_parameters(request, known)
            return await handle(admitted)

        return serve


def known_parameters(dependant: Dependant) -> frozenset[str]:
    """Return the names of the query parameters that a route takes."""
    return frozenset(_query_names(dependant))


def _query_names(dependant: Dependant) -> Iterator[str]:
    """Yield the query parameters that a route takes."""
    for parameter in dependant.query_params:
        yield parameter.alias
    for each in dependant.dependencies:
        yield from _query_names(each)


def refuse_unknown_parameters(request: Request, known: frozenset[str]) -> None:
    """Raise `InvalidRequest` for a query parameter that is not ``known``.

    To ignore it would be dangerous: it may have been meant as a restriction.
    """
    for name in request.query_params:
        if name not in known:
            shown = name[:60]
            rest = f"; there are {', '.join(sorted(known))}" if known else ""
            raise InvalidRequest(f"there is no query parameter {shown!r} here{rest}", field=shown)


async def _tenant(request: Request) -> str:
    tenant: str = request.state.tenant
    return tenant


async def _permission(request: Request) -> PermissionCheck:
    permission: PermissionCheck = request.state.permission
    return permission


async def _session_id(request: Request) -> str:
    session_id: str = request.path_params["session_id"]
    return session_id.replace(SLASH, "/")


async def verbatim_items(request: Request, name: str) -> list[bytes]:
    """Return the elements of the array ``name`` of the body, byte for byte as they came."""
    body: bytes = request.state.body
    return await run_in_thread_if_large(len(body), _split_items, body, name)


def _split_items(body: bytes, name: str) -> list[bytes]:
    members = raw_json.split_object(body)
    return raw_json.split_array(members[name]) if name in members else []


Tenant = Annotated[str, Depends(_tenant)]
Permission = Annotated[PermissionCheck, Depends(_permission)]
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
        inner = _with_slashes(scope)

        async def count(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if _has_controls(scope):
                await _CONTROLS_REFUSED(scope, receive, count)
            else:
                await self._app(inner, receive, count)
        finally:
            template = getattr(inner.get("route"), "path", "")
            # A route of an included router knows its path without the router's prefix.
            prefix = "/api" if route == "api" and template and not template.startswith("/api/") else ""
            add_fields(route=prefix + template or route)
            self._metrics.requests.labels(route, "", "", str(status)).inc()


def _has_controls(scope: Scope) -> bool:
    """Return whether path or query hold control characters: no id, cursor or name does, and U+0000 cannot be stored."""
    query: bytes = scope.get("query_string", b"")
    return CONTROLS.search(scope["path"]) is not None or (
        b"%" in query and CONTROLS.search(unquote_plus(query.decode("latin-1"))) is not None
    )


_CONTROLS_REFUSED = plain_problem(422, "path and query must not contain control characters")


def _with_slashes(scope: Scope) -> Scope:
    """Return the same request, with slashes that were encoded in the session id marked as such in the decoded path."""
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
