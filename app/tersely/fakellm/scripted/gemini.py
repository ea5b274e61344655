"""Gemini's generated content, scripted, and the same as Code Assist wraps it. A reply may give Gemini's ``parts``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tersely.fakellm.scripted.replies import (
    ModelRequest,
    ScriptedExchange,
    WireFormat,
    calls_of,
    dump,
    pieces,
    prompt_sizes,
    text_of,
)
from tersely.fakellm.strict.gemini import check, check_model, overflow, wants_signatures
from tersely.fakellm.strict.openai_chat import Refusal

_SIGNATURE = "c2lnbmVkIGJ5IG5vYm9keQ=="
_FINISHES = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


def _read_request(request: Mapping[str, Any]) -> ModelRequest:
    contents: list[dict[str, Any]] = [each for each in request.get("contents") or () if isinstance(each, dict)]
    parts = contents[-1].get("parts") or [] if contents else []
    results = [part["functionResponse"] for part in parts if "functionResponse" in part]
    declared = [tool.get("functionDeclarations") or () for tool in request.get("tools") or ()]
    system = request.get("systemInstruction") or {}
    wanted = request.get("generationConfig") or {}
    return ModelRequest(
        messages=len(contents),
        words=_words(results[-1].get("response")) if results else text_of(parts),
        system=system if isinstance(system, str) else text_of(system.get("parts")),
        tools=frozenset(function["name"] for functions in declared for function in functions),
        is_result=bool(results),
        schema=wanted.get("responseJsonSchema") or wanted.get("responseSchema"),
    )


def _words(response: object) -> str:
    values = list(response.values()) if isinstance(response, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else dump(response).decode()


def _parts(exchange: ScriptedExchange) -> list[dict[str, Any]]:
    reply = exchange.reply
    if "parts" in reply.message:
        return list(reply.message["parts"])
    text = reply.message.get("content")
    parts: list[dict[str, Any]] = [{"text": text}] if text else []
    for call in calls_of(reply):
        items = {"id": call["id"], "name": call["name"], "args": json.loads(call["arguments"] or "{}")}
        is_signed = wants_signatures(exchange.model) and not any("functionCall" in part for part in parts)
        parts.append({"functionCall": items} | ({"thoughtSignature": _SIGNATURE} if is_signed else {}))
    return parts


def _usage(exchange: ScriptedExchange) -> dict[str, Any]:
    counted = exchange.counted
    return (
        dict(exchange.reply.usage)
        if exchange.reply.usage is not None
        else {
            "promptTokenCount": counted.input,
            "candidatesTokenCount": counted.output,
            "totalTokenCount": counted.input + counted.output,
            "cachedContentTokenCount": counted.cached,
        }
    )


def _generated(exchange: ScriptedExchange, parts: list[dict[str, Any]], *, is_last: bool) -> dict[str, Any]:
    finish = exchange.reply.finish_reason
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}}
    if is_last:
        candidate["finishReason"] = _FINISHES.get(finish, finish) or "STOP"
    return {
        "candidates": [{**candidate, "index": 0}],
        "usageMetadata": _usage(exchange),
        "modelVersion": exchange.model,
        "responseId": exchange.id,
    }


def _whole(exchange: ScriptedExchange) -> bytes:
    return dump(_generated(exchange, _parts(exchange), is_last=True))


def _chunks(exchange: ScriptedExchange) -> list[dict[str, Any]]:
    items: list[list[dict[str, Any]]] = []
    for part in _parts(exchange):
        if part.get("text"):
            items += [[{**part, "text": piece}] for piece in pieces(exchange.reply, part["text"])]
        else:
            items.append([part])
    last = len(items) - 1
    return [
        _generated(exchange, parts, is_last=index == last and exchange.reply.has_done)
        for index, parts in enumerate(items)
    ]


def _events(exchange: ScriptedExchange) -> list[bytes]:
    crlf = replace(exchange, reply=replace(exchange.reply, crlf=True))
    return [crlf.event(chunk) for chunk in _chunks(exchange)]


def _refuse(refusal: Refusal) -> bytes:
    return dump({"error": {"code": refusal.status, "message": refusal.message, "status": "INVALID_ARGUMENT"}})


def _error(exchange: ScriptedExchange) -> bytes:
    error = {"code": 503, "message": "The model is overloaded. Please try again later.", "status": "UNAVAILABLE"}
    return exchange.event({"error": error})


def _prompt(request: Mapping[str, Any]) -> Iterable[bytes]:
    for name in ("tools", "systemInstruction"):
        if value := request.get(name):
            yield dump(value)
    for content in request.get("contents") or ():
        yield dump(content)


def _sizes(request: Mapping[str, Any]) -> tuple[int, int]:
    return prompt_sizes(request, request.get("contents"), instructions="systemInstruction")


GEMINI = WireFormat(
    check=check,
    overflow=overflow,
    refuse=_refuse,
    prompt=_prompt,
    sizes=_sizes,
    read_request=_read_request,
    whole=_whole,
    events=_events,
    error=_error,
    check_model=check_model,
)


def _inner(request: Mapping[str, Any]) -> dict[str, Any]:
    inner = request.get("request")
    return inner if isinstance(inner, dict) else {}


def _wrapped(exchange: ScriptedExchange, generated: dict[str, Any]) -> dict[str, Any]:
    return {"response": generated, "traceId": exchange.id}


def _wrapped_events(exchange: ScriptedExchange) -> list[bytes]:
    crlf = replace(exchange, reply=replace(exchange.reply, crlf=True))
    return [crlf.event(_wrapped(exchange, chunk)) for chunk in _chunks(exchange)]


def _check_wrapped(request: dict[str, Any]) -> Refusal | None:
    if not isinstance(request.get("request"), dict):
        return Refusal(message="Request contains an invalid argument: request is required.")
    return check(_inner(request))


def _of_inner(function: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    return lambda request: function(_inner(request))


GCA = replace(
    GEMINI,
    check=_check_wrapped,
    check_model=lambda request, _: check_model(_inner(request), str(request.get("model") or "")),
    prompt=_of_inner(_prompt),
    sizes=_of_inner(_sizes),
    read_request=_of_inner(_read_request),
    whole=lambda exchange: dump(_wrapped(exchange, _generated(exchange, _parts(exchange), is_last=True))),
    events=_wrapped_events,
)
