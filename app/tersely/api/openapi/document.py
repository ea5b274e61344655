"""The OpenAPI document: generated from the FastAPI routes, with the proxy's routes added."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tersely.api.errors import PROBLEM
from tersely.api.openapi.proxy_routes import DOCUMENT, KEY_HEADER, proxy_paths

SUMMARY = "A context proxy for LLM agents: stores the whole conversation, sends the model a short one."
DESCRIPTION = """
Set an OpenAI client's base URL to `/v1` of this server, or an Anthropic or Gemini client's to its root. Tersely stores
every conversation and sends the model a short context. Under `/api` you can also manage sessions yourself.

- Turn ids are `t1`, `t2`, ...; sequence numbers start at 1 and have no gaps.
- Lists are paged: `{"items": [...], "next": null}`; `next` is the `after` of the next page.
- Errors under `/api` are problem documents (RFC 9457), `application/problem+json`.
- Session ids go into paths URL-encoded, slashes as `%2F`.
- With keys turned on, every request needs one: `X-Tersely-Key`, or `Authorization: Bearer tsk_...`.
- Each status is listed with one media type. `x-alternative-content` names the others, and how to request them.
""".strip()
TAGS = [
    {"name": "proxy", "description": "The drop-in base URL for model calls."},
    {"name": "sessions", "description": "Stored conversations and their configuration."},
    {"name": "calls", "description": "Upstream calls: the exact context that was sent, and the cost."},
    {"name": "activity", "description": "Events and search over all sessions."},
    {"name": "messages", "description": "Stored messages, byte for byte."},
    {"name": "marks", "description": "Messages that are pinned, or important."},
    {"name": "turns", "description": "A user message and everything up to the next one."},
    {"name": "context", "description": "The context that a model would get, and search in the history."},
    {"name": "query", "description": "The agent's own SQL over its session."},
    {"name": "transfer", "description": "The terse log, export and import."},
    {"name": "notes", "description": "The notes of a session: state block and scratchpad."},
    {"name": "memos", "description": "Tagged knowledge across sessions."},
    {"name": "memory", "description": "Daily summaries of messages that were cut from contexts."},
    {"name": "tools", "description": "Tools that models can call; also over MCP, at `/mcp`."},
    {"name": "commands", "description": "Commands that people type into a chat."},
    {"name": "artifacts", "description": "Oversized tool outputs, whole."},
    {"name": "figures", "description": "Statistics and savings."},
    {"name": "admin", "description": "Tenants, keys and limits. `X-Tersely-Key`, or the bearer token, is the admin key."},
    {"name": "operations", "description": "Health and metrics."},
]

SERVERS = [
    {"url": "/", "description": "The server that this document came from."},
    {"url": "http://127.0.0.1:8484", "description": "`tersely serve` with its default address."},
]
SECURITY_SCHEMES = {
    "TerselyKey": {
        "type": "apiKey",
        "in": "header",
        "name": KEY_HEADER,
        "description": "The tenant's key. On proxy routes `Authorization` stays free for the upstream's own key.",
    },
    "BearerKey": {"type": "http", "scheme": "bearer", "description": "The tenant's key, `tsk_...`."},
}
# A key by either scheme; none where the service runs without keys.
SECURITY: list[dict[str, list[str]]] = [{"TerselyKey": []}, {"BearerKey": []}, {}]
OPEN_TAG = "operations"
# The transport answers this before any route is known.
HEADERS_TOO_LARGE = {
    "description": "The request's line and headers are over the limits",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/OpenAIError"}}},
}

# The body of a refusal under ``/api``.
PROBLEM_CONTENT = {PROBLEM: {"schema": {"$ref": "#/components/schemas/Problem"}}}

# A path parameter that stays encoded, since it may contain slashes. No route declares it.
SESSION_ID = {
    "name": "session_id",
    "in": "path",
    "required": True,
    "description": "The session's id, URL-encoded, slashes as `%2F`.",
    "schema": {"type": "string"},
}


def openapi_document(app: FastAPI) -> bytes:
    """Return the OpenAPI document as the repository stores it: stable order, readable, final newline."""
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False, sort_keys=False).encode() + b"\n"


def install_openapi(app: FastAPI, problem: type[BaseModel]) -> None:
    """Make ``app`` describe itself whole, in ``/docs`` too. ``problem`` is the model of `PROBLEM_CONTENT`."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, problem)
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _describe(app: FastAPI, problem: type[BaseModel]) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=SUMMARY,
        description=DESCRIPTION,
        routes=app.routes,
        tags=TAGS,
        servers=SERVERS,
    )
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if OPEN_TAG in operation["tags"]:
                operation["security"] = []
            if "{session_id}" in path:
                operation.setdefault("parameters", []).insert(0, SESSION_ID)
    document["paths"] = {**proxy_paths(), **document["paths"]}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"]["431"] = HEADERS_TOO_LARGE
    components = document.setdefault("components", {})
    components["securitySchemes"] = SECURITY_SCHEMES
    document["security"] = SECURITY
    schemas = components.setdefault("schemas", {})
    body = jsonable_encoder(problem.model_json_schema(mode="serialization"), exclude_none=True)
    described = {**schemas, "Problem": body}
    components["schemas"] = schemas = {**dict(sorted(described.items())), **DOCUMENT.errors}
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document
