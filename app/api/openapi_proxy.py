"""The proxy's routes as OpenAPI: each provider's own, with what Tersely adds. Bodies are the providers' affair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SETTING = {"type": "string", "examples": ["slim", '{"name": "slim", "recent_turns": 3}']}
REQUEST_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Tersely-Session": ("The session, by your own name for it; alone permits sending only what is new.", {}),
    "X-Tersely-Strategy": ("The strategy for this request, as TERSELY_STRATEGY.", SETTING),
    "X-Tersely-Epoch": ("The epoch policy for this request, as TERSELY_EPOCH.", {"type": "string"}),
    "X-Tersely-Bypass": ("`true`: forward unchanged, store nothing.", {"type": "boolean"}),
    "X-Tersely-Key": ("The tenant's key, when `Authorization` carries the upstream's own.", {}),
}
RESPONSE_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "X-Tersely-Session": ("The session that the call was stored in.", {}),
    "X-Tersely-Session-Source": ("How it was found.", {"enum": ["header", "body", "lineage", "new"]}),
    "X-Tersely-Strategy": ("The strategy.", {}),
    "X-Tersely-Context": (
        "What went upstream.",
        {"enum": ["built", "passthrough", "bypass", "fail-open", "command"]},
    ),
    "X-Tersely-Epoch": ("The epoch's number.", {"type": "integer"}),
    "X-Tersely-Tokens-Before": ("Estimated tokens of the whole history.", {"type": "integer"}),
    "X-Tersely-Tokens-After": ("Estimated tokens that were sent.", {"type": "integer"}),
    "X-Tersely-Overhead-Ms": ("Time in Tersely before the request left, in milliseconds.", {"type": "number"}),
}
# What a call that is only passed on needs, and gets.
KEY = ("X-Tersely-Key",)
PASSED = ("X-Tersely-Context", "X-Tersely-Overhead-Ms")

JSON = "application/json"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}


def _error(**members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(members), "properties": members, "additionalProperties": True}


_TEXT: dict[str, Any] = {"type": "string"}
_MAY_BE: dict[str, Any] = {"type": ["string", "null"]}
ERRORS: dict[str, Any] = {
    "OpenAIError": _error(error=_error(message=_TEXT, type=_TEXT, param=_MAY_BE, code=_MAY_BE)),
    "AnthropicError": _error(type={"const": "error"}, error=_error(type=_TEXT, message=_TEXT)),
    "GeminiError": _error(error=_error(code={"type": "integer"}, message=_TEXT, status=_TEXT)),
}
_REFUSALS = {
    "400": "The request cannot be read",
    "401": "A Tersely key is needed",
    "413": "Over the size limit",
    "426": "There are no websockets here: use HTTP",
    "502": "The upstream cannot be reached",
}
_AWAY = {"503": "The database is away, and failing open is off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One operation. ``is_call``: a model answers, and what is said is stored; else it is passed on.

    ``error`` names the shape of errors, ``members`` are those of a request that Tersely itself reads.
    """

    method: str
    path: str
    name: str
    summary: str
    text: str
    error: str
    is_call: bool = False
    members: Mapping[str, dict[str, Any]] | None = None
    required: str = ""
    example: object = None
    takes: tuple[str, ...] = (JSON,)
    answers: tuple[str, ...] = (JSON,)


_MESSAGES: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
_MODEL: dict[str, Any] = {"type": "string"}
_STREAM: dict[str, Any] = {"type": "boolean"}
_SAID = [{"role": "user", "content": "Hello"}]
_CONTENTS = [{"role": "user", "parts": [{"text": "Hello"}]}]
_STORED = (
    "The history is stored, the upstream gets a context built from it, the answer comes back as the upstream gave it, "
    "without terse tags. Errors have the provider's shape; the upstream's own come back as they are."
)
_FORWARDED = "Passed on to the upstream unchanged; nothing is stored."
_UPLOAD = "Where the pieces of a file go is said in `x-goog-upload-url`, as Google says it. "
_GEMINI: dict[str, Any] = {"contents": _MESSAGES, "systemInstruction": OBJECT, "tools": _MESSAGES}
_WRAPPED: dict[str, Any] = {"model": _MODEL, "project": _MODEL, "request": OBJECT}
ROUTES = (
    Route(
        method="post",
        path="/v1/chat/completions",
        name="chat_completions",
        summary="A chat completion, with a short context",
        text=f"OpenAI's chat completions, streaming or not. {_STORED}",
        error="OpenAIError",
        is_call=True,
        members={"messages": _MESSAGES, "model": _MODEL, "stream": _STREAM},
        required="messages",
        example={"model": "gpt-4o-mini", "messages": _SAID},
        answers=(JSON, EVENTS),
    ),
    Route(
        method="post",
        path="/v1/responses",
        name="responses",
        summary="A response, with a short context",
        text=f"OpenAI's responses, streaming or not. {_STORED}",
        error="OpenAIError",
        is_call=True,
        members={
            "input": {"type": ["string", "array"], "items": {"type": "object"}},
            "model": _MODEL,
            "instructions": _MAY_BE,
            "previous_response_id": _MAY_BE,
            "conversation": {"type": ["string", "object", "null"]},
            "stream": _STREAM,
        },
        example={"model": "gpt-4o-mini", "input": "Hello"},
        answers=(JSON, EVENTS),
    ),
    Route(
        method="get",
        path="/v1/responses",
        name="responses_websocket",
        summary="No websocket: go on over HTTP",
        text="With `Upgrade: websocket` it is refused with 426, and clients go on with `POST`.",
        error="OpenAIError",
    ),
    Route(
        method="get",
        path="/v1/responses/{id}",
        name="responses_retrieve",
        summary="A response that was given before",
        text="The upstream's, as the client was given it where Tersely relayed it.",
        error="OpenAIError",
    ),
    Route(
        method="post",
        path="/v1/responses/compact",
        name="responses_compact",
        summary="The upstream's own compaction",
        text=_FORWARDED,
        error="OpenAIError",
        members={"model": _MODEL},
    ),
    Route(
        method="post",
        path="/v1/messages",
        name="messages",
        summary="A message, with a short context",
        text=f"Anthropic's messages, streaming or not. {_STORED}",
        error="AnthropicError",
        is_call=True,
        members={"messages": _MESSAGES, "model": _MODEL, "system": {"type": ["string", "array"]}, "stream": _STREAM},
        required="messages",
        example={"model": "claude-sonnet-4-5", "max_tokens": 100, "messages": _SAID},
        answers=(JSON, EVENTS),
    ),
    Route(
        method="post",
        path="/v1/messages/count_tokens",
        name="messages_count_tokens",
        summary="How many tokens a message would have",
        text=_FORWARDED,
        error="AnthropicError",
        members={"messages": _MESSAGES, "model": _MODEL},
    ),
    Route(
        method="get",
        path="/v1/models",
        name="models",
        summary="The upstream's models",
        text="Anthropic's for callers with an `anthropic-version` or an `x-api-key` of theirs, Gemini's for those with "
        + "an `x-goog-api-key` or `?key=`, else OpenAI's. "
        + _FORWARDED,
        error="OpenAIError",
    ),
    Route(
        method="post",
        path="/v1beta/models/{model}:generateContent",
        name="generate_content",
        summary="A generated content, with a short context",
        text=f"Gemini's `generateContent`; under `/v1/` and `/v1alpha/` too, and for `tunedModels`. {_STORED}",
        error="GeminiError",
        is_call=True,
        members=_GEMINI,
        required="contents",
        example={"contents": _CONTENTS},
    ),
    Route(
        method="post",
        path="/v1beta/models/{model}:streamGenerateContent",
        name="stream_generate_content",
        summary="A generated content, piece by piece",
        text=f"As events with `alt=sse`, else as a JSON array. {_STORED}",
        error="GeminiError",
        is_call=True,
        members=_GEMINI,
        required="contents",
        example={"contents": _CONTENTS},
        answers=(EVENTS, JSON),
    ),
    Route(
        method="post",
        path="/v1beta/models/{model}:countTokens",
        name="count_tokens",
        summary="How many tokens contents have",
        text=_FORWARDED,
        error="GeminiError",
        members=_GEMINI,
    ),
    Route(
        method="get",
        path="/v1beta/models",
        name="gemini_models",
        summary="Gemini's models",
        text=_FORWARDED,
        error="GeminiError",
    ),
    Route(
        method="post",
        path="/v1internal:generateContent",
        name="code_assist",
        summary="A generated content in Code Assist's envelope, with a short context",
        text=_STORED,
        error="GeminiError",
        is_call=True,
        members=_WRAPPED,
        required="request",
        example={"model": "gemini-2.5-pro", "project": "p", "request": {"contents": _CONTENTS}},
    ),
    Route(
        method="post",
        path="/v1internal:streamGenerateContent",
        name="code_assist_stream",
        summary="The same, piece by piece",
        text=f"As events with `alt=sse`, else as a JSON array. {_STORED}",
        error="GeminiError",
        is_call=True,
        members=_WRAPPED,
        required="request",
        example={"model": "gemini-2.5-pro", "project": "p", "request": {"contents": _CONTENTS}},
        answers=(EVENTS, JSON),
    ),
    *(
        Route(
            method=method,
            path=f"/{way}/{version}/{{path}}",
            name=f"{method}_{way}_{version}",
            summary=summary,
            text=f"Whatever the rest of the path is, slashes included. {more}{_FORWARDED}",
            error="GeminiError",
            members={} if way == "upload" else None,
            takes=(JSON, BYTES),
            answers=(BYTES,) if way == "download" else (JSON,),
        )
        for way, method, summary, more in (
            ("upload", "post", "A file for Gemini, or a piece of one", _UPLOAD),
            ("download", "get", "A file of Gemini's", ""),
        )
        for version in ("v1beta", "v1")
    ),
    *(
        Route(
            method=method,
            path=path,
            name=f"{method}_{name}",
            summary=f"Anything else of {whose}",
            text=f"Whatever the rest of the path is, slashes included. {_FORWARDED}",
            error=error,
            members={} if method == "post" else None,
        )
        for method in ("get", "post", "delete")
        for path, name, whose, error in (
            (
                "/v1/{path}",
                "v1",
                "OpenAI, of Anthropic for callers with an `anthropic-version`, or of Gemini for those with an "
                "`x-goog-api-key` or `?key=`",
                "OpenAIError",
            ),
            ("/v1beta/{path}", "v1beta", "Gemini", "GeminiError"),
            ("/v1internal:{path}", "v1internal", "Code Assist", "GeminiError"),
        )
    ),
)


def proxy_paths() -> dict[str, Any]:
    """The paths of all proxy routes, with their operations."""
    here = {
        "tags": ["proxy"],
        "summary": "Is there anybody?",
        "description": "Some clients ask before they begin.",
        "operationId": "anybody",
        "responses": {"200": {"description": "Yes"}},
    }
    paths: dict[str, Any] = {"/": {"head": here}}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    asked = REQUEST_HEADERS if route.is_call else KEY
    told = RESPONSE_HEADERS if route.is_call else PASSED
    refusal = {JSON: {"schema": {"$ref": f"#/components/schemas/{route.error}"}}}
    refusals = _REFUSALS | (_AWAY if route.is_call else {})
    operation: dict[str, Any] = {
        "tags": ["proxy"],
        "summary": route.summary,
        "description": route.text,
        "operationId": route.name,
        "parameters": [*_path_parameters(route), *map(_request_header, asked)],
        "responses": {
            "200": {
                "description": "The upstream's answer",
                "headers": _response_headers(told),
                "content": {kind: {"schema": _answer(route, kind)} for kind in route.answers},
            },
            **{status: {"description": text, "content": refusal} for status, text in sorted(refusals.items())},
        },
    }
    if route.members is not None:
        operation["requestBody"] = _body(route)
    return operation


def _answer(route: Route, kind: str) -> dict[str, Any]:
    """A stream of Gemini's that is no stream of events is an array."""
    if kind == JSON:
        return {"type": "array", "items": OBJECT} if EVENTS in route.answers[:1] else OBJECT
    return _TEXT if kind == EVENTS else {}


def _body(route: Route) -> dict[str, Any]:
    schema: dict[str, Any] = {
        "type": "object",
        "description": "As the provider documents it; unknown members pass through.",
        "properties": dict(route.members or {}),
        "additionalProperties": True,
    }
    if route.required:
        schema["required"] = [route.required]
    content: dict[str, Any] = {"schema": schema}
    if route.example is not None:
        content["example"] = route.example
    return {"required": True, "content": {kind: content if kind == JSON else {"schema": {}} for kind in route.takes}}


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in ("id", "model", "path")
        if f"{{{name}}}" in route.path
    ]


def _request_header(name: str) -> dict[str, Any]:
    text, schema = REQUEST_HEADERS[name]
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": text,
        "schema": {"type": "string", **schema},
    }


def _response_headers(names: Iterable[str]) -> dict[str, Any]:
    told = ((name, *RESPONSE_HEADERS[name]) for name in names)
    return {name: {"description": text, "schema": {"type": "string", **schema}} for name, text, schema in told}
