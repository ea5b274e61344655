"""One call of each REST route and of ``POST /v1/messages``, read from the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MESSAGES = "/v1/messages"
# Reads come first and deletions last, those of a part before those of the whole.
_METHODS = ("get", "post", "put", "patch", "delete")
_LAST = ("delete_session",)
# The first of the deletions: removing the turn would take its output along.
_FIRST_DELETED = ("delete_artifact",)

# Query parameters that a route cannot do without, though its document calls them optional: one of several is needed.
NEEDED: dict[str, dict[str, Any]] = {
    "delete_memory": {"session": "chat"},
    "delete_memos": {"all": True},
    "list_events": {"since": "2026-01-01T00:00:00Z"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A call of one operation. ``body`` is the example of its schema, ``statuses`` are the described ones."""

    operation_id: str
    tag: str
    method: str
    path: str
    path_values: Mapping[str, Any]
    query: Mapping[str, Any]
    statuses: frozenset[str]
    body: Any = None


def read_steps(document: Mapping[str, Any], values: Mapping[str, Any]) -> list[Step]:
    """Return a step for each operation; ``values`` are those of path parameters. The order is one that works."""
    steps = list(_steps(document, values))
    return sorted(
        steps,
        key=lambda step: (
            step.operation_id in _LAST,
            _METHODS.index(step.method),
            step.operation_id not in _FIRST_DELETED,
            -len(step.path),
        ),
    )


def _steps(document: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Step]:
    for path, operations in document["paths"].items():
        if not path.startswith("/api/") and path != MESSAGES:
            continue
        for method, operation in operations.items():
            parameters = operation.get("parameters", [])
            yield Step(
                operation_id=operation["operationId"],
                tag=operation["tags"][0],
                method=method,
                path=path,
                path_values={
                    each["name"]: values.get(each["name"], "none") for each in parameters if each["in"] == "path"
                },
                query=NEEDED.get(operation["operationId"], {}),
                statuses=frozenset(operation["responses"]),
                body=_body(document, operation),
            )


def _body(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Any:
    """Return the first example of a request body; None where there is no body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None or "example" in content:
        return content and content["example"]
    schema = content["schema"]
    name = schema.get("anyOf", [schema])[0]["$ref"].rsplit("/", 1)[1]
    return document["components"]["schemas"][name]["examples"][0]
