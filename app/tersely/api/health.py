"""Health, readiness, metrics, and the answer to clients that only knock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse

from tersely.domain.errors import StoreUnavailable
from tersely.service.common.metrics import Metrics
from tersely.store.db.migrations import current_revision, is_newer, is_outdated

# Seconds within which the database must answer a check.
PING_SECONDS = 0.8
STRICT = {
    "name": "strict",
    "in": "query",
    "required": False,
    "schema": {"type": "boolean", "default": False},
    "description": "Whether readiness requires the database.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseState:
    """The database's usability. ``schema`` describes a schema of another version, else it is empty."""

    is_usable: bool
    schema: str = ""


class DatabaseCheck:
    """Checks the database, within `PING_SECONDS` in any case. One check runs at a time."""

    def __init__(self, read_revision: Callable[[], Awaitable[str | None]]) -> None:
        """``read_revision`` raises `StoreUnavailable` when the database is away."""
        self._read_revision = read_revision
        self._query: asyncio.Task[DatabaseState] | None = None

    async def state(self) -> DatabaseState:
        """Ask, or wait for the question that is open."""
        if self._query is None or self._query.done():
            self._query = asyncio.get_running_loop().create_task(self._ask())
        done, _ = await asyncio.wait({self._query}, timeout=PING_SECONDS)
        return self._query.result() if done else DatabaseState(is_usable=False)

    async def _ask(self) -> DatabaseState:
        try:
            revision = await self._read_revision()
        except StoreUnavailable:
            return DatabaseState(is_usable=False)
        if is_newer(revision):
            return DatabaseState(is_usable=True, schema=f"{revision}, newer than {current_revision()}")
        if is_outdated(revision):
            schema = f"{revision or 'unknown'}, older than {current_revision()}: run tersely migrate"
            return DatabaseState(is_usable=False, schema=schema)
        return DatabaseState(is_usable=True)


class Health:
    """Answers whether the process lives and can serve calls, and its metrics."""

    def __init__(
        self,
        *,
        read_revision: Callable[[], Awaitable[str | None]],
        pool: Callable[[], tuple[int, int]],
        metrics: Metrics,
        serves_without_database: bool,
        is_ending: Callable[[], bool],
    ) -> None:
        """``read_revision`` raises `StoreUnavailable` when the database is away; ``pool`` gives (busy, idle)."""
        self._database = DatabaseCheck(read_revision)
        self._pool = pool
        self._metrics = metrics
        self._serves_without_database = serves_without_database
        self._is_ending = is_ending

    async def get_readiness(self, request: Request, response: Response) -> dict[str, str]:
        is_strict = request.query_params.get("strict", "0").lower() not in ("0", "false", "off")
        found = DatabaseState(is_usable=False) if self._is_ending() else await self._database.state()
        schema = {"schema": found.schema} if found.schema else {}
        if self._is_ending():
            state = {"status": "shutting down"}
        elif found.is_usable:
            return {"status": "ready", "database": "ready", **schema}
        elif self._serves_without_database and not is_strict:
            return {"status": "ready", "database": "outdated" if schema else "away", **schema}
        else:
            state = {"status": "database outdated" if schema else "database away", **schema}
        response.status_code = 503
        response.headers["retry-after"] = "2"
        return state

    async def get_metrics(self) -> Response:
        self._metrics.set_pool(*self._pool())
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def get_health() -> dict[str, str]:
    return {"status": "ok"}


async def show_docs() -> Response:
    return RedirectResponse("/docs")


async def answer_probe() -> Response:
    return Response()


def health_router(health: Health) -> APIRouter:
    """Return the routes of ``health``, and the answers at the root."""
    router = APIRouter(tags=["operations"])
    router.head("/healthz", include_in_schema=False)(get_health)
    router.get("/healthz", summary="Check that the process is alive")(get_health)
    router.get(
        "/readyz",
        summary="Check that calls can be served",
        description=(
            "200 while the proxy can serve calls. That includes times when the database is unavailable and "
            "calls are forwarded unchanged (`TERSELY_FAIL_OPEN`). With `strict=1`: 200 only while the "
            "database answers. `schema` names the schema of the database if another version of Tersely "
            "migrated it."
        ),
        responses={503: {"model": dict[str, str], "description": "Calls cannot be served"}},
        openapi_extra={"parameters": [STRICT]},
    )(health.get_readiness)
    router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)(health.get_metrics)
    router.get("/", include_in_schema=False)(show_docs)
    router.head("/", include_in_schema=False)(answer_probe)
    return router
