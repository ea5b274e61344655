"""Proxy routes as plain ASGI in front of FastAPI: a request to a model costs no framework on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import msgspec
from fastapi import FastAPI

from tersely.api.errors import in_dialect, problem
from tersely.api.host_table import Destination, HostTable, split_name
from tersely.api.request_heads import RequestHead, RequestHeads
from tersely.api.routes import PREFIXES, Target
from tersely.api.transport.body import RESERVATION, App, BodyBudget, Disconnected, Receive, Scope, Send, read_body
from tersely.api.transport.body_writer import WRITER, BodyWriter
from tersely.api.transport.call_log import CallLog
from tersely.api.transport.call_tracing import CallTracing
from tersely.api.transport.cors import CrossOrigin
from tersely.api.transport.disconnects import Disconnect, disconnect_of
from tersely.api.transport.request_ids import current
from tersely.api.transport.shutdown import Shutdown, ShutdownGate
from tersely.dialects.account_routes import AllowedRoute
from tersely.dialects.dialect import Dialect, ErrorDescription
from tersely.dialects.headers import Headers, own_headers, without_account_headers
from tersely.dialects.wire.lengths import check_lengths, may_be_too_long
from tersely.dialects.wire.members import model_in
from tersely.domain.errors import InvalidRequest, ShuttingDown, TerselyError, UpstreamUnavailable
from tersely.service.common.auth import Auth
from tersely.service.common.call_board import CallBoard, RunningCall
from tersely.service.common.call_fields import add_fields, fields
from tersely.service.common.metrics import CALL_ROUTES, Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.common.outcomes import CLIENT_GONE, host_outcome, settle_outcome
from tersely.service.common.tracing import Tracing
from tersely.service.limits.accounts import RequestNeed
from tersely.service.limits.admission import Admission, admission, end_turn
from tersely.service.limits.fair_queue import FairQueue
from tersely.service.limits.limiter import Limiter
from tersely.service.proxy.call.call import Call, ProxyResponse
from tersely.service.proxy.proxy import Proxy
from tersely.service.proxy.streams.direct_relay import DirectChunks

_log = logging.getLogger(__name__)

# The rest of a refused body is read and dropped as long as an accepted one may take, but for so many seconds at least,
# while so many bytes arrive in each part of this time; one of an allowed size, at this pace, to its end. A client that
# sends sees the refusal; one that has stopped is disconnected. One that has sent so fast may pause for some parts: it
# may be busy with other requests.
LINGER = 5.0
LINGER_PART = 2.0
LINGER_BYTES = 64 * 1024
LINGER_PAUSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeServices:
    """The parts around all routes. Web pages of ``origins`` may call the APIs; without ``tracing`` no call is traced;
    the calls under way are on the ``board``.
    """

    origins: Sequence[str]
    tracing: Tracing | None
    board: CallBoard


class ProxyRoutes:
    """Route provider paths to the proxy and every other path to ``fallback``."""

    def __init__(
        self,
        fallback: FastAPI,
        *,
        hosts: HostTable,
        auth: Auth,
        metrics: Metrics,
        max_body: int,
        max_messages: int,
        body_timeout: float,
        body_budget: BodyBudget,
        monotonic: Callable[[], float],
        shutdown: Shutdown,
        limiter: Limiter,
        edge: EdgeServices,
    ) -> None:
        self._limiter = limiter
        self._queue = FairQueue(monotonic=monotonic)
        self.rest = fallback
        self._hosts = hosts
        self._auth = auth
        self._board = edge.board
        self._metrics = metrics
        self._heads = RequestHeads()
        self._host_counter = lru_cache(maxsize=1024)(metrics.host_calls.labels)
        self._counter = lru_cache(maxsize=1024)(
            lambda route, dialect, strategy, status: metrics.requests.labels(route, dialect, strategy, str(status))
        )
        self._max_body = max_body
        self._max_messages = max_messages
        self._body_timeout = body_timeout
        self._body_budget = body_budget
        self._monotonic = monotonic
        self.shutdown = shutdown
        app: App = ShutdownGate(self._reserve, shutdown, self._refuse_at_end)
        if edge.origins:
            app = CrossOrigin(app, edge.origins)
        if edge.tracing is not None:
            app = CallTracing(app, edge.tracing)
        self._app = CallLog(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._app(scope, receive, send)

    async def _refuse_at_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that the service ends, in the shape of the route's errors."""
        error = ShuttingDown()
        target = None
        if scope["path"].startswith(PREFIXES):
            request_head = self._heads.read(scope)
            target = None if request_head is None else request_head.target
        refusal = problem(error) if target is None else in_dialect(error, self._dialect(target))
        await self._refuse_unread(scope, receive, send, *refusal)

    def _dialect(self, target: Target) -> Dialect:
        return self._hosts.defaults[target.dialect].proxy.dialect

    async def _reserve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a reservation of memory for the body."""
        if scope["type"] != "http":
            await self.rest(scope, receive, send)
            return
        reservation = scope[RESERVATION] = self._body_budget.open()
        try:
            await self._route(scope, receive, send)
        finally:
            reservation.release()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(PREFIXES):
            if scope["method"] == "HEAD" and scope["path"] == "/":
                await _respond(send, ProxyResponse(status=200, headers=[]))  # clients ask whether there is anybody
                return
            await self.rest(scope, receive, send)
            return
        request_head = self._heads.read(scope)
        if request_head is None:
            await self.rest(scope, receive, send)
            return
        target = request_head.target
        self._metrics.tally.add(self._metrics.in_flight)
        status, strategy, failure = CLIENT_GONE, "", None
        admitted = Admission(is_model_call=request_head.is_model_call)
        admission.set(admitted)
        progress = _Progress(proxy=self._hosts.defaults[target.dialect].proxy, received=self._monotonic())
        try:
            status, strategy = await self._serve(scope, receive, send, request_head, progress)
        except BaseException as error:
            status, failure = (fields.get() or {}).get("status", CLIENT_GONE), error
            raise
        finally:
            admitted.close()
            self._metrics.tally.add(self._metrics.in_flight, -1)
            route = CALL_ROUTES[target.dialect] if target.is_call else "passthrough"
            add_fields(route=route, dialect=target.dialect)
            outcome = settle_outcome(status, failure)
            self._metrics.tally.add(self._counter(route, target.dialect, strategy, status))
            if target.is_call:
                self._metrics.tally.add(self._host_counter(progress.host, target.dialect, outcome))

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, request_head: RequestHead, progress: _Progress
    ) -> tuple[int, str]:
        """Answer one request; status and strategy for the metrics (499: the client went away). ``progress`` is kept up
        to date.
        """
        try:
            if request_head.is_websocket:
                return await _refuse_websocket(send, progress.proxy)
            destination, call, route, marks = await self._read_call(scope, receive, request_head, progress)
        except Disconnected:
            return CLIENT_GONE, ""
        except Exception as error:  # noqa: BLE001 every request gets an answer in its dialect
            failed = error if isinstance(error, TerselyError) else _internal_error(error)
            refusal = in_dialect(failed, progress.proxy.dialect)
            if progress.tenant:
                self._board.note(progress.tenant, "refused", f"{refusal[0]}: {failed.detail}")
            if progress.is_read or not _has_body(scope):
                return await _refuse(send, *refusal), ""
            return await self._refuse_unread(scope, receive, send, *refusal), ""
        try:
            client = _Client(disconnect_of(scope, receive), send, scope.get(WRITER))
            return await self._answer(destination, call, client, request_head, route, marks)
        except _InternalFault as fault:
            failed = _internal_error(fault.__cause__)
            return await _refuse(send, *in_dialect(failed, progress.proxy.dialect)), ""

    async def _read_call(
        self, scope: Scope, receive: Receive, request_head: RequestHead, progress: _Progress
    ) -> tuple[Destination, Call, AllowedRoute | None, list[str]]:
        """Admit a request and read it. Return its host, the call, and at a shared provider account its route and the
        marks of the ids in it. ``progress`` is kept up to date.

        Raises a `TerselyError` for a request that is refused, `Disconnected` if the client goes away.
        """
        target, name, headers = request_head.target, request_head.host, request_head.headers
        caller = await self._auth.caller(request_head.credentials)
        progress.tenant = caller.tenant
        add_fields(tenant=caller.tenant, client=request_head.client)
        caller.check_client(request_head.client)
        caller.check_proxy()
        options = request_head.options()
        is_post = scope["method"] == "POST"
        need = RequestNeed(
            is_concurrent=True,
            is_model_call=request_head.is_model_call,
            stores=target.is_call and not options.bypass,
            size=announced_size(scope),
        )
        admission.get().reservations = await self._limiter.admit(caller.tenant, caller.key_id, need)
        destination = self._hosts.find(target.dialect, name, is_azure=target.is_azure)
        by_model = not name and is_post and self._hosts.has_models(target.dialect, is_azure=target.is_azure)
        route = None if by_model else _check_route(destination, target, scope["method"], request_head.raw)
        _check_target(scope)
        body = await read_body(scope, receive, limit=self._max_body, deadline=self._body_timeout)
        progress.is_read = True
        if by_model:
            model = target.model or await _model_of(request_head, body)
            found = self._hosts.find_by_model(target.dialect, model, is_azure=target.is_azure)
            destination = found or destination
            route = _check_route(destination, target, scope["method"], request_head.raw)
        progress.proxy, progress.host = destination.proxy, destination.name
        by_headers = request_head.known
        if route is not None:
            headers, by_headers = without_account_headers(headers), {}
            await scope[RESERVATION].grow_to_objects(body)
            if may_be_too_long(body, self._max_messages):
                await run_in_thread_if_large(len(body), check_lengths, body, self._max_messages)
        call = Call(
            tenant=caller.tenant,
            method=scope["method"],
            path=target.path,
            headers=request_head.own if route is None else own_headers(target.dialect, headers),
            body=body,
            options=options,
            received=progress.received,
            key_headers=caller.key_headers,
            model=target.model,
            streams=target.streams,
            request_id=current.get(),
            max_messages=self._max_messages,
            reserve=partial(scope[RESERVATION].grow_to_objects, body),
            by_headers=by_headers,
        )
        if destination.access is None or route is None:
            return destination, call, route, []
        path = target.account_path(split_name(scope["path"])[1])
        return destination, call, route, await destination.access.check_ids(target.dialect, call, route, path)

    async def _refuse_unread(
        self, scope: Scope, receive: Receive, send: Send, status: int, headers: Headers, body: bytes
    ) -> int:
        """Refuse a request whose body has not been read, and close its connection.

        The rest of the body is read and dropped first: a client that is cut off while it sends does not see the answer.
        """
        sent = [(name.encode(), value.encode()) for name, value in headers]
        sent += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if _has_body(scope) and not any(name == b"expect" for name, _ in scope["headers"]):
            size = announced_size(scope)
            slowest = size / LINGER_BYTES * LINGER_PART if size <= self._max_body else 0.0
            await _discard_body(receive, max(LINGER, self._body_timeout, slowest))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return status

    async def _answer(
        self,
        destination: Destination,
        call: Call,
        client: _Client,
        request_head: RequestHead,
        route: AllowedRoute | None,
        marks: Sequence[str],
    ) -> tuple[int, str]:
        """Answer the request, and stop at once when the client disconnects: its model call stops too."""
        proxy, access, target = destination.proxy, destination.access, request_head.target
        me = asyncio.current_task()
        assert me is not None
        started = False
        running = self._board.begin(call.tenant, client=request_head.client, dialect=target.dialect)
        try:
            client.disconnect.watch(me.cancel)
            admission.get().leave = await self._queue.enter(call.tenant)
            work = proxy.converse(call) if target.is_call else proxy.forward(call, reply_id=target.reply_id)
            answer = await work
            end_turn()
            if route is not None and route.creates and access is not None:
                answer = await access.watch(call, answer, target.dialect, route, marks)
            if answer.status >= 400:
                add_fields(outcome=host_outcome(answer.status))
            started = True
            running.state = "first byte"
            labels = dict(answer.headers)
            if labels.get("x-tersely-context") == "fail-open":
                self._board.note(call.tenant, "fail-open", "the database was away: the request went through unchanged")
            await _respond(client.send, answer, running, client.writer)
            return answer.status, labels.get("x-tersely-strategy", "")
        except asyncio.CancelledError:
            if not client.disconnect.is_gone:
                add_fields(outcome="interrupted")
                raise
            add_fields(outcome="client_gone")
            return CLIENT_GONE, ""
        except TerselyError as error:
            if started:
                raise
            if isinstance(error, UpstreamUnavailable) and not isinstance(error, ShuttingDown):
                add_fields(outcome="upstream_error")
            refusal = in_dialect(error, proxy.dialect)
            self._board.note(call.tenant, "refused", f"{refusal[0]}: {error.detail}", running.session_id)
            return await _refuse(client.send, *refusal), ""
        except Exception as error:
            if started:
                raise
            raise _InternalFault from error
        finally:
            client.disconnect.stop()
            self._board.end(running)


async def _model_of(request_head: RequestHead, body: bytes) -> str:
    """Return the model that a body names; empty for a file or a form. Raises `InvalidRequest`."""
    if request_head.body == "other":
        return ""
    if request_head.is_compressed:
        raise InvalidRequest("the model chooses the host, and compressed bodies are not read: send it uncompressed")
    # Where a body cannot be read, no host gets what may be meant for another.
    read = partial(model_in, body, must_be_json=request_head.body == "json")
    return await run_in_thread_if_large(len(body), read)


def _check_route(destination: Destination, target: Target, method: str, raw: str) -> AllowedRoute | None:
    """Return the route of a shared provider account; None if there is none. Raises `Forbidden`."""
    if destination.access is None:
        return None
    return destination.access.check_route(target.dialect, method, target.account_path(raw))


class _Client(NamedTuple):
    """The ways to the client of a request. ``writer``: past ``send``, where the server offers one."""

    disconnect: Disconnect
    send: Send
    writer: BodyWriter | None


class _Progress(msgspec.Struct):
    """The progress of reading a request, on which its refusal depends. ``proxy``, ``host``: those of the request's
    host, as far as it is known, else of the dialect's default; ``tenant`` is empty until the caller is known;
    ``received`` in monotonic seconds.
    """

    proxy: Proxy
    received: float
    tenant: str = ""
    host: str = ""
    is_read: bool = False


class _InternalFault(Exception):
    """A fault of ours before anything was answered."""


def _internal_error(cause: BaseException | None) -> TerselyError:
    """Log a fault of ours. Return the error for the client."""
    _log.error("unexpected: %s", type(cause).__name__, exc_info=cause)
    return TerselyError("something went wrong inside Tersely; its log says what")


async def _refuse_websocket(send: Send, proxy: Proxy) -> tuple[int, str]:
    """Refuse a websocket. Clients that try one first then continue over HTTP."""
    body = proxy.dialect.error_body(
        ErrorDescription(message="There are no websockets here: use HTTP.", type="invalid_request_error")
    )
    return await _refuse(send, 426, [("content-type", "application/json"), ("connection", "close")], body), ""


def _check_target(scope: Scope) -> None:
    """Raise `InvalidRequest` for a path that leaves the upstream's base URL, or that contains control characters."""
    if not scope["path"].isprintable():
        raise InvalidRequest("the path must not contain control characters")
    if "/." in scope["path"] and not {".", ".."}.isdisjoint(scope["path"].split("/")):
        raise InvalidRequest("the path must not contain . or .. segments")


async def _refuse(send: Send, status: int, headers: Headers, body: bytes) -> int:
    await _respond(send, ProxyResponse(status=status, headers=headers, body=body))
    return status


def announced_size(scope: Scope) -> int:
    """Return the size of the body as its headers have it, 0 where they do not."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


async def _discard_body(receive: Receive, seconds: float) -> None:
    """Read the rest of a body, for ``seconds`` at most, and only while it arrives."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    pauses_left = 0
    while pauses_left >= 0 and (left := end - loop.time()) > 0:
        size = 0
        try:
            async with asyncio.timeout(min(left, LINGER_PART)):
                while True:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            pauses_left = LINGER_PAUSES if size >= LINGER_BYTES else pauses_left - 1


async def _respond(
    send: Send, answer: ProxyResponse, running: RunningCall | None = None, writer: BodyWriter | None = None
) -> None:
    """Send an answer. ``running`` is the call's, if it has one: from the first part on it streams, and then parts may
    also be written with ``writer``.
    """
    headers = [(n.encode(), v.encode(errors="surrogateescape")) for n, v in answer.headers]
    chunks = answer.chunks
    if chunks is None:
        headers.append((b"content-length", str(len(answer.body)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        return
    is_begun = False
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        is_begun = True
        async for chunk in chunks:
            if running is not None:
                running.state = "streaming"
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if writer is not None and isinstance(chunks, DirectChunks):
                chunks.write_to(writer)
                writer = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        # An abandoned generator ends only when it is collected, and its records must not wait for that.
        if not is_begun:
            await _begin_and_cancel(chunks)
        await chunks.aclose()


async def _begin_and_cancel(chunks: AsyncGenerator[bytes, None]) -> None:
    """Have a reply of which nothing was asked for take note that its client is gone: the body of a generator that has
    not begun never runs, so that its call would neither be counted nor end.
    """

    async def begin() -> None:
        with suppress(StopAsyncIteration):
            await anext(chunks)

    beginning = asyncio.get_running_loop().create_task(begin())
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
