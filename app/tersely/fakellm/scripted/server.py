"""A model host that needs no model: scripted, deterministic, and as strict as a real one.

It serves the model calls of every provider (streamed or not), their lists of models, and Google's files; everything
else is a 404. It refuses what a provider refuses (`tersely.fakellm.strict.openai_chat`) and measures what a provider
bills: prompt tokens are the bytes of instructions, messages and tools divided by four, completion tokens the characters
of the reply divided by four, and cached tokens the longest beginning (whole messages, tools first) that one of the last
requests had too. A real cache counts in steps of 128 tokens from 1,024 on and forgets after minutes; this one has
neither floor nor clock.

Without a script it answers from the request: it says how many messages it was sent and repeats the last words, calls
a tool when a line of the user's is ``call NAME {json}`` and that tool is offered, and ends with a ``<terse>`` tag when
the system text speaks of such tags. With a script, that decides.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from aiohttp import web

from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GCA, GEMINI
from tersely.fakellm.scripted.gemini_files import Files
from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.scripted.replies import (
    CREATED,
    MODEL,
    ReceivedRequest,
    Script,
    ScriptedExchange,
    ScriptedReply,
    TokenCounts,
    WireFormat,
    default_reply,
    digest,
    dump,
)
from tersely.fakellm.scripted.responses_state import StoredHistories
from tersely.fakellm.strict.openai_chat import Refusal, parse_body

_log = logging.getLogger(__name__)

_UNKNOWN_NAMES = 100
_BODY_LIMIT = 256 * 1024 * 1024
_CACHE_ENTRIES = 50_000
_STREAMS = {"generateContent": False, "streamGenerateContent": True}


class ScriptedModel:
    """The state of the server: what it received, what its cache knows, how it is set up.

    ``window`` is the context window in tokens (None: no limit), ``is_strict`` turns the refusals on,
    ``takes_unknown`` turns those off that concern a member which no table knows; ``unknown`` counts these by block and
    name, and the first of each is logged.
    ``keep`` bounds how many requests ``received`` holds (the newest), ``first_delay`` and ``delay`` are the
    latency (seconds) of the replies that no script gives. ``kept`` is what it remembers for requests that name their
    history; where ``is_forgetful``, none of that.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        window: int | None = None,
        is_strict: bool = True,
        takes_unknown: bool = False,
        keep: int = 256,
        first_delay: float = 0.0,
        delay: float = 0.0,
        is_forgetful: bool = False,
    ) -> None:
        self.script = script
        self.kept = StoredHistories(is_forgetful=is_forgetful)
        self.files = Files()
        self.window = window
        self.is_strict = is_strict
        self.takes_unknown = takes_unknown
        self.unknown: Counter[tuple[str, str]] = Counter()
        self.first_delay = first_delay
        self.delay = delay
        self.received: deque[ReceivedRequest] = deque(maxlen=keep)
        self.calls = 0
        self.disconnects = 0
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()

    async def decide(self, received: ReceivedRequest, wire: WireFormat = CHAT, model: str = "") -> ScriptedReply:
        """Return the reply to a request, refusals included. ``model``: as the address names it."""
        request = received.request
        if request is None:
            return _refuse(wire, Refusal(message="We could not parse the JSON body of your request."))
        if self.is_strict and (refusal := self._check(request, wire, model)):
            return _refuse(wire, refusal)
        whole = self.whole(request, wire)
        if isinstance(whole, Refusal):
            return _refuse(wire, whole)
        request = whole
        if self.window is not None:
            messages, tools = wire.sizes(request)
            if refusal := wire.overflow(window=self.window, messages=messages // 4, tools=tools // 4):
                return _refuse(wire, refusal)
        reply = self.script(received) if self.script is not None else None
        if inspect.isawaitable(reply):
            reply = await reply
        if reply is not None:
            return reply
        answer = default_reply(wire.read_request(request), received.number)
        return ScriptedReply(message=answer, first_delay=self.first_delay, delay=self.delay)

    def _check(self, request: dict[str, Any], wire: WireFormat, model: str) -> Refusal | None:
        while refusal := wire.check(request) or wire.check_model(request, model):
            unknown = refusal.unknown
            if unknown is None or not self.takes_unknown:
                return refusal
            del unknown.holder[unknown.name]
            key = unknown.block, unknown.name[:60]
            if key in self.unknown or len(self.unknown) < _UNKNOWN_NAMES:
                if key not in self.unknown:
                    _log.warning("the scripted model does not know the member %r of a block %r", key[1], key[0])
                self.unknown[key] += 1
        return None

    def whole(self, request: dict[str, Any], wire: WireFormat) -> dict[str, Any] | Refusal:
        """Return the request with the history that it names."""
        return self.kept.whole(request) if self.is_strict and wire is RESPONSES else request

    def measure(self, request: dict[str, Any], reply: ScriptedReply, wire: WireFormat = CHAT) -> TokenCounts:
        """Return the tokens of a call; the request's messages are in the cache from now on."""
        items = list(wire.prompt(request))
        n = request.get("n") or 1
        return TokenCounts(
            input=sum(map(len, items)) // 4,
            cached=self._look_up(items),
            output=n * max(1, len(dump(reply.message)) // 4),
        )

    def _look_up(self, items: list[bytes]) -> int:
        cached = size = 0
        key = b""
        is_known = True
        for item in items:
            key = blake2b(key + item, digest_size=16).digest()
            size += len(item)
            is_known = is_known and key in self._prefixes
            if is_known:
                cached = size
            self._prefixes[key] = None
            self._prefixes.move_to_end(key)
        while len(self._prefixes) > _CACHE_ENTRIES:
            self._prefixes.popitem(last=False)
        return cached // 4


def scripted_app(model: ScriptedModel | None = None) -> web.Application:
    """Return the web application around ``model``."""
    state = model or ScriptedModel()

    async def elsewhere(request: web.Request) -> web.Response:
        await _receive(state, request)
        message = f"Invalid URL ({request.method} {request.path})"
        return _json(Refusal(message=message, status=404).body(), status=404)

    async def models(request: web.Request) -> web.Response:
        await _receive(state, request)
        if "x-goog-api-key" in request.headers:
            return _gemini_models()
        if "anthropic-version" in request.headers:
            listed = {"id": MODEL, "type": "model", "display_name": MODEL, "created_at": "2026-01-01T00:00:00Z"}
            return _json(dump({"data": [listed], "has_more": False, "first_id": MODEL, "last_id": MODEL}))
        model_object = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "tersely"}
        return _json(dump({"object": "list", "data": [model_object]}))

    async def count(request: web.Request) -> web.Response:
        received = await _receive(state, request)
        if not isinstance((received.request or {}).get("messages", []), list):
            error = {"type": "invalid_request_error", "message": "messages: Input should be a valid list"}
            return _json(dump({"type": "error", "error": error}), status=400)
        return _json(dump({"input_tokens": sum(map(len, ANTHROPIC.prompt(received.request or {}))) // 4}))

    async def complete(request: web.Request) -> web.StreamResponse:
        return await _answer(state, request, CHAT)

    async def say(request: web.Request) -> web.StreamResponse:
        return await _answer(state, request, ANTHROPIC)

    async def respond(request: web.Request) -> web.StreamResponse:
        return await _answer(state, request, RESPONSES)

    app = web.Application(client_max_size=_BODY_LIMIT)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_post("/v1/responses", respond)
    _add_kept(app, state)
    _add_files(app, state)
    app.router.add_post("/v1/messages", say)
    app.router.add_post("/v1/messages/count_tokens", count)
    _add_gemini(app, state, elsewhere)
    app.router.add_get("/v1/models", models)
    app.router.add_route("*", "/{path:.*}", elsewhere)
    return app


def _add_gemini(
    app: web.Application, state: ScriptedModel, elsewhere: Callable[[web.Request], Awaitable[web.Response]]
) -> None:
    """Calls of Gemini and of Gemini Code Assist. Unknown methods are answered by ``elsewhere``."""

    async def generate(request: web.Request) -> web.StreamResponse:
        name, _, method = request.match_info["call"].rpartition(":")
        if method not in _STREAMS:
            return await elsewhere(request)
        return await _answer(state, request, GEMINI, model=name, streams=_STREAMS[method])

    async def generate_internally(request: web.Request) -> web.StreamResponse:
        method = request.match_info["method"]
        if method not in _STREAMS:
            return await elsewhere(request)
        return await _answer(state, request, GCA, streams=_STREAMS[method])

    async def models(request: web.Request) -> web.Response:
        await _receive(state, request)
        return _gemini_models()

    app.router.add_post("/v1beta/models/{call}", generate)
    app.router.add_post("/v1/models/{call}", generate)
    app.router.add_post("/v1internal:{method}", generate_internally)
    app.router.add_get("/v1beta/models", models)


def _gemini_models() -> web.Response:
    return _json(dump({"models": [{"name": f"models/{MODEL}", "displayName": MODEL}]}))


def _add_kept(app: web.Application, state: ScriptedModel) -> None:
    """Replies that are kept, and conversations."""

    async def reply(request: web.Request) -> web.Response:
        await _receive(state, request)
        name = request.match_info["id"]
        found = state.kept.replies.get(name)
        if found is None:
            return _json(Refusal(message=f"Response with id '{name}' not found.", status=404).body(), status=404)
        if request.method == "DELETE":
            del state.kept.replies[name]
            return _json(dump({"id": name, "object": "response", "deleted": True}))
        return _json(found.body)

    async def input_items(request: web.Request) -> web.Response:
        await _receive(state, request)
        name = request.match_info["id"]
        items = state.kept.input_items(name)
        if items is None:
            return _json(Refusal(message=f"Response with id '{name}' not found.", status=404).body(), status=404)
        return _json(dump({"object": "list", "data": items, "has_more": False}))

    async def conversation(request: web.Request) -> web.Response:
        received = await _receive(state, request)
        name = state.kept.open((received.request or {}).get("items") or ())
        if name is None:
            return _json(Refusal(message="Invalid URL (POST /v1/conversations)", status=404).body(), status=404)
        return _json(dump({"id": name, "object": "conversation", "created_at": CREATED, "metadata": {}}))

    app.router.add_get("/v1/responses/{id}", reply)
    app.router.add_delete("/v1/responses/{id}", reply)
    app.router.add_get("/v1/responses/{id}/input_items", input_items)
    app.router.add_post("/v1/conversations", conversation)


def _add_files(app: web.Application, state: ScriptedModel) -> None:
    """Google's files, under each version of its API."""

    async def upload(request: web.Request) -> web.Response:
        received = await _receive(state, request)
        return state.files.upload(
            received, root=str(request.url.origin()), upload_id=request.query.get("upload_id", "")
        )

    async def find(request: web.Request) -> web.Response:
        await _receive(state, request)
        name, _, method = request.match_info["name"].partition(":")
        return state.files.find(name, is_download=method == "download")

    app.router.add_post("/upload/{version}/files", upload)
    app.router.add_get("/{version:v1beta|v1}/files/{name}", find)
    app.router.add_get("/download/{version}/files/{name}", find)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedServer:
    """A running server: ``base_url`` is what an OpenAI client is pointed at (with ``/v1``), ``root`` what others."""

    base_url: str
    port: int
    model: ScriptedModel

    @property
    def root(self) -> str:
        """Return the address without a path."""
        return self.base_url.removesuffix("/v1")


@asynccontextmanager
async def run_scripted(
    host: str = "127.0.0.1", port: int = 0, model: ScriptedModel | None = None
) -> AsyncIterator[ScriptedServer]:
    """Serve until the block is left; port 0 takes a free one."""
    state = model or ScriptedModel()
    # Handlers end when their client goes, so that a stalled reply does not outlive it.
    runner = web.AppRunner(scripted_app(state), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound: int = runner.addresses[0][1]
        yield ScriptedServer(base_url=f"http://{host}:{bound}/v1", port=bound, model=state)
    finally:
        await runner.cleanup()


async def _receive(state: ScriptedModel, request: web.Request) -> ReceivedRequest:
    body = await request.read()
    parsed = parse_body(body) if body else None
    state.calls += 1
    received = ReceivedRequest(
        number=state.calls,
        method=request.method,
        path=request.path_qs,
        headers=request.headers,
        body=body,
        request=parsed if isinstance(parsed, dict) else None,
    )
    state.received.append(received)
    return received


async def _answer(
    state: ScriptedModel, http: web.Request, wire: WireFormat, *, model: str = "", streams: bool | None = None
) -> web.StreamResponse:
    received = await _receive(state, http)
    reply = await state.decide(received, wire, model)
    headers = {"x-request-id": "req_" + digest(received.body), **reply.headers}
    try:
        if reply.body is not None:
            await _sleep(reply.first_delay)
            return _json(reply.body, status=reply.status, headers=headers)
        request = received.request or {}
        whole = state.whole(request, wire)
        whole = request if isinstance(whole, Refusal) else whole
        exchange = ScriptedExchange(
            request=request,
            reply=reply,
            counted=state.measure(whole, reply, wire),
            id=digest(received.body) + (f"{received.number:04x}" if wire is RESPONSES else ""),
            model=model or str(request.get("model") or ""),
        )
        if wire is RESPONSES and reply.status == 200 and reply.break_after is None:
            state.kept.keep(request, whole, wire.whole(exchange))
        if not (request.get("stream") if streams is None else streams):
            await _sleep(reply.first_delay)
            return _json(wire.whole(exchange), status=reply.status, headers=headers)
        is_array = streams is not None and http.query.get("alt") != "sse"
        return await _stream(http, exchange, wire, headers, is_array=is_array)
    except (ConnectionResetError, asyncio.CancelledError):
        state.disconnects += 1
        raise


async def _stream(
    http: web.Request, exchange: ScriptedExchange, wire: WireFormat, headers: Mapping[str, str], *, is_array: bool
) -> web.StreamResponse:
    reply = exchange.reply
    events = wire.events(exchange)
    kind = "text/event-stream; charset=utf-8"
    if is_array:
        kind = "application/json; charset=UTF-8"
        events = _as_array(events, exchange.newline)
    response = web.StreamResponse(status=reply.status, headers={"Content-Type": kind, **headers})
    await _sleep(reply.first_delay)
    await response.prepare(http)
    end = len(events) if reply.break_after is None else reply.break_after
    for block in events[:end] if reply.delay else [b"".join(events[:end])]:
        await response.write(block)
        await _sleep(reply.delay)
    if reply.break_after is not None:
        await _break_off(http, response, exchange, wire)
    await response.write_eof()
    return response


def _as_array(events: list[bytes], newline: bytes) -> list[bytes]:
    """Return the same as a JSON array, as Google writes it."""
    listed = [event.removeprefix(b"data: ").removesuffix(newline * 2) for event in events]
    return [b"[" + listed[0], *(b",\r\n" + each for each in listed[1:]), b"]"]


async def _break_off(
    http: web.Request, response: web.StreamResponse, exchange: ScriptedExchange, wire: WireFormat
) -> None:
    match exchange.reply.break_with:
        case "error":
            await response.write(wire.error(exchange))
        case "disconnect":
            if http.transport is not None:
                http.transport.abort()
        case _:
            await asyncio.Event().wait()


def _refuse(wire: WireFormat, refusal: Refusal) -> ScriptedReply:
    return ScriptedReply(status=refusal.status, body=wire.refuse(refusal))


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
