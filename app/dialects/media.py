"""Images and files of a message: what tells one from another, and the size of an image, by which providers bill.

The size is read from the first bytes of a data URL; nothing is decoded.
"""

from __future__ import annotations

import base64
import binascii
import struct
from hashlib import blake2b

from app.dialects import raw_json

_HEAD = 64 * 1024
"""Base64 characters looked at: a JPEG's size stands behind its metadata."""

_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def media_digest(value: object) -> str:
    """Identifies bytes, an address, or a JSON value that says where they are."""
    content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else raw_json.dump(value)
    return blake2b(content, digest_size=16).hexdigest()


def image_size(url: str) -> tuple[int, int]:
    """Width and height in pixels of the PNG, JPEG, GIF or WebP in a ``data:`` URL; (0, 0) for everything
    else.
    """
    start = url.find(";base64,", 0, 200)
    if not url.startswith("data:") or start < 0:
        return 0, 0
    start += len(";base64,")
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
