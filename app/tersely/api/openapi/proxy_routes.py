"""The proxy's routes as OpenAPI: each provider's own, with what Tersely adds.

The routes are data: `data/proxy_routes.json`. Tersely documents only the members of a body that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import msgspec

JSON = "application/json"
KEY_HEADER = "X-Tersely-Key"
ALTERNATIVES = "x-alternative-content"
OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_TEXT: dict[str, Any] = {"type": "string"}


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A header of Tersely's own: its description and schema."""

    text: str
    schema: dict[str, Any]


class Route(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One operation. ``is_call``: a model answers and the call is stored; otherwise the request is only forwarded.

    ``error`` names the schema of errors. ``members`` are the request members that Tersely reads; None: no body.
    ``answer`` is the media type of the reply (``is_array``: a JSON array); ``alternatives`` says of other media types
    how to ask for them.
    """

    method: str
    path: str
    name: str
    summary: str
    text: str
    error: str
    is_call: bool = False
    members: dict[str, dict[str, Any]] | None = None
    required: str = ""
    example: Any = None
    takes: tuple[str, ...] = (JSON,)
    answer: str = JSON
    is_array: bool = False
    alternatives: dict[str, str] = {}


class ProxyDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the data file. Statuses in ``call_refusals`` occur on calls of a model alone."""

    request_headers: dict[str, Header]
    response_headers: dict[str, Header]
    forwarded_response_headers: list[str]
    errors: dict[str, Any]
    refusals: dict[str, str]
    call_refusals: dict[str, str]
    other_paths: dict[str, Any]
    routes: list[Route]


DOCUMENT = msgspec.json.decode(files("tersely.data").joinpath("proxy_routes.json").read_bytes(), type=ProxyDocument)


def proxy_paths() -> dict[str, Any]:
    """Return the paths of all proxy routes, with their operations."""
    paths: dict[str, Any] = dict(DOCUMENT.other_paths)
    for route in DOCUMENT.routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    return paths


def _operation(route: Route) -> dict[str, Any]:
    request_headers: Iterable[str] = DOCUMENT.request_headers if route.is_call else ()
    response_headers = DOCUMENT.response_headers if route.is_call else DOCUMENT.forwarded_response_headers
    refusal = {JSON: {"schema": {"$ref": f"#/components/schemas/{route.error}"}}}
    refusals = DOCUMENT.refusals | (DOCUMENT.call_refusals if route.is_call else {})
    operation: dict[str, Any] = {
        "tags": ["proxy"],
        "summary": route.summary,
        "description": route.text,
        "operationId": route.name,
        "parameters": [*_path_parameters(route), *map(_request_header, request_headers)],
        "responses": {
            "200": {
                "description": "The upstream's answer",
                "headers": _response_headers(response_headers),
                "content": {route.answer: {"schema": _response(route)}},
            },
            **{status: {"description": text, "content": refusal} for status, text in sorted(refusals.items())},
            "default": {
                "description": "The upstream's own error, unchanged",
                "content": {JSON: {"schema": {}}},
            },
        },
    }
    if route.alternatives:
        operation["responses"]["200"][ALTERNATIVES] = route.alternatives
    if route.members is not None:
        operation["requestBody"] = _body(route)
    return operation


def _response(route: Route) -> dict[str, Any]:
    """Return the schema of the reply."""
    if route.answer != JSON:
        return {"type": "string", "format": "binary"}
    return {"type": "array", "items": OBJECT} if route.is_array else OBJECT


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
    header = DOCUMENT.request_headers[name]
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": header.text,
        "schema": {"type": "string", **header.schema},
    }


def _response_headers(names: Iterable[str]) -> dict[str, Any]:
    headers = ((name, DOCUMENT.response_headers[name]) for name in names)
    return {
        name: {"description": header.text, "schema": {"type": "string", **header.schema}} for name, header in headers
    }
