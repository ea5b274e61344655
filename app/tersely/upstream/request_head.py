"""Write the head of a request, safe against injected headers and requests."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Headers that the HTTP client sets itself.
_OURS = frozenset({"host", "connection", "content-length", "transfer-encoding"})
# Methods whose requests have no length header without a body.
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # noqa: S105
_HEADERS = re.compile(rf"(?:{_TOKEN}: [^\x00-\x08\x0a-\x1f\x7f]*\r\n)*")
_LINE = re.compile(rf"{_TOKEN} [^\x00-\x20\x7f]+")


def write_head(method: str, target: str, host: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    """Return request line and headers for a body of ``length`` bytes. Raises `ValueError` for invalid characters."""
    line = f"{method} {target}"
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OURS]
    fields = "".join(lines)
    if _LINE.fullmatch(line) is None:
        raise ValueError("no request line")
    # Checking all at once is faster, but one header could look like two.
    if fields.count("\n") != len(lines) or _HEADERS.fullmatch(fields) is None:
        raise ValueError("a header that breaks out of its line")
    if length or method not in _WITHOUT_BODY:
        fields += f"content-length: {length}\r\n"
    return f"{line} HTTP/1.1\r\nHost: {host}\r\n{fields}\r\n".encode("utf-8", "surrogateescape")
