"""Technical anchors in text (std::slop, "State Format": ports, addresses, constants), and text without markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from tersely.domain.history.history import Entry
from tersely.domain.messages import Part, Text, ToolResult

# A tag is read over so many characters at most.
_TAG = re.compile(r"<(?:!--.{0,2000}?--|/?[A-Za-z!?][^<>]{0,500})>", re.DOTALL)
_CHARACTER_REFERENCE = re.compile(r"&(?:#\d{1,7}|#x[0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_ANCHOR = re.compile(
    r"(?P<address>\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b|\blocalhost:\d{1,5}\b)"
    r"|\bport(?:[ \t]*[=:][ \t]*|[ \t]+(?:number[ \t]+|is[ \t]+)?)(?P<port>\d{1,5})\b"
    r"|\b(?P<name>[A-Z][A-Z0-9_]{2,40})[ \t]*=[ \t]*(?P<value>[\w./:@+-]{1,80})",
    re.IGNORECASE,
)


def strip_markup(text: str) -> str:
    """Return ``text`` without tags, comments and character references."""
    if "<" in text:
        text = _TAG.sub(" ", text)
    return _CHARACTER_REFERENCE.sub(" ", text) if "&" in text else text


def without_markup(entries: Iterable[Entry]) -> list[Entry]:
    """Return ``entries`` with the markup removed from their texts and tool results."""
    return [
        replace(entry, message=replace(entry.message, parts=tuple(map(_stripped, entry.message.parts))))
        for entry in entries
    ]


def _stripped(part: Part) -> Part:
    return replace(part, text=strip_markup(part.text)) if isinstance(part, Text | ToolResult) else part


def find_anchors(texts: Sequence[str]) -> list[str]:
    """Return addresses, labelled ports and named constants of ``texts``, in order of first mention, without doubles.

    A number counts only with its label. The last value of a constant counts.
    """
    return list({name: anchor for text in texts for name, anchor in _anchors(text)}.values())


def _anchors(text: str) -> Iterator[tuple[str, str]]:
    """Yield each anchor with its name."""
    for match in _ANCHOR.finditer(text):
        if address := match["address"]:
            if address.startswith("localhost") or _is_address(address):
                yield address, address
        elif port := match["port"]:
            if 0 < int(port) <= 65_535:
                yield f"port {port}", f"port {port}"
        elif (name := match["name"]).isupper():
            value = match["value"].rstrip(".:")
            if value:
                yield name, f"{name}={value}"


def _is_address(text: str) -> bool:
    host, _, port = text.partition(":")
    return all(int(piece) <= 255 for piece in host.split(".")) and (not port or int(port) <= 65_535)
