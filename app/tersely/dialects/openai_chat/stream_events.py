"""The parsed chunks of a streamed reply. Members that Tersely does not use are not parsed."""

from __future__ import annotations

from typing import Any

import msgspec

from tersely.dialects.undescribed import UNDESCRIBED, UnreadPayloads
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.bodies import try_decode

ABSENT = msgspec.Raw()
"""The value of a missing member."""
ENVELOPE = frozenset(
    {
        "id", "object", "created", "model", "choices", "system_fingerprint", "service_tier", "obfuscation",
        "provider", "p", "stream_options", "native_finish_reason",
    }
)  # fmt: skip
"""Members that say nothing by themselves: an event with only these and no words left in it is dropped."""


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class CustomDelta(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | int | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None
    extra_content: Any = None


class ChoiceDelta(msgspec.Struct):
    role: str | None = None
    content: str | list[Any] | None = None
    refusal: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    reasoning_details: Any = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None
    audio: Any = None
    annotations: Any = None


class Choice(msgspec.Struct):
    position: int | None = msgspec.field(name="index", default=None)
    delta: ChoiceDelta | None = None
    finish_reason: str | None = None

    @property
    def index(self) -> int:
        return self.position or 0


class Chunk(msgspec.Struct):
    choices: list[Choice] | None = None
    id: str | None = None
    model: str | None = None
    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT

    @property
    def has_outcome(self) -> bool:
        return self.usage is not ABSENT or self.error is not ABSENT


class _WordsDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    role: None = None
    refusal: None = None
    tool_calls: None = None


class _WordsChoice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _WordsDelta
    index: int = 0
    finish_reason: None = None
    logprobs: None = None


_Words = msgspec.defstruct(
    "_Words",
    [("choices", tuple[_WordsChoice]), ("usage", None, None), *[(name, Any, None) for name in ENVELOPE - {"choices"}]],
    forbid_unknown_fields=True,
)
_chunk_decoder = msgspec.json.Decoder(Chunk)
_chunks_decoder = msgspec.json.Decoder(list[Chunk])
_words_decoder = msgspec.json.Decoder(_Words)


def read_chunks(payloads: list[bytes], unread: UnreadPayloads) -> list[Chunk]:
    """Parse the chunks in the data of events, all at once if possible. Data that cannot be parsed is added to
    ``unread``.
    """
    try:
        chunks = _chunks_decoder.decode(b"[" + b",".join(payloads) + b"]")
        if len(chunks) == len(payloads):
            for each, payload in zip(chunks, payloads, strict=True):
                if each.choices is None and not each.has_outcome:
                    unread.add(payload)
            return chunks
    except (ValueError, RecursionError):
        pass
    return [chunk for payload in payloads if (chunk := read_chunk(payload, unread)) is not None]


def read_chunk(data: bytes, unread: UnreadPayloads) -> Chunk | None:
    if (described := try_decode(_chunk_decoder, data)) is not None:
        if described.choices is None and not described.has_outcome:
            unread.add(data)
        return described
    try:
        members = raw_json.split_object(data)
    except ValueError:
        unread.add(data)
        return None
    chunk = Chunk(id=string_of(members.get("id")), model=string_of(members.get("model")))
    if "usage" in members:
        chunk.usage = msgspec.Raw(members["usage"])
    if "error" in members:
        chunk.error = msgspec.Raw(members["error"])
    try:
        chunk.choices = msgspec.convert(raw_json.load(members.get("choices", b"null")), list[Choice] | None)
    except UNDESCRIBED:
        unread.add(data)
    return chunk


def has_words_only(data: bytes) -> bool:
    """Return whether an event has the words of one choice and nothing else, in the usual form of hosts."""
    return try_decode(_words_decoder, data) is not None


def read_described(data: bytes) -> Chunk | None:
    """Parse a chunk of the described form; None if it has another."""
    return try_decode(_chunk_decoder, data)


def string_of(raw: bytes | None) -> str:
    return raw_json.string(raw)
