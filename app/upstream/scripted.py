"""A model host that needs no model: scripted, deterministic, and as strict as a real one.

It serves ``POST /v1/chat/completions`` (streamed or not) and ``GET /v1/models``; everything else is a 404
in OpenAI's shape. It refuses what a provider refuses (`app.upstream.strict`) and measures what a provider
bills: prompt tokens are the bytes of messages and tools divided by four, completion tokens the characters
of the reply divided by four, and ``cached_tokens`` the longest beginning (whole messages, tools first) that
one of the last requests had too. A real cache counts in steps of 128 tokens from 1,024 on and forgets after
minutes; this one has neither floor nor clock.

Without a script it answers from the request: it says how many messages it was sent and repeats the last
words, calls a tool when the user says ``call NAME {json}`` and that tool is offered, and ends with a
``<terse>`` tag when the system text speaks of such tags. With a script, that decides.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
from aiohttp import web

from app.upstream.strict import Refusal, check, overflow, parse_body

MODEL = "scripted"
_CREATED = 1_700_000_000
_BODY_LIMIT = 256 * 1024 * 1024
_CACHE_ENTRIES = 50_000
_REPEATED = 400
_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A request as it came. ``number`` counts from 1; ``request`` is None when the body was no JSON object."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """What to answer. ``message`` is the assistant's message in wire form; with ``n`` choices each gets the same.

    ``status`` and ``body`` answer with an error (or anything else) instead. For streams: ``pieces`` cuts the
    content just so (else every ``chunk_chars`` characters), ``first_delay`` and ``delay`` are seconds
    before the first and between later events; after ``break_after`` events comes ``break_with``:
    ``"error"`` (an error event, then the end), ``"disconnect"`` (the connection is cut) or ``"stall"``
    (nothing more, until the client goes).
    """

    message: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    usage: Mapping[str, Any] | None = None
    status: int = 200
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    pieces: Sequence[str] | None = None
    chunk_chars: int = 16
    first_delay: float = 0.0
    delay: float = 0.0
    break_after: int | None = None
    break_with: str = "error"
    has_done: bool = True
    crlf: bool = False


Script = Callable[[Received], ScriptedReply | Awaitable[ScriptedReply | None] | None]
"""Decides about a request; None: answer as without a script."""


class Queues:
    """A script of replies in order, per key: the value of ``X-Script`` or else of ``user`` or ``model`` in
    the request.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[ScriptedReply]] = {}

    def push(self, key: str, *replies: ScriptedReply) -> None:
        """Add replies for ``key``; "*" serves the keys that have none."""
        self._queues.setdefault(key, deque()).extend(replies)

    def __call__(self, received: Received) -> ScriptedReply | None:
        """The next reply for the request's key."""
        request = received.request or {}
        for key in (received.headers.get("X-Script"), request.get("user"), request.get("model"), "*"):
            if isinstance(key, str) and (queue := self._queues.get(key)):
                return queue.popleft()
        return None


class ScriptedModel:
    """The state of the server: what it received, what its cache knows, how it is set up.

    ``window`` is the context window in tokens (None: no limit), ``is_strict`` turns the refusals on,
    ``keep`` bounds how many requests ``received`` holds (the newest), ``first_delay`` and ``delay`` are the
    latency (seconds) of the replies that no script gives.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        window: int | None = None,
        is_strict: bool = True,
        keep: int = 256,
        first_delay: float = 0.0,
        delay: float = 0.0,
    ) -> None:
        self.script = script
        self.window = window
        self.is_strict = is_strict
        self.first_delay = first_delay
        self.delay = delay
        self.received: deque[Received] = deque(maxlen=keep)
        self.calls = 0
        self.disconnects = 0
        self._prefixes: OrderedDict[bytes, None] = OrderedDict()

    async def decide(self, received: Received) -> ScriptedReply:
        """The reply to a request, refusals included."""
        request = received.request
        if request is None:
            return _refuse(Refusal(message="We could not parse the JSON body of your request."))
        if self.is_strict and (refusal := check(request)):
            return _refuse(refusal)
        if self.window is not None:
            messages, tools = _sizes(request)
            if refusal := overflow(window=self.window, messages=messages, tools=tools):
                return _refuse(refusal)
        reply = self.script(received) if self.script is not None else None
        if inspect.isawaitable(reply):
            reply = await reply
        return reply or ScriptedReply(message=answer(request), first_delay=self.first_delay, delay=self.delay)

    def measure(self, request: dict[str, Any], reply: ScriptedReply, n: int) -> dict[str, Any]:
        """The ``usage`` of a call; the request's messages are in the cache from now on."""
        items = list(_prompt_items(request))
        prompt = sum(map(len, items)) // 4
        completion = n * max(1, len(_dump(reply.message)) // 4)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._look_up(items), "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }

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
    """The web application around ``model``."""
    state = model or ScriptedModel()

    async def complete(request: web.Request) -> web.StreamResponse:
        return await _complete(state, request)

    async def elsewhere(request: web.Request) -> web.Response:
        await _receive(state, request)
        message = f"Invalid URL ({request.method} {request.path})"
        return _json(Refusal(message=message, status=404).body(), status=404)

    async def models(request: web.Request) -> web.Response:
        await _receive(state, request)
        model_object = {"id": MODEL, "object": "model", "created": _CREATED, "owned_by": "tersely"}
        return _json(_dump({"object": "list", "data": [model_object]}))

    app = web.Application(client_max_size=_BODY_LIMIT)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_route("*", "/{path:.*}", elsewhere)
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedServer:
    """A running server: ``base_url`` is what an OpenAI client is pointed at (with ``/v1``)."""

    base_url: str
    port: int
    model: ScriptedModel


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


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The message that answers a request which no script answers. Deterministic."""
    messages: list[dict[str, Any]] = [each for each in request.get("messages") or () if isinstance(each, dict)]
    last = messages[-1] if messages else {}
    words = _text(last)
    call = _asked_call(words, request) if last.get("role") == "user" else None
    system = "\n".join(_text(each) for each in messages if each.get("role") in {"system", "developer"})
    terse = f"\n<terse>{_summary(words)}</terse>" if "<terse>" in system else ""
    if call is not None:
        name, arguments = call
        call_id = "call_" + _hash(_dump([len(messages), name, arguments]))[:24]
        function = {"name": name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    speaker = "The tool answered" if last.get("role") in {"tool", "function"} else "You said"
    content = f"I was sent {len(messages)} messages. {speaker}: {words[:_REPEATED]}"
    return {"role": "assistant", "content": content + terse, "refusal": None}


async def _receive(state: ScriptedModel, request: web.Request) -> Received:
    body = await request.read()
    parsed = parse_body(body) if body else None
    state.calls += 1
    received = Received(
        number=state.calls,
        method=request.method,
        path=request.path_qs,
        headers=request.headers,
        body=body,
        request=parsed if isinstance(parsed, dict) else None,
    )
    state.received.append(received)
    return received


async def _complete(state: ScriptedModel, http: web.Request) -> web.StreamResponse:
    received = await _receive(state, http)
    reply = await state.decide(received)
    headers = {"x-request-id": "req_" + _hash(received.body), **reply.headers}
    try:
        if reply.body is not None:
            await _sleep(reply.first_delay)
            return _json(reply.body, status=reply.status, headers=headers)
        request = received.request or {}
        n = request.get("n") or 1
        usage = dict(reply.usage) if reply.usage is not None else state.measure(request, reply, n)
        envelope = {"id": "chatcmpl-" + _hash(received.body), "created": _CREATED, "model": request.get("model")}
        if request.get("stream"):
            return await _stream(http, reply, _events(request, reply, envelope, usage, n), headers)
        await _sleep(reply.first_delay)
        return _json(_dump(_completion(reply, envelope, usage, n)), status=reply.status, headers=headers)
    except (ConnectionResetError, asyncio.CancelledError):
        state.disconnects += 1
        raise


def _completion(reply: ScriptedReply, envelope: Mapping[str, Any], usage: dict[str, Any], n: int) -> dict[str, Any]:
    choice = {"message": _message(reply), "logprobs": None, "finish_reason": _finish(reply)}
    return {
        "id": envelope["id"],
        "object": "chat.completion",
        "created": envelope["created"],
        "model": envelope["model"],
        "choices": [{"index": index, **choice} for index in range(n)],
        "usage": usage,
        "service_tier": "default",
        "system_fingerprint": "fp_scripted",
    }


async def _stream(
    http: web.Request, reply: ScriptedReply, events: list[bytes], headers: Mapping[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(
        status=reply.status, headers={"Content-Type": "text/event-stream; charset=utf-8", **headers}
    )
    await _sleep(reply.first_delay)
    await response.prepare(http)
    end = len(events) if reply.break_after is None else reply.break_after
    for block in events[:end] if reply.delay else [b"".join(events[:end])]:
        await response.write(block)
        await _sleep(reply.delay)
    if reply.break_after is not None:
        await _break_off(http, response, reply)
    await response.write_eof()
    return response


async def _break_off(http: web.Request, response: web.StreamResponse, reply: ScriptedReply) -> None:
    match reply.break_with:
        case "error":
            error = {"message": "The server had an error while processing your request.", "type": "server_error"}
            body = _dump({"error": {**error, "param": None, "code": None}})
            await response.write(b"data: " + body + _newline(reply) * 2)
        case "disconnect":
            if http.transport is not None:
                http.transport.abort()
        case _:
            await asyncio.Event().wait()


def _events(
    request: Mapping[str, Any],
    reply: ScriptedReply,
    envelope: Mapping[str, Any],
    usage: dict[str, Any],
    n: int,
) -> list[bytes]:
    options = request.get("stream_options")
    has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    head = _dump(
        {
            "id": envelope["id"],
            "object": "chat.completion.chunk",
            "created": envelope["created"],
            "model": envelope["model"],
            "service_tier": "default",
            "system_fingerprint": "fp_scripted",
        }
    )[:-1]
    end = (b',"usage":null}' if has_usage else b"}") + _newline(reply) * 2

    def event(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + head + b',"choices":[' + _dump(choice) + b"]" + end

    deltas = list(_deltas(reply))
    events = [event(index, delta) for delta in deltas for index in range(n)]
    events += [event(index, {}, _finish(reply)) for index in range(n)]
    if has_usage:
        tail = b',"choices":[],"usage":' + _dump(usage) + b"}"
        events.append(b"data: " + head + tail + _newline(reply) * 2)
    if reply.has_done:
        events.append(b"data: [DONE]" + _newline(reply) * 2)
    return events


def _deltas(reply: ScriptedReply) -> Iterable[dict[str, Any]]:
    message = _message(reply)
    content, calls = message.pop("content", None), message.pop("tool_calls", None)
    yield {**message, "content": None if calls and content is None else ""}
    if isinstance(content, str):
        for piece in _pieces(reply, content):
            yield {"content": piece}
    elif content is not None:
        yield {"content": content}
    for index, call in enumerate(calls or ()):
        function = dict(call.get("function") or {})
        arguments = function.get("arguments") or ""
        yield {"tool_calls": [{"index": index, **call, "function": {**function, "arguments": ""}}]}
        for start in range(0, len(arguments), reply.chunk_chars):
            piece = arguments[start : start + reply.chunk_chars]
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _pieces(reply: ScriptedReply, content: str) -> Iterable[str]:
    if reply.pieces is not None:
        return reply.pieces
    size = max(1, reply.chunk_chars)
    return (content[start : start + size] for start in range(0, len(content), size))


def _message(reply: ScriptedReply) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **reply.message}


def _finish(reply: ScriptedReply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.message.get("tool_calls") else "stop")


def _newline(reply: ScriptedReply) -> bytes:
    return b"\r\n" if reply.crlf else b"\n"


def _refuse(refusal: Refusal) -> ScriptedReply:
    return ScriptedReply(status=refusal.status, body=refusal.body())


def _asked_call(words: str, request: Mapping[str, Any]) -> tuple[str, str] | None:
    """``call NAME {json}``, when a tool of that name is offered; the JSON text as it was said."""
    verb, _, rest = words.strip().partition(" ")
    name, _, arguments = rest.strip().partition(" ")
    if verb.lower() != "call" or name not in _tool_names(request):
        return None
    return name, arguments.strip() or "{}"


def _tool_names(request: Mapping[str, Any]) -> set[str]:
    names = set()
    for tool in request.get("tools") or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            names.add(function["name"])
    return names


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def _summary(words: str) -> str:
    return "answered: " + (" ".join(words.replace("<", " ").replace(">", " ").split()[: 3 * _WORDS]) or "nothing")


def _prompt_items(request: Mapping[str, Any]) -> Iterable[bytes]:
    """What a provider's cache goes by, in its order: tools, then each message."""
    if tools := request.get("tools"):
        yield _dump(tools)
    for message in request.get("messages") or ():
        yield _dump(message)


def _sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the messages and of the tools: bytes by four."""
    messages = sum(len(_dump(message)) for message in request.get("messages") or ())
    tools = request.get("tools")
    return messages // 4, len(_dump(tools)) // 4 if tools else 0


def _dump(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer beyond 64 bits
        return json.dumps(value, separators=(",", ":")).encode()


def _hash(content: bytes) -> str:
    return blake2b(content, digest_size=12).hexdigest()


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _json(body: bytes, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
