"""Recorded traffic of real providers and clients, where it is there; and streams cut at any place."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[3] / "shared" / "data"
WIRE = SHARED / "wire"
MISSING = f"the recorded provider traffic is not there: {WIRE}"


def index(api: str) -> list[dict[str, Any]]:
    """The recordings whose API has a name that ends with ``api``."""
    path = WIRE / "index.jsonl"
    if not path.exists():
        return []
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["api"].endswith(api)]


def replies(api: str, *, stream: bool) -> list[Path]:
    """The bodies of replies."""
    return [WIRE / line["file"] for line in index(api) if line["stream"] is stream]


def requests(api: str) -> list[Path]:
    """The bodies of requests."""
    return sorted({WIRE / line["request_file"] for line in index(api) if "request_file" in line})


def client_requests(path: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Return the requests of real clients to ``path``: client, number, body."""
    return [
        (each.parent.name, line["n"], line["body"])
        for each in sorted(SHARED.glob("clients/*/requests.jsonl"))
        for line in map(json.loads, each.read_text().splitlines())
        if line["path"].partition("?")[0] == path and isinstance(line["body"], dict)
    ]


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    """``stream`` in pieces, cut at ``places`` (any numbers)."""
    ends = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in pairwise(ends)]
