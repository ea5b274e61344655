"""The chunks of a streamed reply, as they are read. Members that say nothing to us are not looked at."""

from __future__ import annotations

from typing import Any

import msgspec

from app.dialects import raw_json

ABSENT = msgspec.Raw()
"""What a member is that is not there."""


class FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: Any = None


class CustomDelta(msgspec.Struct):
    name: str | None = None
    input: str | None = None


class CallDelta(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None
    extra_content: Any = None


class Delta(msgspec.Struct):
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
    delta: Delta | None = None
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


_chunk_decoder = msgspec.json.Decoder(Chunk)
_chunks_decoder = msgspec.json.Decoder(list[Chunk])


def read_chunks(payloads: list[bytes]) -> list[Chunk]:
    """The chunks in the data of events; what is none is left out. All at once where that can be."""
    try:
        chunks = _chunks_decoder.decode(b"[" + b",".join(payloads) + b"]")
        if len(chunks) == len(payloads):
            return chunks
    except (msgspec.DecodeError, RecursionError):
        pass
    return [chunk for payload in payloads if (chunk := read_chunk(payload)) is not None]


def read_chunk(data: bytes) -> Chunk | None:
    try:
        return _chunk_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        members = raw_json.split_object(data)
    except ValueError:
        return None
    chunk = Chunk(id=string_of(members.get("id")), model=string_of(members.get("model")))
    if "usage" in members:
        chunk.usage = msgspec.Raw(members["usage"])
    if "error" in members:
        chunk.error = msgspec.Raw(members["error"])
    try:
        chunk.choices = msgspec.convert(raw_json.load(members.get("choices", b"null")), list[Choice] | None)
    except ValueError:  # a shape nobody has described: it goes through, and is not understood
        pass
    return chunk


def string_of(raw: bytes | None) -> str:
    value = raw_json.load(raw) if raw else None
    return value if isinstance(value, str) else ""
