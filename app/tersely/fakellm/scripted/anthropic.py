"""Anthropic's Messages, scripted. A reply's ``content`` may be a list of Anthropic's own blocks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tersely.fakellm.scripted.replies import (
    ModelRequest,
    ScriptedExchange,
    ScriptedReply,
    WireFormat,
    calls_of,
    dump,
    pieces,
    prompt_sizes,
    text_of,
)
from tersely.fakellm.strict.anthropic import check, overflow
from tersely.fakellm.strict.openai_chat import Refusal

_FINISHES = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _read_request(request: Mapping[str, Any]) -> ModelRequest:
    messages: list[dict[str, Any]] = [each for each in request.get("messages") or () if isinstance(each, dict)]
    items = [each for each in messages if each.get("role") != "system"]
    content = items[-1].get("content") if items else ""
    results = [b for b in content if isinstance(b, dict) and b.get("type") == "tool_result"] if content else []
    is_result = isinstance(content, list) and bool(results)
    return ModelRequest(
        messages=len(messages),
        words=text_of(results[-1].get("content")) if is_result else text_of(content),
        system=text_of(request.get("system")),
        tools=frozenset(tool["name"] for tool in request.get("tools") or () if isinstance(tool.get("name"), str)),
        is_result=is_result,
        schema=((request.get("output_config") or {}).get("format") or {}).get("schema"),
    )


def _blocks(reply: ScriptedReply) -> list[dict[str, Any]]:
    content = reply.message.get("content")
    if isinstance(content, list):
        return content
    blocks: list[dict[str, Any]] = [{"type": "text", "text": content}] if content else []
    for call in calls_of(reply):
        arguments = json.loads(call["arguments"] or "{}")
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments})
    return blocks


def _finish(reply: ScriptedReply) -> str:
    if reply.finish_reason:
        return _FINISHES.get(reply.finish_reason, reply.finish_reason)
    return "tool_use" if any(block["type"] == "tool_use" for block in _blocks(reply)) else "end_turn"


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    counted = exchange.counted
    return (
        dict(exchange.reply.usage)
        if exchange.reply.usage is not None
        else {
            "input_tokens": counted.input - counted.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counted.cached,
            "output_tokens": counted.output,
        }
    )


def _message(exchange: ScriptedExchange, blocks: list[dict[str, Any]], finish: str | None) -> dict[str, Any]:
    return {
        "id": f"msg_{exchange.id}",
        "type": "message",
        "role": "assistant",
        "model": exchange.model,
        "content": blocks,
        "stop_reason": finish,
        "stop_sequence": None,
        "usage": _usage(exchange),
    }


def _whole(exchange: ScriptedExchange) -> bytes:
    return dump(_message(exchange, _blocks(exchange.reply), _finish(exchange.reply)))


def _events(exchange: ScriptedExchange) -> list[bytes]:
    reply = exchange.reply
    items: list[dict[str, Any]] = [{"type": "message_start", "message": _message(exchange, [], None)}]
    for index, block in enumerate(_blocks(reply)):
        start, deltas = _growing(reply, block)
        items.append({"type": "content_block_start", "index": index, "content_block": start})
        if index == 0:
            items.append({"type": "ping"})
        items += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        items.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": _finish(reply), "stop_sequence": None}
    written = _usage(exchange).get("output_tokens", exchange.counted.output)
    items.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": written}})
    if reply.has_done:
        items.append({"type": "message_stop"})
    return [exchange.event(each, each["type"]) for each in items]


def _growing(reply: ScriptedReply, block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [
                {"type": "text_delta", "text": each} for each in pieces(reply, block["text"])
            ]
        case "tool_use":
            text = dump(block["input"]).decode()
            parts = [text[at : at + reply.chunk_chars] for at in range(0, len(text), reply.chunk_chars)]
            return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": each} for each in parts]
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
            signed = [{"type": "signature_delta", "signature": block["signature"]}] if block.get("signature") else []
            return {**block, "thinking": "", "signature": ""}, [*deltas, *signed]
        case _:
            return block, []


def _refuse(refusal: Refusal) -> bytes:
    return dump({"type": "error", "error": {"type": refusal.type, "message": refusal.message}})


def _error(exchange: ScriptedExchange) -> bytes:
    return exchange.event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "error")


def _prompt(request: Mapping[str, Any]) -> Iterable[bytes]:
    for name in ("tools", "system"):
        if value := request.get(name):
            yield dump(_without_marks(value))
    for message in request.get("messages") or ():
        yield dump(_without_marks(message))


def _without_marks(value: object) -> object:
    """Return a value without cache breakpoints, which are no part of the cached prefix."""
    if isinstance(value, dict):
        return {key: _without_marks(each) for key, each in value.items() if key != "cache_control"}
    return [_without_marks(each) for each in value] if isinstance(value, list) else value


def _sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    return prompt_sizes(request, request.get("messages"), instructions="system")


ANTHROPIC = WireFormat(
    check=check,
    overflow=overflow,
    refuse=_refuse,
    prompt=_prompt,
    sizes=_sizes,
    read_request=_read_request,
    whole=_whole,
    events=_events,
    error=_error,
)
