"""Images and files of a message: their identity, and the size by which providers bill.

An image's size is read from the first bytes of a data URL; nothing else is decoded.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping
from hashlib import blake2b

from tersely.dialects.wire import raw_json
from tersely.domain.tokens import CHARS_PER_TOKEN, FILE_TOKENS

_HEAD = 64 * 1024
"""Base64 characters looked at: a JPEG's size stands behind its metadata."""

_BASE64 = ";base64,"
_TEXTS = frozenset({"application/json", "application/xml", "application/javascript", "application/x-yaml"})
_FILE = FILE_TOKENS * CHARS_PER_TOKEN

_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def media_digest(value: object) -> str:
    """Identify bytes, an address, or a JSON value that refers to the media."""
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else raw_json.dump(value)
    return blake2b(content, digest_size=16).hexdigest()


def utf8_size(text: str) -> int:
    """Return the bytes of a text in UTF-8, which match a model's tokens better than its characters."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def text_size(mime: str, data: object) -> int:
    """Bytes of a text file in base64; 0 for files of which a model does not read the bytes."""
    is_text = mime.startswith("text/") or mime in _TEXTS or mime.endswith(("+json", "+xml"))
    return len(data) * 3 // 4 if is_text and isinstance(data, str) else 0


def data_url_size(url: str | None) -> int:
    """As `text_size`, for a ``data:`` URL."""
    start = url.find(_BASE64, 0, 200) if url and url.startswith("data:") else -1
    return (
        text_size(url[len("data:") : start].partition(";")[0], url[start + len(_BASE64) :]) if url and start > 0 else 0
    )


def opaque_size(value: object) -> int:
    """Return the bytes of a JSON value that only its provider understands, such as encrypted content.

    Each binary file inside counts as one of unknown size. Nothing is written or decoded.
    """
    size = 0
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str(text):
                size += _FILE if text.startswith("data:") and not data_url_size(text) else utf8_size(text) + 2
            case dict(members):
                size += 2 + sum(len(key) + 4 for key in members)
                is_file = isinstance(members.get("data"), str) and bool(mime := _mime_type(members))
                if is_file and not text_size(mime, members["data"]):
                    size += _FILE
                    waiting += [each for key, each in members.items() if key != "data"]
                else:
                    waiting += members.values()
            case list(items):
                size += 2 + len(items)
                waiting += items
            case other:
                size += len(str(other))
    return size


def _mime_type(members: Mapping[str, object]) -> str:
    named = (members.get(key) for key in ("media_type", "mime_type", "mimeType"))
    return next((mime for mime in named if isinstance(mime, str)), "")


def image_size(url: str) -> tuple[int, int]:
    """Width and height in pixels of the PNG, JPEG, GIF or WebP in a ``data:`` URL; (0, 0) for everything
    else.
    """
    start = url.find(_BASE64, 0, 200)
    if not url.startswith("data:") or start < 0:
        return 0, 0
    start += len(_BASE64)
    text = url[start : start + _HEAD]
    try:
        head = base64.b64decode(text[: len(text) // 4 * 4])
        return _size(head)
    except (binascii.Error, ValueError, struct.error, IndexError):
        return 0, 0


def _size(head: bytes) -> tuple[int, int]:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height = struct.unpack_from(">II", head, 16)
    elif head.startswith((b"GIF87a", b"GIF89a")):
        width, height = struct.unpack_from("<HH", head, 6)
    elif head.startswith(b"\xff\xd8"):
        width, height = _jpeg_size(head)
    elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        width, height = _webp_size(head)
    else:
        return 0, 0
    return int(width), int(height)


def _jpeg_size(head: bytes) -> tuple[int, int]:
    position = 2
    while position + 9 <= len(head):
        marker, length = head[position + 1], struct.unpack_from(">H", head, position + 2)[0]
        if head[position] != 0xFF or length < 2:
            return 0, 0
        if marker in _JPEG_FRAMES:
            height, width = struct.unpack_from(">HH", head, position + 5)
            return width, height
        position += 2 + length
    return 0, 0


def _webp_size(head: bytes) -> tuple[int, int]:
    match head[12:16]:
        case b"VP8X":
            return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
        case b"VP8L":
            bits = int.from_bytes(head[21:25], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", head, 26)
            return width & 0x3FFF, height & 0x3FFF
        case _:
            return 0, 0
