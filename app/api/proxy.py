"""Proxy routes as plain ASGI in front of FastAPI: a request to a model costs no framework on its way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from fastapi import FastAPI

from app.api.body import Disconnected, Receive, Scope, Send, read_body
from app.api.errors import in_dialect
from app.api.targets import PREFIXES, Target, find_target
from app.domain.errors import InvalidRequest, TerselyError
from app.domain.headers import Headers, own_headers
from app.domain.messages import Dialect as DialectName
from app.service.auth import Auth
from app.service.calls import Answer, Call, read_options
from app.service.metrics import Metrics
from app.service.proxy import Proxy

_log = logging.getLogger(__name__)

# A model call as the metrics call it.
ROUTES: Mapping[DialectName, str] = {
    "openai_chat": "chat",
    "openai_responses": "responses",
    "anthropic": "messages",
    "gemini": "generate",
    "gemini_gca": "generate",
}
# How long what a refused client still sends is thrown away, in seconds.
LINGER = 2.0


class ProxyRoutes:
    """Every provider's addresses; what is none of them goes to ``fallback``, kept as ``rest``."""

    def __init__(
        self,
        fallback: FastAPI,
        *,
        proxies: Mapping[DialectName, Proxy],
        auth: Auth,
        metrics: Metrics,
        max_body: int,
        body_timeout: float,
        monotonic: Callable[[], float],
    ) -> None:
        self.rest = fallback
        self._proxies = proxies
        self._auth = auth
        self._metrics = metrics
        self._max_body = max_body
        self._body_timeout = body_timeout
        self._monotonic = monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not scope["path"].startswith(PREFIXES):
            if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] == "/":
                await _respond(send, Answer(status=200, headers=[]))  # clients ask whether there is anybody
                return
            await self.rest(scope, receive, send)
            return
        headers: Headers = [(_text(name), _text(value)) for name, value in scope["headers"]]
        target = find_target(scope["method"], scope["path"], _raw_target(scope), dict(headers))
        if target is None:
            await self.rest(scope, receive, send)
            return
        self._metrics.in_flight.inc()
        status, strategy = 499, ""
        try:
            status, strategy = await self._serve(scope, receive, send, target, headers)
        finally:
            self._metrics.in_flight.dec()
            route = ROUTES[target.dialect] if target.is_call else "passthrough"
            self._metrics.requests.labels(route, target.dialect, strategy, str(status)).inc()

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, target: Target, headers: Headers
    ) -> tuple[int, str]:
        """Answer one request; status and strategy for the metrics (499: the client went away)."""
        received = self._monotonic()
        is_read = False
        proxy = self._proxies[target.dialect]
        headers = target.with_keys(headers)
        try:
            by_name = dict(headers)
            if by_name.get("upgrade", "").lower() == "websocket":
                return await _refuse_websocket(send, proxy)
            _check_target(scope)
            caller = await self._auth.caller(headers)
            body = await read_body(scope, receive, limit=self._max_body, deadline=self._body_timeout)
            is_read = True
            call = Call(
                tenant=caller.tenant,
                method=scope["method"],
                path=target.path,
                headers=own_headers(target.dialect, headers),
                body=body,
                options=read_options(by_name),
                received=received,
                key_headers=caller.key_headers,
                model=target.model,
                streams=target.streams,
            )
        except Disconnected:
            return 499, ""
        except TerselyError as error:
            refusal = in_dialect(error, proxy.dialect)
            if is_read or not _has_body(scope):
                return await _refuse(send, *refusal), ""
            return await _refuse_unread(scope, receive, send, *refusal), ""
        return await self._answer(proxy, call, receive, send, target)

    async def _answer(self, proxy: Proxy, call: Call, receive: Receive, send: Send, target: Target) -> tuple[int, str]:
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
            work = proxy.converse(call) if target.is_call else proxy.forward(call, reply_id=target.reply_id)
            answer = await work
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
            return await _refuse(send, *in_dialect(error, proxy.dialect)), ""
        finally:
            finished = True
            gone.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse_websocket(send: Send, proxy: Proxy) -> tuple[int, str]:
    """Clients that try a websocket first go on over HTTP when they are told so."""
    body = proxy.dialect.error_body("There are no websockets here: use HTTP.", type="invalid_request_error")
    return await _refuse(send, 426, [("content-type", "application/json"), ("connection", "close")], body), ""


def _raw_target(scope: Scope) -> str:
    """Path and query as the client encoded them."""
    raw = scope.get("raw_path") or scope["path"].encode()
    path: str = raw.decode("latin-1").partition("?")[0]
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
