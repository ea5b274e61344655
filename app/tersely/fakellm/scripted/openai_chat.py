"""Chat completions, scripted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tersely.fakellm.scripted.replies import (
    CREATED,
    ModelRequest,
    ScriptedExchange,
    ScriptedReply,
    WireFormat,
    dump,
    pieces,
    prompt_sizes,
    text_of,
)
from tersely.fakellm.strict.openai_chat import Refusal, check, overflow


def _read_request(request: Mapping[str, Any]) -> ModelRequest:
    messages: list[dict[str, Any]] = [each for each in request.get("messages") or () if isinstance(each, dict)]
    last = messages[-1] if messages else {}
    return ModelRequest(
        messages=len(messages),
        words=text_of(last.get("content")),
        system="\n".join(text_of(m.get("content")) for m in messages if m.get("role") in {"system", "developer"}),
        tools=frozenset(_tool_names(request)) if last.get("role") == "user" else frozenset(),
        is_result=last.get("role") in {"tool", "function"},
        schema=((request.get("response_format") or {}).get("json_schema") or {}).get("schema"),
    )


def _whole(exchange: ScriptedExchange) -> bytes:
    choice = {"message": _message(exchange.reply), "logprobs": None, "finish_reason": _finish(exchange.reply)}
    n = exchange.request.get("n") or 1
    return dump(
        {
            "id": f"chatcmpl-{exchange.id}",
            "object": "chat.completion",
            "created": CREATED,
            "model": exchange.model,
            "choices": [{"index": index, **choice} for index in range(n)],
            "usage": _usage(exchange),
            "service_tier": "default",
            "system_fingerprint": "fp_scripted",
        }
    )


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    if exchange.reply.usage is not None:
        return dict(exchange.reply.usage)
    counted = exchange.counted
    return {
        "prompt_tokens": counted.input,
        "completion_tokens": counted.output,
        "total_tokens": counted.input + counted.output,
        "prompt_tokens_details": {"cached_tokens": counted.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _events(exchange: ScriptedExchange) -> list[bytes]:
    reply, newline = exchange.reply, exchange.newline
    n = exchange.request.get("n") or 1
    options = exchange.request.get("stream_options")
    has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    head = dump(
        {
            "id": f"chatcmpl-{exchange.id}",
            "object": "chat.completion.chunk",
            "created": CREATED,
            "model": exchange.model,
            "service_tier": "default",
            "system_fingerprint": "fp_scripted",
        }
    )[:-1]
    end = (b',"usage":null}' if has_usage else b"}") + newline * 2

    def event(index: int, delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return b"data: " + head + b',"choices":[' + dump(choice) + b"]" + end

    deltas = list(_deltas(reply))
    events = [event(index, delta) for delta in deltas for index in range(n)]
    events += [event(index, {}, _finish(reply)) for index in range(n)]
    if has_usage:
        tail = b',"choices":[],"usage":' + dump(_usage(exchange)) + b"}"
        events.append(b"data: " + head + tail + newline * 2)
    if reply.has_done:
        events.append(b"data: [DONE]" + newline * 2)
    return events


def _deltas(reply: ScriptedReply) -> Iterable[dict[str, Any]]:
    message = _message(reply)
    content, calls = message.pop("content", None), message.pop("tool_calls", None)
    yield {**message, "content": None if calls and content is None else ""}
    if isinstance(content, str):
        for piece in pieces(reply, content):
            yield {"content": piece}
    elif content is not None:
        yield {"content": content}
    for index, call in enumerate(calls or ()):
        function = dict(call.get("function") or {})
        arguments = function.get("arguments") or ""
        yield {"tool_calls": [{"index": index, **call, "function": {**function, "arguments": ""}}]}
        for start in range(0, len(arguments), reply.chunk_chars):
            piece = arguments[start : start + reply.chunk_chars]
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _error(exchange: ScriptedExchange) -> bytes:
    error = {"message": "The server had an error while processing your request.", "type": "server_error"}
    return exchange.event({"error": {**error, "param": None, "code": None}})


def _message(reply: ScriptedReply) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **reply.message}


def _finish(reply: ScriptedReply) -> str:
    return reply.finish_reason or ("tool_calls" if reply.message.get("tool_calls") else "stop")


def _tool_names(request: Mapping[str, Any]) -> set[str]:
    names = set()
    for tool in request.get("tools") or ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            names.add(function["name"])
    return names


def _prompt(request: Mapping[str, Any]) -> Iterable[bytes]:
    """Return the parts that a provider's cache keys on, in its order: tools, then each message."""
    if tools := request.get("tools"):
        yield dump(tools)
    for message in request.get("messages") or ():
        yield dump(message)


def _sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    return prompt_sizes(request, request.get("messages"))


CHAT = WireFormat(
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
