"""The OpenAPI document: generated from the routes, with the proxy's route, which is no FastAPI route, by hand."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.api.errors import PROBLEM

SUMMARY = "A context proxy for LLM agents: stores the whole conversation, sends the model a short one."
DESCRIPTION = """
Point an OpenAI client's base URL at `/v1`, and every conversation is stored and sent as a short context; or drive
sessions yourself under `/api`.

- Turn ids are `t1`, `t2`, ...; sequence numbers start at 1 and have no gaps.
- Lists are paged: `{"items": [...], "next": null}`; `next` is the `after` of the next page.
- Errors under `/api` are problem documents (RFC 9457), `application/problem+json`.
- Session ids go into paths URL-encoded, slashes as `%2F`.
- Where keys are on, every request carries one: `X-Tersely-Key`, or `Authorization: Bearer tsk_...`.
""".strip()
TAGS = [
    {"name": "proxy", "description": "The drop-in base URL for model calls."},
    {"name": "sessions", "description": "Stored conversations and their configuration."},
    {"name": "messages", "description": "The longhand, byte for byte."},
    {"name": "marks", "description": "Messages that are pinned, or important."},
    {"name": "turns", "description": "A user message and everything up to the next one."},
    {"name": "context", "description": "What a model would get, and what it can look up."},
    {"name": "query", "description": "The agent's own SQL over its session."},
    {"name": "transfer", "description": "The terse log, export and import."},
    {"name": "notes", "description": "What a session keeps in mind: state block and scratchpad."},
    {"name": "memos", "description": "Tagged knowledge across sessions."},
    {"name": "memory", "description": "What left the contexts of sessions, by day."},
    {"name": "tools", "description": "What models can call; over MCP too, at `/mcp`."},
    {"name": "commands", "description": "What people type into a chat to handle its context."},
    {"name": "artifacts", "description": "Oversized tool outputs, whole."},
    {"name": "figures", "description": "What it was good for."},
    {"name": "operations", "description": "Health and metrics."},
]
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
    "X-Tersely-Context": ("What went upstream.", {"enum": ["built", "passthrough", "bypass", "fail-open"]}),
    "X-Tersely-Epoch": ("The epoch's number.", {"type": "integer"}),
    "X-Tersely-Tokens-Before": ("Estimated tokens of the whole history.", {"type": "integer"}),
    "X-Tersely-Tokens-After": ("Estimated tokens that were sent.", {"type": "integer"}),
    "X-Tersely-Overhead-Ms": ("Time in Tersely before the request left, in milliseconds.", {"type": "number"}),
}


def openapi_document(app: FastAPI) -> bytes:
    """The document as it is kept in the repository: stable order, readable, with a final newline."""
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False, sort_keys=False).encode() + b"\n"


def install_openapi(app: FastAPI) -> None:
    """Make ``app`` describe itself whole, in ``/docs`` too."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=SUMMARY,
        description=DESCRIPTION,
        routes=app.routes,
        tags=TAGS,
    )
    for operations in document["paths"].values():
        for operation in operations.values():
            _name_problems(operation["responses"])
    document["paths"] = {"/v1/chat/completions": {"post": _chat()}, **document["paths"]}
    schemas = document.get("components", {}).get("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _name_problems(responses: dict[str, Any]) -> None:
    """Problem documents under their own media type."""
    for status, response in responses.items():
        content = response.get("content", {})
        if int(status) >= 400 and "application/json" in content:
            response["content"] = {PROBLEM: content["application/json"]}


def _chat() -> dict[str, Any]:
    return {
        "tags": ["proxy"],
        "summary": "A chat completion, with a short context",
        "description": (
            "OpenAI's chat completions, streaming or not. The history is stored, the upstream gets a context built "
            "from it, the answer comes back as the upstream gave it, without terse tags. Every other path under "
            "`/v1/` is passed through. Errors have OpenAI's shape; the upstream's own come back as they are."
        ),
        "operationId": "chat_completions",
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": _schema(schema)}
            for name, (text, schema) in REQUEST_HEADERS.items()
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {
                        "type": "object",
                        "description": "As OpenAI documents it; unknown members pass through.",
                        "required": ["messages"],
                        "properties": {
                            "model": {"type": "string"},
                            "messages": {"type": "array", "items": {"type": "object"}},
                            "stream": {"type": "boolean"},
                        },
                        "additionalProperties": True,
                    },
                    "example": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello"}]},
                }
            },
        },
        "responses": {
            "200": {
                "description": "The upstream's answer",
                "headers": {
                    name: {"description": text, "schema": _schema(schema)}
                    for name, (text, schema) in RESPONSE_HEADERS.items()
                },
                "content": {
                    "application/json": {"schema": {"type": "object"}},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **{
                status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
                for status, text in {
                    "400": "The request cannot be read",
                    "401": "A Tersely key is needed",
                    "413": "Over the size limit",
                    "502": "The upstream cannot be reached",
                    "503": "The database is away, and failing open is off",
                }.items()
            },
        },
    }


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", **schema}
