"""The model's side of a replay: the strict scripted upstream, which answers with the recorded replies.

A share of the replies get a ``<terse>`` tag, if the request asks for tags, or a ``### STATE`` block if it asks for
that. All random choices follow from a hash of the conversation and the call, so that a replay can be repeated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from typing_extensions import override

from tersely.dialects.registry import DIALECTS
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import INSTRUCTION_ROLES, Text
from tersely.domain.messages import Dialect as DialectName
from tersely.fakellm.scripted import CHAT, ReceivedRequest, ScriptedModel, ScriptedReply, WireFormat
from tersely.transcripts.replies import has_calls, last_text, with_last_text

KEY_HEADER = "x-replay-call"
OPEN, CLOSE = "<terse>", "</terse>"
HEADING = "### STATE"
# Models put most tags at the requested place; most misplaced ones stand at the beginning.
AT_THE_END = 0.85
# Models were asked to tag final replies; some also tag text before a tool call.
WITH_CALLS = 0.2
SUMMARY_WORDS = 14
MAX_PIECE = 48

_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)


def chance(*parts: object) -> float:
    """Return a number from 0 up to 1 that is always the same for the same parts."""
    digest = blake2b(repr(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRequest:
    """A request as it reached the model, and the result: ``refusal`` is the body of an error."""

    body: bytes
    status: int
    refusal: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedReply:
    """The expected reply to one call, and the share of replies that get a tag.

    ``message`` is in the wire form of ``dialect``; None: unknown, so the model answers by itself.
    """

    message: Mapping[str, Any] | None
    seed: tuple[object, ...]
    share: float
    dialect: DialectName = "openai_chat"


class RecordedModel(ScriptedModel):
    """Answers by the header that names the call, and keeps the received requests until they are collected."""

    def __init__(self, *, window: int | None) -> None:
        """``window``: the context window in tokens, beyond which requests are refused."""
        super().__init__(script=self._recorded, window=window, keep=1)
        self._expected: dict[str, ExpectedReply] = {}
        self._turned: defaultdict[str, list[RecordedRequest]] = defaultdict(list)

    def expect(self, key: str, expected: ExpectedReply) -> None:
        """The call ``key`` is about to come."""
        self._expected[key] = expected

    def collect(self, key: str) -> list[RecordedRequest]:
        """Return and forget what arrived under ``key``."""
        self._expected.pop(key, None)
        return self._turned.pop(key, [])

    @override
    async def decide(self, received: ReceivedRequest, wire: WireFormat = CHAT, model: str = "") -> ScriptedReply:
        reply = await super().decide(received, wire, model)
        key = received.headers.get(KEY_HEADER, "")
        self._turned[key].append(RecordedRequest(body=received.body, status=reply.status, refusal=reply.body))
        return reply

    def _recorded(self, received: ReceivedRequest) -> ScriptedReply | None:
        expected = self._expected.get(received.headers.get(KEY_HEADER, ""))
        if expected is None or expected.message is None:
            return None
        message = tagged(expected.message, expected, _instructions(received.body, expected.dialect))
        size = 1 + int(chance("piece", *expected.seed) * MAX_PIECE)
        fields = {key: value for key, value in message.items() if key != "role"}
        if expected.dialect == "openai_chat":
            fields["refusal"] = None
        return ScriptedReply(message=fields, chunk_chars=size)


def tagged(message: Mapping[str, Any], expected: ExpectedReply, instructions: str) -> Mapping[str, Any]:
    """Return a reply with the tags that the instructions ask for, if its random choice selects it."""
    text = last_text(message, expected.dialect)
    if text is None or not text.strip():
        return message
    share = expected.share * (WITH_CALLS if has_calls(message, expected.dialect) else 1)
    if OPEN in instructions:
        return with_last_text(message, expected.dialect, with_tag(text, expected.seed, share))
    if HEADING in instructions:
        return with_last_text(message, expected.dialect, with_state(text, expected.seed, share))
    return message


def with_tag(text: str, seed: tuple[object, ...], share: float) -> str:
    """Return a reply's text with a tag, or unchanged where chance or the text's form excludes one."""
    if not text.strip() or OPEN in text or chance("tag", *seed) >= share:
        return text
    tag = f"{OPEN}{_summary(text)}{CLOSE}"
    # A tag inside a code fence is text, so a reply with fences gets its tag in front of them.
    if _FENCE.search(text):
        return text if _FENCE.match(text) else tag + text
    if chance("place", *seed) < AT_THE_END:
        return text + tag
    head, separator, rest = text.partition("\n\n")
    return f"{head}{separator}{tag}{rest}" if separator and chance("inside", *seed) < 0.5 else tag + text


def with_state(text: str, seed: tuple[object, ...], share: float) -> str:
    """Return the text of a reply with a state block at its end, as `with_tag` would tag it."""
    if not text.strip() or HEADING in text or _FENCE.search(text):
        return text
    if text != text.rstrip() or chance("tag", *seed) >= share:
        return text
    return f"{text}\n\n{HEADING}\nGoal: {_summary(text)}\nContext: none\nResolved: none\nTechnical Anchors: none"


def _summary(content: str) -> str:
    words = re.sub(r"[<>`~]", " ", content).split()
    return " ".join(words[:SUMMARY_WORDS])


def _instructions(body: bytes, dialect: DialectName) -> str:
    try:
        messages = DIALECTS[dialect].read_request(body).messages
    except InvalidRequest:
        return ""
    parts = (part for message in messages if message.role in INSTRUCTION_ROLES for part in message.parts)
    return "\n".join(part.text for part in parts if isinstance(part, Text))
