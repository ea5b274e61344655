"""The head of a request, and nothing that could be taken for more than one."""

from __future__ import annotations

import re
from collections.abc import Iterable

# What the client itself says about a request.
_OURS = frozenset({"host", "connection", "content-length", "transfer-encoding"})
# Methods whose requests say nothing of a body when they have none.
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105
_HEADERS = re.compile(rf"(?:{_TOKEN}: [^\x00-\x08\x0a-\x1f\x7f]*\r\n)*")
_LINE = re.compile(rf"{_TOKEN} [^\x00-\x20\x7f]+")


def write_head(method: str, target: str, host: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    """Request line and headers for a body of ``length`` bytes. Raises `ValueError` for what cannot be said in them."""
    line = f"{method} {target}"
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OURS]
    fields = "".join(lines)
    if _LINE.fullmatch(line) is None:
        raise ValueError("no request line")
    # All at once is cheaper than one by one, but one header may look like two.
    if fields.count("\n") != len(lines) or _HEADERS.fullmatch(fields) is None:
        raise ValueError("a header that breaks out of its line")
    if length or method not in _WITHOUT_BODY:
        fields += f"content-length: {length}\r\n"
    return f"{line} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n".encode("utf-8", "surrogateescape")
