"""Replies of a form that no provider documents.

They reach the client unchanged. The parts that can be parsed are the reply. The others are stored unchanged, outside of
the history, so that no context contains them.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from tersely.dialects.dialect import ClientView, Reply, ReplySplitter
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Media, Message

UNDESCRIBED: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    InvalidRequest,
)
"""The errors that reading JSON of an unexpected shape raises."""

MAX_UNREAD = 16 * 1024 * 1024
"""Bytes of one stream's events that are kept although they cannot be understood."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_NOTHING: tuple[object, ...] = (None, "", [], {}, 0, False)
_FIELDS = frozenset({b"", b"data", b"event", b"id", b"retry"})


def read_known_reply(read: Callable[[bytes], Message], mend: Callable[[bytes], bytes], raw: bytes) -> Message:
    """Read a reply's message. This never fails.

    ``read`` raises for a message of an unknown form; ``mend`` returns the message without the parts that cannot be
    parsed. If none is left, the message has one part that stands for everything.
    """
    try:
        if not raw.isascii():
            raw.decode()
        return read(raw)
    except UNDESCRIBED:
        pass
    try:
        mended = read(mend(raw))
    except UNDESCRIBED:
        mended = None
    if mended is not None and mended.parts:
        return replace(mended, raw=raw, is_malformed=True)
    digest = blake2b(raw, digest_size=16).hexdigest()
    return Message(role="assistant", parts=(Media(kind="other", digest=digest),), raw=raw, is_malformed=True)


def has_unknown_text(members: Mapping[str, object], known: frozenset[str]) -> bool:
    """Return whether an object has a member with something in it besides the ``known`` ones."""
    return any(value not in _NOTHING for name, value in members.items() if name not in known)


def readable(read: Callable[[bytes], object], raws: Sequence[bytes]) -> list[bytes]:
    """Return those of ``raws`` that ``read`` can parse."""
    kept: list[bytes] = []
    for raw in raws:
        try:
            read(raw)
        except UNDESCRIBED:
            continue
        kept.append(raw)
    return kept


def split_safely(split: ReplySplitter) -> ReplySplitter:
    """Wrap a dialect's ``split_reply``: if ``split`` fails, the body passes unread."""

    def split_reply(body: bytes, view: ClientView) -> tuple[bytes, Reply]:
        try:
            return split(body, view)
        except UNDESCRIBED:
            return body, Reply(unread=unread_body(body))

    return split_reply


def unread_body(body: bytes) -> tuple[bytes, ...]:
    """Return the unread payloads of a whole reply that cannot be parsed: the body, unless it is empty."""
    return (body,) if body.strip() else ()


class UnreadPayloads:
    """Events of a stream that cannot be understood: their data, or, where they are no events at all, their bytes."""

    __slots__ = ("_size", "payloads")

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self._size = 0

    def add(self, payload: bytes) -> None:
        """Keep a payload, within `MAX_UNREAD` bytes in all."""
        self._size += len(payload)
        if payload.strip() and self._size <= MAX_UNREAD:
            self.payloads.append(payload)

    def add_if_no_event(self, raw: bytes) -> None:
        """Keep a block between blank lines without data, unless it consists of comments and known fields."""
        names = [line.partition(b":")[0] for line in _LINE_END.split(raw.strip(b"\xef\xbb\xbf"))]
        if any(name not in _FIELDS for name in names):
            self.add(raw)


def payloads_as_json(payloads: Sequence[bytes]) -> bytes:
    """Return unread payloads as one JSON text: a single one unchanged, several as an array.

    A payload that is no JSON becomes a string, or if it is no text an object with the member ``base64``.
    """
    written = [payload if _is_json(payload) else _as_string(payload) for payload in payloads]
    return written[0] if len(written) == 1 else raw_json.join_array(written)


def _is_json(payload: bytes) -> bool:
    try:
        msgspec.json.decode(payload)
    except (ValueError, RecursionError):
        pass
    else:
        return True
    try:
        json.loads(payload.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return not payload.startswith(b"\xef\xbb\xbf")


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _as_string(payload: bytes) -> bytes:
    try:
        return raw_json.dump(payload.decode())
    except UnicodeDecodeError:
        return raw_json.dump({"base64": b64encode(payload).decode()})
