"""OpenAI's Responses, scripted.

A reply's ``output`` may be a list of items as they are; its ``finish_reason`` is why it is incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tersely.fakellm.scripted.replies import (
    CREATED,
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
from tersely.fakellm.strict.openai_chat import Refusal
from tersely.fakellm.strict.openai_responses import check, overflow


def _items(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    items = request.get("input")
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return [item for item in items or () if isinstance(item, dict)]


def _read_request(request: Mapping[str, Any]) -> ModelRequest:
    items = _items(request)
    last = items[-1] if items else {}
    is_result = str(last.get("type", "")).endswith("_output")
    system = [request.get("instructions") or ""]
    system += [text_of(item.get("content")) for item in items if item.get("role") in {"system", "developer"}]
    return ModelRequest(
        messages=len(items),
        words=text_of(last.get("output") if is_result else last.get("content")),
        system="\n".join(system),
        tools=frozenset(tool["name"] for tool in request.get("tools") or () if isinstance(tool.get("name"), str)),
        is_result=is_result,
        schema=((request.get("text") or {}).get("format") or {}).get("schema"),
    )


def _output(exchange: ScriptedExchange) -> list[dict[str, Any]]:
    reply = exchange.reply
    if "output" in reply.message:
        return list(reply.message["output"])
    text = reply.message.get("content")
    output: list[dict[str, Any]] = []
    if text:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
        message = {"id": f"msg_{exchange.id}", "type": "message", "status": "completed", "role": "assistant"}
        output.append({**message, "content": [part]})
    for call in calls_of(reply):
        head = {"id": f"fc_{call['id']}", "type": "function_call", "status": "completed", "call_id": call["id"]}
        output.append({**head, "name": call["name"], "arguments": call["arguments"]})
    return output


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    if exchange.reply.usage is not None:
        return dict(exchange.reply.usage)
    counted = exchange.counted
    return {
        "input_tokens": counted.input,
        "input_tokens_details": {"cached_tokens": counted.cached},
        "output_tokens": counted.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counted.input + counted.output,
    }


def _response(exchange: ScriptedExchange, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    request = exchange.request
    return {
        "id": f"resp_{exchange.id}",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": request.get("instructions"),
        "model": exchange.model,
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "store": request.get("store", True),
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice", "auto"),
        "tools": request.get("tools") or [],
        "usage": _usage(exchange) if status == "completed" else None,
        **more,
    }


def _ended(exchange: ScriptedExchange, output: list[dict[str, Any]]) -> dict[str, Any]:
    reason = exchange.reply.finish_reason
    if not reason:
        return _response(exchange, "completed", output)
    return _response(exchange, "incomplete", output, incomplete_details={"reason": reason}, usage=_usage(exchange))


def _whole(exchange: ScriptedExchange) -> bytes:
    return dump(_ended(exchange, _output(exchange)))


def _events(exchange: ScriptedExchange) -> list[bytes]:
    output = _output(exchange)
    items: list[dict[str, Any]] = [
        {"type": "response.created", "response": _response(exchange, "in_progress", [])},
        {"type": "response.in_progress", "response": _response(exchange, "in_progress", [])},
    ]
    for index, item in enumerate(output):
        items += _growing(exchange.reply, index, item)
    if exchange.reply.has_done:
        ended = _ended(exchange, output)
        items.append({"type": f"response.{ended['status']}", "response": ended})
    return [exchange.event({**each, "sequence_number": position}, each["type"]) for position, each in enumerate(items)]


def _growing(reply: ScriptedReply, index: int, item: dict[str, Any]) -> Iterable[dict[str, Any]]:
    indexes: dict[str, Any] = {"item_id": item.get("id"), "output_index": index}
    started = {**item, "status": "in_progress"}
    if item["type"] == "message":
        yield {"type": "response.output_item.added", "output_index": index, "item": {**started, "content": []}}
        for number, part in enumerate(item["content"]):
            at = {**indexes, "content_index": number}
            yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
            for piece in pieces(reply, part["text"]):
                yield {"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
    elif item["type"] == "function_call":
        yield {"type": "response.output_item.added", "output_index": index, "item": {**started, "arguments": ""}}
        text = item["arguments"]
        for start in range(0, len(text), reply.chunk_chars):
            delta = text[start : start + reply.chunk_chars]
            yield {"type": "response.function_call_arguments.delta", **indexes, "delta": delta}
        yield {"type": "response.function_call_arguments.done", **indexes, "arguments": text, "name": item["name"]}
    else:
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _error(exchange: ScriptedExchange) -> bytes:
    error = {"code": "server_error", "message": "The server had an error while processing your request."}
    failed = _response(exchange, "failed", [], error=error)
    return exchange.event({"type": "response.failed", "response": failed, "sequence_number": 99}, "response.failed")


def _prompt(request: Mapping[str, Any]) -> Iterable[bytes]:
    for name in ("tools", "instructions"):
        if value := request.get(name):
            yield dump(value)
    for item in _items(request):
        yield dump(item)


def _sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    return prompt_sizes(request, _items(request), instructions="instructions")


RESPONSES = WireFormat(
    check=check,
    overflow=overflow,
    refuse=Refusal.body,
    prompt=_prompt,
    sizes=_sizes,
    read_request=_read_request,
    whole=_whole,
    events=_events,
    error=_error,
)
