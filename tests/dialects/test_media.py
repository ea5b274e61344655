"""Image sizes from data URLs."""

from __future__ import annotations

import base64
import struct

import pytest

from tersely.dialects.wire.media import image_size

PNG = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 640, 480) + b"\x08\x02"
GIF = b"GIF89a" + struct.pack("<HH", 320, 200) + b"\xf7"
JPEG = (
    b"\xff\xd8" + b"\xff\xe0" + struct.pack(">H", 16) + b"x" * 14 + b"\xff\xc0" + struct.pack(">HBHH", 17, 8, 600, 800)
)
VP8X = b"RIFF\x00\x00\x00\x00WEBPVP8X" + b"\x0a\x00\x00\x00\x00\x00\x00\x00" + b"\x7f\x02\x00\xdf\x01\x00"
VP8L = b"RIFF\x00\x00\x00\x00WEBPVP8L" + b"\x00\x00\x00\x00\x2f" + ((99) | (49 << 14)).to_bytes(4, "little") + b"\x00"
VP8 = b"RIFF\x00\x00\x00\x00WEBPVP8 " + b"\x00" * 10 + struct.pack("<HH", 176, 144)


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


@pytest.mark.parametrize(
    ("content", "size"),
    [(PNG, (640, 480)), (GIF, (320, 200)), (JPEG, (800, 600)), (VP8X, (640, 480)), (VP8L, (100, 50)), (VP8, (176, 144)),
     (b"BM", (0, 0)), (PNG[:18], (0, 0)), (b"\xff\xd8\xff\xe0\x00\x01", (0, 0)), (b"", (0, 0))]
)  # fmt: skip
def test_the_size_of_an_image_is_read(content: bytes, size: tuple[int, int]):
    assert image_size(url(content)) == size


@pytest.mark.parametrize(
    "address", ["http://x/y.png", "", "data:image/png,xx", "data:image/png;base64,ää", "data:;base64,"]
)
def test_media_without_a_size(address: str):
    assert image_size(address) == (0, 0)
