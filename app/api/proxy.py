"""Proxy routes as plain ASGI in front of FastAPI: a request to a model costs no framework on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fastapi import FastAPI

from app.api.body import Disconnected, Receive, Scope, Send, read_body
from app.api.errors import in_dialect
from app.dialects.dialect import Dialect
from app.domain.errors import InvalidRequest, TerselyError
from app.domain.headers import Headers
from app.service.auth import Auth
from app.service.calls import Answer, Call, read_options
from app.service.metrics import Metrics
from app.service.proxy import Proxy

_log = logging.getLogger(__name__)

PREFIX = "/v1/"
CHAT = "/v1/chat/completions"
# How long what a refused client still sends is thrown away, in seconds.
LINGER = 2.0


class ProxyRoutes:
    """Everything under ``/v1/``; what is not the proxy's goes to ``fallback``, kept as ``rest``."""

    def __init__(
        self,
        fallback: FastAPI,
        *,
        proxy: Proxy,
        dialect: Dialect,
        auth: Auth,
        metrics: Metrics,
        max_body: int,
        body_timeout: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.rest = fallback
        self._proxy = proxy
        self._dialect = dialect
        self._auth = auth
        self._metrics = metrics
        self._max_body = max_body
        self._body_timeout = body_timeout
        self._monotonic = monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith(PREFIX):
            await self.rest(scope, receive, send)
            return
        route = "chat" if path == CHAT and scope["method"] == "POST" else "passthrough"
        self._metrics.in_flight.inc()
        status, strategy = 499, ""
        try:
            status, strategy = await self._serve(scope, receive, send, is_chat=route == "chat")
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(route, self._dialect.name, strategy, str(status)).inc()

    async def _serve(self, scope: Scope, receive: Receive, send: Send, *, is_chat: bool) -> tuple[int, str]:
        """Answer one request; status and strategy for the metrics (499: the client went away)."""
        received = self._monotonic()
        is_read = False
        headers: Headers = [(_text(name), _text(value)) for name, value in scope["headers"]]
        try:
            by_name = dict(headers)
            if by_name.get("upgrade", "").lower() == "websocket":
                return await self._refuse_websocket(send)
            _check_target(scope)
            caller = await self._auth.caller(headers)
            body = await read_body(scope, receive, limit=self._max_body, deadline=self._body_timeout)
            is_read = True
            call = Call(
                tenant=caller.tenant,
                method=scope["method"],
                path=_upstream_path(scope),
                headers=headers,
                body=body,
                options=read_options(by_name),
                received=received,
                key_headers=caller.key_headers,
            )
        except Disconnected:
            return 499, ""
        except TerselyError as error:
            refusal = in_dialect(error, self._dialect)
            if is_read or not _has_body(scope):
                return await _refuse(send, *refusal), ""
            return await _refuse_unread(scope, receive, send, *refusal), ""
        return await self._answer(call, receive, send, is_chat=is_chat)

    async def _refuse_websocket(self, send: Send) -> tuple[int, str]:
        """Clients that try a websocket first go on over HTTP when they are told so."""
        body = self._dialect.error_body("There are no websockets here: use HTTP.", type="invalid_request_error")
        return await _refuse(send, 426, [("content-type", "application/json"), ("connection", "close")], body), ""

    async def _answer(self, call: Call, receive: Receive, send: Send, *, is_chat: bool) -> tuple[int, str]:
        """Answer, and stop at once when the client goes away: its model call stops with it."""
        me = asyncio.current_task()
        assert me is not None
        gone = asyncio.get_running_loop().create_task(_wait_for_disconnect(receive))
        started = finished = False

        def stop(done: asyncio.Task[None]) -> None:
            if not (done.cancelled() or finished):
                me.cancel()

        gone.add_done_callback(stop)
        try:
            answer = await (self._proxy.chat(call) if is_chat else self._proxy.forward(call))
            started = True
            await _respond(send, answer)
            return answer.status, _strategy(answer)
        except asyncio.CancelledError:
            if not gone.done():
                raise
            return 499, ""
        except TerselyError as error:
            if started:
                raise
            return await _refuse(send, *in_dialect(error, self._dialect)), ""
        finally:
            finished = True
            gone.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _upstream_path(scope: Scope) -> str:
    """What follows the base URL, as the client encoded it."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path: str = raw.decode("latin-1").partition("?")[0].removeprefix("/v1")
    query: str = scope.get("query_string", b"").decode("latin-1")
    return f"{path}?{query}" if query else path


def _check_target(scope: Scope) -> None:
    """Raise `InvalidRequest` for a path that would climb out of the upstream's base URL."""
    if "/." in scope["path"] and not {".", ".."}.isdisjoint(scope["path"].split("/")):
        raise InvalidRequest("the path must not contain . or .. segments")


def _text(header: bytes) -> str:
    try:
        return header.decode()
    except UnicodeDecodeError:
        return header.decode("latin-1")


def _strategy(answer: Answer) -> str:
    return next((value for name, value in answer.headers if name == "x-tersely-strategy"), "")


async def _refuse(send: Send, status: int, headers: Headers, body: bytes) -> int:
    await _respond(send, Answer(status=status, headers=headers, body=body))
    return status


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in scope["headers"]
    )


async def _refuse_unread(scope: Scope, receive: Receive, send: Send, status: int, headers: Headers, body: bytes) -> int:
    """Refuse a request whose body has not been read, and end its connection.

    What is on its way is read and thrown away for a moment: a client that is cut off while it sends does not get to
    see the answer.
    """
    sent = [(name.encode(), value.encode()) for name, value in headers]
    sent += [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if not any(name == b"expect" for name, _ in scope["headers"]):
        try:
            async with asyncio.timeout(LINGER):
                while (await receive()).get("more_body"):
                    pass
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    return status


async def _respond(send: Send, answer: Answer) -> None:
    headers = [(n.encode(), v.encode(errors="surrogateescape")) for n, v in answer.headers]
    chunks = answer.chunks
    if chunks is None:
        headers.append((b"content-length", str(len(answer.body)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})
        return
    try:
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        # A generator that is left half way ends when it is collected; what it has to record cannot wait for that.
        await chunks.aclose()  # type: ignore[attr-defined]
