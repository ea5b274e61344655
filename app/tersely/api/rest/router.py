"""The REST API put together: guards, routes, problem documents."""

from __future__ import annotations

from types import ModuleType

from fastapi import FastAPI

from tersely.api.openapi.document import PROBLEM_CONTENT, install_openapi
from tersely.api.rest import (
    activity,
    admin,
    artifacts,
    calls,
    commands,
    compactions,
    contexts,
    memory,
    memos,
    messages,
    notes,
    pins,
    queries,
    sessions,
    stats,
    tools,
    transfer,
    turns,
    visibility,
)
from tersely.api.rest.guard import Guard, RestEdge
from tersely.api.rest.problems import install_problems
from tersely.api.rest.schemas.common import Problem
from tersely.api.rest.services import Services
from tersely.service.common.metrics import Metrics

# A schema by its name, not a model: FastAPI would make a validator of it for each status of each route, 60 ms and more
# of a service's first request.
PROBLEMS: dict[int | str, dict[str, object]] = {
    status: {"description": text, "content": PROBLEM_CONTENT}
    for status, text in {
        401: "A Tersely key is needed",
        403: "The key does not permit this",
        404: "It does not exist, or belongs to another tenant",
        409: "A conflicting id or idempotency key",
        413: "Over the size limit",
        415: "The body is not JSON",
        422: "An invalid value",
        429: "A limit of the tenant or of its key is used up",
        503: "The database is unavailable",
    }.items()
}


# The modules with routes, by their tag in the OpenAPI document.
ROUTES: dict[str, ModuleType] = {
    "sessions": sessions,
    "calls": calls,
    "activity": activity,
    "messages": messages,
    "marks": pins,
    "visibility": visibility,
    "turns": turns,
    "context": contexts,
    "query": queries,
    "transfer": transfer,
    "compaction": compactions,
    "notes": notes,
    "memos": memos,
    "memory": memory,
    "tools": tools,
    "commands": commands,
    "artifacts": artifacts,
    "figures": stats,
    "admin": admin,
}


def install_rest(app: FastAPI, services: Services, *, guard: Guard, metrics: Metrics) -> None:
    """Add everything under ``/api`` to ``app``."""
    app.state.services, app.state.guard = services, guard
    for tag, module in ROUTES.items():
        app.include_router(module.router, prefix="/api", tags=[tag], responses=PROBLEMS)
    install_problems(app)
    install_openapi(app, Problem)
    app.add_middleware(RestEdge, metrics=metrics)
