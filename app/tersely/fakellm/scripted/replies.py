"""Requests and replies of a scripted model, independent of the wire format."""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec

from tersely.fakellm.strict.openai_chat import Refusal

MODEL = "scripted"
CREATED = 1_700_000_000
_REPEATED = 400
_WORDS = 12
_CALL = re.compile(r'^[\s"]*call (?P<name>[\w.:-]+)', re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedRequest:
    """A received request. ``number`` counts from 1; ``request`` is None when the body was no JSON object."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    request: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedReply:
    """A reply of the script. ``message`` is an assistant's message as chat completions write it, or in the wire form of
    the dialect that is asked in; with ``n`` choices each gets the same.

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


Script = Callable[[ReceivedRequest], ScriptedReply | Awaitable[ScriptedReply | None] | None]
"""Decides about a request; None: answer as without a script."""


class Queues:
    """A script of replies in order, per key: the value of ``X-Script`` or else of ``user`` or ``model`` in
    the request.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[ScriptedReply]] = {}

    def push(self, key: str, *replies: ScriptedReply) -> None:
        """Add replies for ``key``; "*" is used for keys without replies."""
        self._queues.setdefault(key, deque()).extend(replies)

    def __call__(self, received: ReceivedRequest) -> ScriptedReply | None:
        """Return the next reply for the request's key."""
        request = received.request or {}
        for key in (received.headers.get("X-Script"), request.get("user"), request.get("model"), "*"):
            if isinstance(key, str) and (queue := self._queues.get(key)):
                return queue.popleft()
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The parts of a request that a script uses: the number of messages, and the last one's text.

    ``system`` are all instructions, ``schema`` is the JSON schema of the reply, if one is requested.
    """

    messages: int
    words: str
    system: str
    tools: frozenset[str]
    is_result: bool
    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a call; ``cached`` is part of ``input``."""

    input: int
    cached: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedExchange:
    """A request and its reply. ``id`` depends on the request alone. ``model`` and streaming may come from
    the address.
    """

    request: dict[str, Any]
    reply: ScriptedReply
    counted: TokenCounts
    id: str
    model: str

    @property
    def newline(self) -> bytes:
        """Return the line end that the reply uses."""
        return b"\r\n" if self.reply.crlf else b"\n"

    def event(self, data: object, name: str = "") -> bytes:
        """Return a server-sent event; ``data`` as JSON, or as it is."""
        written = data if isinstance(data, bytes) else dump(data)
        head = b"event: " + name.encode() + self.newline if name else b""
        return head + b"data: " + written + self.newline * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WireFormat:
    """A format: what is refused in it, what a request asks, how a reply is written.

    ``check_model`` gets the model's name, which may stand elsewhere than in the request.
    ``prompt`` gives what a provider's cache goes by, in its order; ``sizes`` the bytes of messages and of tools.
    """

    check: Callable[[dict[str, Any]], Refusal | None]
    overflow: Callable[..., Refusal | None]
    refuse: Callable[[Refusal], bytes]
    prompt: Callable[[Mapping[str, Any]], Iterable[bytes]]
    sizes: Callable[[Mapping[str, Any]], tuple[int, int]]
    read_request: Callable[[Mapping[str, Any]], ModelRequest]
    whole: Callable[[ScriptedExchange], bytes]
    events: Callable[[ScriptedExchange], list[bytes]]
    error: Callable[[ScriptedExchange], bytes]
    check_model: Callable[[dict[str, Any], str], Refusal | None] = lambda _request, _model: None


def default_reply(request: ModelRequest, number: int) -> dict[str, Any]:
    """Return the reply to a request without a script, as chat completions write it. Deterministic.

    ``number`` is that of the request: no host gives two calls the same id.
    """
    call = None if request.is_result else _requested_call(request)
    if call is not None:
        name, arguments = call
        call_id = "call_" + digest(dump([number, request.messages, name, arguments]))[:24]
        function = {"name": name, "arguments": arguments}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        }
    if request.schema is not None:
        return {"role": "assistant", "content": dump(_instance(request.schema)).decode(), "refusal": None}
    terse = f"\n<terse>{_summary(request.words)}</terse>" if "<terse>" in request.system else ""
    speaker = "The tool answered" if request.is_result else "You said"
    content = f"I was sent {request.messages} messages. {speaker}: {request.words[:_REPEATED]}"
    return {"role": "assistant", "content": content + terse, "refusal": None}


def calls_of(reply: ScriptedReply) -> list[dict[str, Any]]:
    """Return the calls of a message as chat completions write it: ``id``, ``name``, ``arguments`` (JSON text)."""
    return [{"id": call["id"], **call["function"]} for call in reply.message.get("tool_calls") or ()]


def pieces(reply: ScriptedReply, content: str) -> Iterable[str]:
    """Split a text into the pieces in which it is streamed."""
    if reply.pieces is not None:
        return reply.pieces
    size = max(1, reply.chunk_chars)
    return (content[start : start + size] for start in range(0, len(content), size))


def text_of(content: object) -> str:
    """Return the words of a content: a string, or the texts of its parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = (part.get("text") for part in parts if isinstance(part, dict))
    return "\n".join(text for text in texts if isinstance(text, str))


def dump(value: object) -> bytes:
    """Compact JSON."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer beyond 64 bits
        return json.dumps(value, separators=(",", ":")).encode()


def prompt_sizes(
    request: Mapping[str, Any], messages: Iterable[object] | None, *, instructions: str = ""
) -> tuple[int, int]:
    """Return the bytes of the messages with the member ``instructions``, and those of the tools."""
    own = len(dump(request.get(instructions) or "")) if instructions else 0
    tools = request.get("tools")
    return own + sum(len(dump(message)) for message in messages or ()), len(dump(tools)) if tools else 0


def digest(content: bytes) -> str:
    """Return a short name for bytes."""
    return blake2b(content, digest_size=12).hexdigest()


def _requested_call(request: ModelRequest) -> tuple[str, str] | None:
    """Return the last line ``call NAME {json}`` with an offered tool, as name and JSON text.

    Programs add their own text before and after the user's.
    """
    calls = [items for items in _CALL.finditer(request.words) if items["name"] in request.tools]
    if not calls:
        return None
    arguments = request.words[calls[-1].end() :].strip()
    with contextlib.suppress(ValueError, RecursionError):
        arguments = arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    return calls[-1]["name"], arguments or "{}"


def _instance(schema: Mapping[str, Any]) -> Any:
    """Return the simplest value that a JSON schema without references allows."""
    if options := schema.get("enum"):
        return options[0]
    match str(schema.get("type", "string")).lower():
        case "object":
            return {name: _instance(each) for name, each in (schema.get("properties") or {}).items()}
        case "array":
            return []
        case "boolean":
            return True
        case "number" | "integer":
            return schema.get("minimum", 1)
        case _:
            return "scripted"


def _summary(words: str) -> str:
    return "answered: " + (" ".join(words.replace("<", " ").replace(">", " ").split()[:_WORDS]) or "nothing")
