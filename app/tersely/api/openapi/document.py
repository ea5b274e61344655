"""The OpenAPI document: generated from the routes, with those of the proxy, which are no FastAPI routes."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from tersely.api.errors import PROBLEM
from tersely.api.openapi.proxy_routes import DOCUMENT, KEY_HEADER, proxy_paths

SUMMARY = "A context proxy for LLM agents: stores the whole conversation, sends the model a short one."
DESCRIPTION = """
Point an OpenAI client's base URL at `/v1`, or an Anthropic or Gemini client's at the root, and every conversation is
stored and sent as a short context; or drive sessions yourself under `/api`.

- Turn ids are `t1`, `t2`, ...; sequence numbers start at 1 and have no gaps.
- Lists are paged: `{"items": [...], "next": null}`; `next` is the `after` of the next page.
- Errors under `/api` are problem documents (RFC 9457), `application/problem+json`.
- Session ids go into paths URL-encoded, slashes as `%2F`.
- Where keys are on, every request carries one: `X-Tersely-Key`, or `Authorization: Bearer tsk_...`.
- Each status has one media type here. `x-alternative-content` names the others, and how to ask for them.
""".strip()
TAGS = [
    {"name": "proxy", "description": "The drop-in base URL for model calls."},
    {"name": "sessions", "description": "Stored conversations and their configuration."},
    {"name": "calls", "description": "What each upstream call sent, word for word, and what it cost."},
    {"name": "activity", "description": "Events and search over all sessions."},
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

SERVERS = [
    {"url": "/", "description": "The server that this document came from."},
    {"url": "http://127.0.0.1:8484", "description": "`tersely serve` as it is without settings."},
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

# A path parameter that is read as it was encoded, since it may have slashes in it: no route declares it.
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
        servers=SERVERS,
    )
    for path, operations in document["paths"].items():
        for operation in operations.values():
            if OPEN_TAG in operation["tags"]:
                operation["security"] = []
            else:
                _name_problems(operation["responses"])
            if "{session_id}" in path:
                operation.setdefault("parameters", []).insert(0, SESSION_ID)
    document["paths"] = {**proxy_paths(), **document["paths"]}
    components = document.setdefault("components", {})
    components["securitySchemes"] = SECURITY_SCHEMES
    document["security"] = SECURITY
    schemas = components.setdefault("schemas", {})
    schemas.update(DOCUMENT.errors)
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return document


def _name_problems(responses: dict[str, Any]) -> None:
    """Problem documents under their own media type."""
    for status, response in responses.items():
        content = response.get("content", {})
        if int(status) >= 400 and "application/json" in content:
            response["content"] = {PROBLEM: content["application/json"]}
