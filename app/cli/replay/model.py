"""The model's side of a replay: the strict scripted upstream, answering with what was recorded.

A share of the replies get a ``<terse>`` tag, where the request asks for tags, or a ``### STATE`` block where it asks
for that. Everything that looks like chance follows from a hash of the conversation and the call, so that a replay can
be repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from typing_extensions import override

from app.upstream.scripted import CHAT, Received, ScriptedModel, ScriptedReply, Wire

KEY_HEADER = "x-replay-call"
OPEN, CLOSE = "<terse>", "</terse>"
HEADING = "### STATE"
# Models put the tag where they were told to; of those they misplace, most stand at the beginning.
AT_THE_END = 0.85
# They were asked to tag final replies; some tag what they say before a tool call too.
WITH_CALLS = 0.2
SUMMARY_WORDS = 14
MAX_PIECE = 48

_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def chance(*parts: object) -> float:
    """A number from 0 up to 1 that is always the same for the same parts."""
    digest = blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Turned:
    """A request as it reached the model, and how that answered: ``refusal`` is the body of an error."""

    body: bytes
    status: int
    refusal: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the model is to say to one call, and the share of replies that get a tag."""

    message: Mapping[str, Any]
    seed: tuple[object, ...]
    share: float


class RecordedModel(ScriptedModel):
    """Answers by the header that names the call, and keeps what it was sent until that is collected."""

    def __init__(self, *, window: int | None) -> None:
        """``window``: the context window in tokens, beyond which requests are refused."""
        super().__init__(script=self._recorded, window=window, keep=1)
        self._expected: dict[str, Expected] = {}
        self._turned: defaultdict[str, list[Turned]] = defaultdict(list)

    def expect(self, key: str, expected: Expected) -> None:
        """The call ``key`` is about to come."""
        self._expected[key] = expected

    def collect(self, key: str) -> list[Turned]:
        """What arrived under ``key``; forgotten from now on."""
        self._expected.pop(key, None)
        return self._turned.pop(key, [])

    @override
    async def decide(self, received: Received, wire: Wire = CHAT) -> ScriptedReply:
        reply = await super().decide(received, wire)
        key = received.headers.get(KEY_HEADER, "")
        self._turned[key].append(Turned(body=received.body, status=reply.status, refusal=reply.body))
        return reply

    def _recorded(self, received: Received) -> ScriptedReply | None:
        expected = self._expected.get(received.headers.get(KEY_HEADER, ""))
        if expected is None:
            return None
        message = {key: value for key, value in expected.message.items() if key != "role"}
        if _asks_for(OPEN, received.request or {}):
            message["content"] = with_tag(message, expected)
        elif _asks_for(HEADING, received.request or {}):
            message["content"] = with_state(message, expected)
        size = 1 + int(chance("piece", *expected.seed) * MAX_PIECE)
        return ScriptedReply(message={**message, "refusal": None}, chunk_chars=size)


def with_tag(message: Mapping[str, Any], expected: Expected) -> object:
    """The content of a reply with a tag in it, or as it is where chance, or its form, will have none."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip() or OPEN in content:
        return content
    share = expected.share * (WITH_CALLS if message.get("tool_calls") else 1)
    if chance("tag", *expected.seed) >= share:
        return content
    tag = f"{OPEN}{_summary(content)}{CLOSE}"
    # A tag inside a code fence is text, so a reply with fences gets its tag in front of them.
    if _FENCE.search(content):
        return content if _FENCE.match(content) else tag + content
    if chance("place", *expected.seed) < AT_THE_END:
        return content + tag
    head, separator, rest = content.partition("\n\n")
    return f"{head}{separator}{tag}{rest}" if separator and chance("inside", *expected.seed) < 0.5 else tag + content


def with_state(message: Mapping[str, Any], expected: Expected) -> object:
    """The content of a reply with a state block at its end, as `with_tag` would tag it."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip() or HEADING in content or _FENCE.search(content):
        return content
    share = expected.share * (WITH_CALLS if message.get("tool_calls") else 1)
    if content != content.rstrip() or chance("tag", *expected.seed) >= share:
        return content
    said = _summary(content)
    return f"{content}\n\n{HEADING}\nGoal: {said}\nContext: none\nResolved: none\nTechnical Anchors: none"


def _summary(content: str) -> str:
    words = re.sub(r"[<>`~]", " ", content).split()
    return " ".join(words[:SUMMARY_WORDS])


def _asks_for(mark: str, request: Mapping[str, Any]) -> bool:
    messages = request.get("messages") or ()
    return any(
        message.get("role") in {"system", "developer"} and mark in str(message.get("content")) for message in messages
    )
