"""Assemble recorded replies, whole or streamed, as SDKs do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tersely.domain.messages import Dialect as DialectName

DONE = "[DONE]"


class _InvalidReply(ValueError):
    """A reply that its format does not allow."""


def read_answer(dialect: DialectName, body: bytes, *, is_streamed: bool) -> tuple[Mapping[str, Any], bool]:
    """Return the reply's message in wire form, and whether chat completions reported the usage.

    Raises ValueError, KeyError or TypeError.
    """
    match dialect:
        case "openai_chat":
            if is_streamed:
                return _read_chunks(body)
            answer = json.loads(body)
            return answer["choices"][0]["message"], "usage" in answer
        case "anthropic":
            return {"role": "assistant", "content": _blocks(body) if is_streamed else json.loads(body)["content"]}, True
        case "openai_responses":
            return _response(_completed(body) if is_streamed else json.loads(body)), True
        case _:
            return {"role": "model", "parts": _parts(body, is_streamed=is_streamed)}, True


def _events(body: bytes) -> Iterator[str]:
    """Yield the data of each server-sent event."""
    for event in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].lstrip(" ") for line in event.split("\n") if line.startswith("data:"))
        if data:
            yield data


# Chat completions


@dataclass(slots=True)
class _AssembledReply:
    """A streamed message as SDKs put it together."""

    content: str | None = None
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    has_usage: bool = False

    def feed(self, chunk: Mapping[str, Any]) -> None:
        self.has_usage = self.has_usage or chunk.get("usage") is not None
        for choice in chunk.get("choices") or ():
            if choice.get("index"):
                continue  # only the first of several choices is read
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


def _read_chunks(body: bytes) -> tuple[dict[str, Any], bool]:
    assembled, is_done = _AssembledReply(), False
    for data in _events(body):
        if data == DONE:
            is_done = True
        else:
            assembled.feed(json.loads(data))
    if not is_done:
        raise _InvalidReply("the stream did not end with " + DONE)
    return assembled.message, assembled.has_usage


# Anthropic's Messages


def _blocks(body: bytes) -> list[dict[str, Any]]:
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    is_done = False
    for data in _events(body):
        event = json.loads(data)
        match event["type"]:
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                _grow(blocks[event["index"]], event["delta"], arguments, event["index"])
            case "message_stop":
                is_done = True
            case "error":
                raise _InvalidReply(str(event["error"]))
            case _:
                pass
    if not is_done:
        raise _InvalidReply("the stream did not end with message_stop")
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text or "{}")
    return [blocks[index] for index in sorted(blocks)]


def _grow(block: dict[str, Any], delta: Mapping[str, Any], arguments: dict[int, str], index: int) -> None:
    if delta["type"] == "input_json_delta":
        arguments[index] = arguments.get(index, "") + delta["partial_json"]
        return
    for name in ("text", "thinking", "signature"):
        if name in delta:
            block[name] = block.get(name, "") + delta[name]


# OpenAI's Responses


def _response(response: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply's items, and the id by which a client may continue from it."""
    return {"output": response["output"], "id": response.get("id")}


def _completed(body: bytes) -> dict[str, Any]:
    """Check the last event's whole response against the single events."""
    items: dict[int, dict[str, Any]] = {}
    texts: dict[tuple[int, int], str] = {}
    whole: dict[str, Any] | None = None
    for data in _events(body):
        event = json.loads(data)
        match event["type"]:
            case "response.output_item.done":
                items[event["output_index"]] = event["item"]
            case "response.output_text.delta":
                position = event["output_index"], event["content_index"]
                texts[position] = texts.get(position, "") + event["delta"]
            case "response.completed":
                whole = event["response"]
            case _:
                pass
    if whole is None:
        raise _InvalidReply("the stream did not end with response.completed")
    if [items[index] for index in sorted(items)] != whole["output"]:
        raise _InvalidReply("the items of the stream differ from those of its last event")
    for (index, part), text in texts.items():
        if items[index]["content"][part]["text"] != text:
            raise _InvalidReply("the pieces of a text differ from the whole text")
    return whole


# Gemini


def _parts(body: bytes, *, is_streamed: bool) -> list[dict[str, Any]]:
    is_array = body.lstrip()[:1] == b"["
    chunks = json.loads(body) if is_array else [json.loads(data) for data in _events(body)] if is_streamed else None
    parts: list[dict[str, Any]] = []
    is_done = False
    for chunk in [json.loads(body)] if chunks is None else chunks:
        for candidate in chunk.get("response", chunk).get("candidates") or ():
            parts += (candidate.get("content") or {}).get("parts") or ()
            is_done = is_done or bool(candidate.get("finishReason"))
    if not is_done:
        raise _InvalidReply("no finishReason")
    return parts
