"""The marks by which Tersely knows each client: ``python -m tests.clients.marks`` prints the table of
`docs/clients.md`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping

from tersely.data.known_fields import SEEN_FIELDS
from tersely.dialects.clients import known as clients
from tersely.domain.history import chain

COLUMNS = (
    "client",
    "checked against",
    "names its session by",
    "side calls are known by",
    "injects",
    "frames summaries by",
    "fields beside the described ones",
)
SHOWN = 70
"""Characters of a mark."""

_OLDER = " (older)"


def client_table() -> str:
    """Every mark of every client, as Markdown."""
    marks = marks_by_client()
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    rows += [
        (client, clients.SEEN.get(client, ""), *("<br>".join(found[column]) for column in COLUMNS[2:]))
        for client, found in sorted(marks.items(), key=lambda pair: pair[0].lower())
    ]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def marks_by_client() -> Mapping[str, Mapping[str, list[str]]]:
    """Client -> column -> marks."""
    found: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for client in clients.SEEN:
        found[client]
    session, side, injects, frames, fields = COLUMNS[2:]
    for header, client in (*clients.SESSION_HEADERS.items(), *clients.PARENT_HEADERS.items()):
        found[client][session].append(f"`{header}`")
    for client, header, value, kind in clients.SIDE_HEADERS:
        found[client][side].append(f"{kind}: `{header}: {value}`")
    for (name, value), kind in clients.CODEX_MARKS.items():
        found["Codex"][side].append(f"{kind}: `{clients.CODEX_METADATA}` with {name} {value}")
    for mark in (*clients.SIDE_INSTRUCTIONS, *clients.SIDE_QUESTIONS):
        client, older = _client_of(mark.client)
        found[client][side].append(f"{mark.kind}{older}: {_quoted(mark.text)}")
    for column, blocks in (
        (injects, (*chain.INJECTED_BLOCKS, *chain.INJECTED_MESSAGES)),
        (frames, chain.SUMMARY_FRAMES),
    ):
        for block in blocks:
            for name in _clients_of(block.client):
                client, older = _client_of(name)
                found[client][column].append(f"{_quoted(block.opening)}{older}")
    for (_, block_name, field), seen in SEEN_FIELDS.items():
        client = next((name for name in found if seen.startswith(name)), seen)
        found[client][fields].append(f"`{block_name}.{field}` ({seen})")
    return found


def _clients_of(client: str) -> list[str]:
    """The clients that one entry names."""
    return [name.removesuffix("'s own reply") for name in client.split(", ") if not name.startswith("in the ")]


def _client_of(client: str) -> tuple[str, str]:
    return client.removesuffix(_OLDER), _OLDER if client.endswith(_OLDER) else ""


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    shown = line if len(line) <= SHOWN else line[:SHOWN] + "..."
    return f"`{shown.replace('|', chr(92) + '|')}`"


if __name__ == "__main__":
    sys.stdout.write(client_table())
