"""Recordings of real clients, and an upstream that answers as recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply

HOP_HEADERS = frozenset({"host", "content-length", "connection", "accept-encoding", "transfer-encoding"})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        yield json.loads(line)


def end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are not about one connection."""
    return {name: value for name, value in headers.items() if name.lower() not in HOP_HEADERS}


class RecordedUpstream:
    """Answers each call with its recorded reply, and keeps what it was sent."""

    def __init__(self) -> None:
        self.reply: Mapping[str, Any] = {}
        self.model = ScriptedModel(script=self._answer, keep=1)

    def _answer(self, received: ReceivedRequest) -> ScriptedReply:
        del received
        return ScriptedReply(message=self.reply)

    @property
    def received(self) -> bytes:
        """The body of the last call."""
        return self.model.received[-1].body
