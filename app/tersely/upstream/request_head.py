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
    return end_head(begin_head(method, target, host, headers), method, length)


def end_head(beginning: bytes, method: str, length: int) -> bytes:
    """Return a head with the length of its body."""
    if length or method not in _WITHOUT_BODY:
        return b"%bcontent-length: %d\r\n\r\n" % (beginning, length)
    return beginning + b"\r\n"


def begin_head(method: str, target: str, host: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """Return a head without its end, which depends on the body. Raises `ValueError` for invalid characters."""
    line = f"{method} {target}"
    if _LINE.fullmatch(line) is None:
        raise ValueError("no request line")
    return f"{line} HTTP/1.1\r\nHost: {host}\r\n".encode("utf-8", "surrogateescape") + write_fields(headers)


def write_fields(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return the lines of headers. Raises `ValueError` for invalid characters."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in _OURS]
    fields = "".join(lines)
    # Checking all at once is faster, but one header could look like two.
    if fields.count("\n") != len(lines) or _HEADERS.fullmatch(fields) is None:
        raise ValueError("a header that breaks out of its line")
    return fields.encode("utf-8", "surrogateescape")
