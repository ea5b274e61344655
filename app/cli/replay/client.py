"""The client's side of a replay: a program that keeps its history itself and resends it whole at every call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from app.cli.replay.transcripts import Conversation

DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call to be made. ``asks_usage``: a stream whose client wants the usage chunk."""

    messages: Sequence[bytes]
    model: str
    is_streamed: bool
    asks_usage: bool
    headers: Mapping[str, str]

    def body(self) -> bytes:
        """The request in wire form."""
        options = b',"stream_options":{"include_usage":true}' if self.asks_usage else b""
        stream = b',"stream":true' + options if self.is_streamed else b""
        return b'{"model":%s,"messages":[%s]%s}' % (
            json.dumps(self.model).encode(),
            b",".join(self.messages),
            stream,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the client got. ``message`` is None when the call failed; then ``body`` says why."""

    status: int
    headers: Mapping[str, str]
    message: Mapping[str, Any] | None = None
    has_usage: bool = False
    body: bytes = b""

    @property
    def session(self) -> str:
        """The session that the proxy names."""
        return self.headers.get("x-tersely-session", "")

    @property
    def epoch(self) -> str:
        """The epoch whose beginning the model was sent."""
        return self.headers.get("x-tersely-epoch", "")


async def ask(http: aiohttp.ClientSession, address: str, request: Request) -> Answer:
    """Make one call. A connection that breaks off is an answer too: one without a message."""
    headers = {"content-type": "application/json", **request.headers}
    try:
        async with http.post(f"{address}/v1/chat/completions", data=request.body(), headers=headers) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        return Answer(status=0, headers={}, body=f"the connection broke off: {error!r}".encode())
    names = {name.lower(): value for name, value in response.headers.items()}
    if response.status != 200:
        return Answer(status=response.status, headers=names, body=body)
    if request.is_streamed:
        return _read_stream(response.status, names, body)
    answer = json.loads(body)
    message = answer["choices"][0]["message"]
    return Answer(status=response.status, headers=names, message=message, has_usage="usage" in answer)


@dataclass(slots=True)
class _Assembled:
    """A streamed message as SDKs put it together."""

    content: str | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    has_usage: bool = False
    is_done: bool = False

    def feed(self, chunk: Mapping[str, Any]) -> None:
        self.has_usage = self.has_usage or chunk.get("usage") is not None
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") is not None:
                self.content = (self.content or "") + delta["content"]
            for piece in delta.get("tool_calls") or ():
                self._feed_call(piece)

    def _feed_call(self, piece: Mapping[str, Any]) -> None:
        known = self.calls.get(piece["index"])
        if known is None:
            known = {key: value for key, value in piece.items() if key != "index"}
            self.calls[piece["index"]] = {**known, "function": dict(piece["function"])}
            return
        known["function"]["arguments"] += piece["function"]["arguments"]

    @property
    def message(self) -> dict[str, Any]:
        calls = [self.calls[index] for index in sorted(self.calls)]
        return {"content": self.content, **({"tool_calls": calls} if calls else {})}


def _read_stream(status: int, headers: Mapping[str, str], body: bytes) -> Answer:
    assembled = _Assembled()
    for event in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].lstrip(" ") for line in event.split("\n") if line.startswith("data:"))
        if data == DONE:
            assembled.is_done = True
        elif data:
            assembled.feed(json.loads(data))
    if not assembled.is_done:
        return Answer(status=status, headers=headers, body=b"the stream did not end with " + DONE.encode())
    return Answer(status=status, headers=headers, message=assembled.message, has_usage=assembled.has_usage)


def history_before(conversation: Conversation, index: int) -> list[bytes]:
    """What a client sends to get message ``index``: everything before it, as messy as it is."""
    return [said.raw for said in conversation.said[:index]]
