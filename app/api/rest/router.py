"""The REST API put together: guards, routes, problem documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, FastAPI

from app.api.openapi import install_openapi
from app.api.rest.artifacts import artifacts_router
from app.api.rest.commands import commands_router
from app.api.rest.compactions import compactions_router
from app.api.rest.contexts import contexts_router
from app.api.rest.figures import figures_router
from app.api.rest.guard import Guard, RestEdge, guarded
from app.api.rest.memory import memory_router
from app.api.rest.memos import memos_router
from app.api.rest.messages import exports_router, marks_router, messages_router
from app.api.rest.notes import notes_router
from app.api.rest.problems import install_problems
from app.api.rest.queries import queries_router
from app.api.rest.schemas import Problem
from app.api.rest.sessions import sessions_router, turns_router
from app.api.rest.tools import tools_router
from app.service.artifacts import Artifacts
from app.service.commands import Commands
from app.service.compactions import Compactions
from app.service.exports import Exports
from app.service.following import Followers
from app.service.marks import Marks
from app.service.memory import Memories
from app.service.memos import Memos
from app.service.messages import Messages
from app.service.metrics import Metrics
from app.service.notes import Notes
from app.service.previews import Previews
from app.service.queries import Queries
from app.service.search import Searcher
from app.service.sessions import Sessions
from app.service.stats import Figures
from app.service.tools import Tools

PROBLEMS: dict[int | str, dict[str, object]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        401: "A Tersely key is needed",
        404: "Not there, or not yours",
        409: "A conflicting id or idempotency key",
        413: "Over the size limit",
        415: "The body is not JSON",
        422: "A bad value",
        503: "The database is away",
    }.items()
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The use cases behind the routes. ``strategy`` and ``epoch`` are the configured defaults, as configured."""

    sessions: Sessions
    messages: Messages
    marks: Marks
    exports: Exports
    previews: Previews
    searcher: Searcher
    queries: Queries
    figures: Figures
    followers: Followers
    artifacts: Artifacts
    compactions: Compactions
    notes: Notes
    memos: Memos
    memories: Memories
    tools: Tools
    commands: Commands
    strategy: str
    epoch: str


def install_rest(app: FastAPI, services: Services, *, guard: Guard, metrics: Metrics) -> None:
    """Add everything under ``/api`` to ``app``."""
    strategy, epoch = services.strategy, services.epoch
    routes: dict[str, Callable[[APIRouter], None]] = {
        "sessions": partial(sessions_router, services.sessions, strategy=strategy, epoch=epoch),
        "messages": partial(messages_router, services.messages),
        "marks": partial(marks_router, services.marks),
        "turns": partial(turns_router, services.sessions),
        "context": partial(contexts_router, services.previews, services.searcher),
        "query": partial(queries_router, services.queries),
        "transfer": partial(exports_router, services.exports, strategy=strategy, epoch=epoch),
        "compaction": partial(compactions_router, services.compactions),
        "notes": partial(notes_router, services.notes),
        "memos": partial(memos_router, services.memos),
        "memory": partial(memory_router, services.memories),
        "tools": partial(tools_router, services.tools),
        "commands": partial(commands_router, services.commands),
        "artifacts": partial(artifacts_router, services.artifacts),
        "figures": partial(figures_router, services.figures, services.followers),
    }
    for tag, add in routes.items():
        router = APIRouter(prefix="/api", tags=[tag], route_class=guarded(guard), responses=PROBLEMS)
        add(router)
        app.include_router(router)
    install_problems(app)
    install_openapi(app)
    app.add_middleware(RestEdge, metrics=metrics)
