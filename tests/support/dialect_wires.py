"""Conversations in each dialect: the same words in every wire format."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.http import Answered, post
from tests.support.services import Service

# Who says what, in order: a question by the user or a reply of the model.
Spoken = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The route of a dialect; Gemini streams at another one."""

    path: str
    stream_path: str = ""

    def body(self, history: str | Sequence[Spoken], *, stream: bool = False, **more: Any) -> bytes:
        """Write a request. ``history``: the user's text, or pairs ``("user", text)`` and ``("assistant", text)``."""
        history = [("user", history)] if isinstance(history, str) else history
        messages = [{"role": role, "content": text} for role, text in history]
        match self.path.rpartition("/")[2]:
            case "messages":
                given: dict[str, Any] = {"model": "claude-sonnet-4-5", "max_tokens": 100, "stream": stream}
                given["messages"] = messages
            case "responses":
                given = {"model": "gpt-5-mini", "stream": stream, "input": messages}
            case "completions":
                given = {"model": "gpt-4o-mini", "stream": stream, "messages": messages}
            case place:
                roles = {"user": "user", "assistant": "model"}
                given = {"contents": [{"role": roles[role], "parts": [{"text": text}]} for role, text in history]}
                if place.startswith("v1internal"):
                    inner = {**given, **more}
                    given, more = {"model": "gemini-3-flash", "project": "p", "request": inner}, {}
        return json.dumps({**given, **more}).encode()

    async def send(
        self, service: Service, history: str | Sequence[Spoken], *, stream: bool = False, **headers: Any
    ) -> Answered:
        """Send a request; underscores in header names stand for hyphens."""
        path = self.stream_path if stream and self.stream_path else self.path
        return await post(service, self.body(history, stream=stream), path=path, **headers)


WIRES = {
    "openai_chat": Wire(path="/v1/chat/completions"),
    "openai_responses": Wire(path="/v1/responses"),
    "anthropic": Wire(path="/v1/messages"),
    "gemini": Wire(
        path="/v1beta/models/gemini-3-flash:generateContent",
        stream_path="/v1beta/models/gemini-3-flash:streamGenerateContent?alt=sse",
    ),
    "gemini_gca": Wire(path="/v1internal:generateContent", stream_path="/v1internal:streamGenerateContent?alt=sse"),
}


async def listed(service: Service, session: str, view: str = "client") -> list[tuple[str, str]]:
    """Kind and name of each ``question <name>`` and ``answer <name>`` in the order of `GET messages`."""
    found: list[tuple[str, str]] = []
    after = ""
    while True:
        page = (
            await post(
                service, b"", method="GET", path=f"/api/sessions/{session}/messages?view={view}&limit=200{after}"
            )
        ).json
        for item in page["items"]:
            found += re.findall(r"(question|answer) <([\w-]+)>", json.dumps(item["raw"]))
        if page["next"] is None:
            return found
        after = f"&after={page['next']}"
