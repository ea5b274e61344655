r"""Split JSON one level at a time; values keep their bytes.

msgspec is used first. It refuses strings with a lone surrogate (``"\ud800"``), which Python, JavaScript and so real
clients write, and the words ``NaN`` and ``Infinity``. For these the standard library decides whether the text is JSON,
and a scanner here finds the values. All functions raise ValueError for invalid JSON or a wrong type, and ``TooDeep`` (a
ValueError) for more than about a thousand levels of nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, AnyStr

import msgspec

_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_value_decoder = msgspec.json.Decoder()

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]', re.DOTALL)
_PIECE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},:]|[^\s\[\]{},:"]+', re.DOTALL)
_STRUCTURE = frozenset({b"[", b"]", b"{", b"}", b",", b":"})
_CHARACTER = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[\x00-\x7f]|[\xc0-\xff][\x80-\xbf]*", re.DOTALL
)
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
MAX_REMEMBERED = 64
MAX_PRETTY_PRINTED = 1024 * 1024
"""Bytes of a text whose blanks are kept when a value in it changes."""


class TooDeep(ValueError):
    """The JSON is nested too deep to be read."""


def load(raw: bytes) -> Any:
    """Any JSON value, lone surrogates included (as such in the strings)."""
    try:
        return _value_decoder.decode(raw)
    except msgspec.DecodeError:
        return _load_slowly(raw)
    except RecursionError as error:
        raise TooDeep("nested too deep") from error


def string(raw: bytes | None) -> str:
    """Return a JSON string; an empty string for every other value, and for invalid JSON."""
    if not raw or not raw.startswith(b'"'):
        return ""
    try:
        value = load(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def dump(value: object) -> bytes:
    """Compact JSON in UTF-8; a lone surrogate is written as its escape, integers may have any size."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()


def split_object(raw: bytes) -> dict[str, bytes]:
    """Return the members of an object in order, values verbatim. Of duplicate members the last one counts."""
    try:
        return {key: bytes(value) for key, value in _object_decoder.decode(raw).items()}
    except msgspec.DecodeError:
        if not isinstance(_load_slowly(raw), dict):
            raise ValueError("expected an object") from None  # noqa: TRY004 - it is the input that is bad
        return dict(_scan_members(raw))
    except RecursionError as error:
        raise TooDeep("nested too deep") from error


def split_array(raw: bytes) -> list[bytes]:
    """Return the elements of an array in order, verbatim."""
    try:
        return [bytes(value) for value in _array_decoder.decode(raw)]
    except msgspec.DecodeError:
        if not isinstance(_load_slowly(raw), list):
            raise ValueError("expected an array") from None  # noqa: TRY004 - it is the input that is bad
        return [value for value in _scan_items(raw) if value]
    except RecursionError as error:
        raise TooDeep("nested too deep") from error


def join_object(members: dict[str, bytes]) -> bytes:
    """Return the inverse of ``split_object``."""
    return b"{" + b",".join([_key(key) + value for key, value in members.items()]) + b"}"


def with_member(raw: bytes, members: Mapping[str, bytes], name: str, value: bytes) -> bytes:
    """Return the object ``raw``, which has ``members``, with another value of one of them. Where the old value stands
    nowhere else in ``raw``, all other bytes stay.
    """
    old = members.get(name, b"")
    replaced = _replace_only(raw, old, value) if old else None
    return join_object({**members, name: value}) if replaced is None else replaced


def with_items(raw: bytes, items: list[bytes], changed: list[bytes]) -> bytes:
    """Return the array ``raw``, which has ``items``, with ``changed`` ones in their places; as `with_member`."""
    for old, new in zip(items, changed, strict=True):
        if old is not new:
            replaced = _replace_only(raw, old, new)
            if replaced is None:
                return join_array(changed)
            raw = replaced
    return raw


def _replace_only(raw: bytes, old: bytes, new: bytes) -> bytes | None:
    """Return ``raw`` with ``new`` in the place of the only ``old``; None if ``old`` stands nowhere or several times."""
    before, found, after = raw.partition(old)
    return before + new + after if found and after.find(old) < 0 else None


def like_original(before: bytes, after: bytes) -> bytes:
    """Return ``after`` with the blanks and escapes of ``before``, which differs only in values."""
    if len(before) > MAX_PRETTY_PRINTED or _is_shortened(before, after):
        return after
    old, new = list(_PIECE.finditer(before)), list(_PIECE.finditer(after))
    if len(old) != len(new):
        return after
    out: list[bytes] = []
    end = 0
    for was, now in zip(old, new, strict=True):
        out.append(before[end : was.start()])
        end = was.end()
        if was[0] == now[0]:
            out.append(was[0])
        elif was[0] in _STRUCTURE or now[0] in _STRUCTURE:
            return after
        else:
            out.append(_shortened(was[0], now[0]))
    return b"".join(out) + before[end:]


def _is_shortened(before: bytes, after: bytes) -> bool:
    """Return whether ``after`` is ``before`` without a part: then it has the blanks and escapes of that."""
    first = _in_common(before, after)
    rest = len(after) - first
    return len(before) > len(after) and before[len(before) - rest :] == after[first:]


def _shortened(before: bytes, after: bytes) -> bytes:
    """Return the string ``after`` with the escapes of ``before``, of which it is the beginning and the end."""
    try:
        old_text, shown = load(before), load(after)
    except ValueError:
        return after
    if not (isinstance(old_text, str) and isinstance(shown, str)):
        return after
    characters = _CHARACTER.findall(before[1:-1])
    first = _in_common(old_text, shown)
    last = _in_common(old_text[first:][::-1], shown[first:][::-1])
    if first + last < len(shown) or len(characters) != len(old_text):
        return after
    return b'"' + b"".join(characters[:first] + characters[len(old_text) - last :]) + b'"'


def _in_common(one: AnyStr, other: AnyStr) -> int:
    """Return the length of the common beginning. Compares halves: each compare is one of memory."""
    equal, unequal = 0, min(len(one), len(other)) + 1
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        if one.startswith(other[equal:middle], equal):
            equal = middle
        else:
            unequal = middle
    return equal


def _key(name: str) -> bytes:
    return _short_key(name) if len(name) <= MAX_REMEMBERED else dump(name) + b":"


@lru_cache(maxsize=512)
def _short_key(name: str) -> bytes:
    return dump(name) + b":"


def join_array(items: list[bytes]) -> bytes:
    """Return the inverse of ``split_array``."""
    return b"[" + b",".join(items) + b"]"


def _load_slowly(raw: bytes) -> Any:
    try:
        return json.loads(raw.removeprefix(_BOM).decode())
    except RecursionError as error:
        raise TooDeep("nested too deep") from error


def _scan_members(raw: bytes) -> Iterator[tuple[str, bytes]]:
    for item in _scan_items(raw):
        if item:
            key = _TOKEN.match(item)
            assert key is not None  # the text is known to be valid
            name = json.loads(key[0].decode())
            yield name, item[key.end() :].lstrip(_BLANKS)[1:].strip(_BLANKS)


def _scan_items(raw: bytes) -> Iterator[bytes]:
    """Split a valid text at the commas of its outermost brackets."""
    depth, start = 0, 0
    for token in _TOKEN.finditer(raw):
        kind = token[0][:1]
        if kind in b"[{":
            depth += 1
            if depth == 1:
                start = token.end()
        elif depth == 1 and kind in b",]}":
            yield raw[start : token.start()].strip(_BLANKS)
            start = token.end()
        if kind in b"]}":
            depth -= 1
