"""Health, readiness, metrics, and the answer to clients that only knock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from app.domain.errors import StoreUnavailable
from app.service.metrics import Metrics


def health_router(
    *, ping: Callable[[], Awaitable[None]], pool: Callable[[], tuple[int, int]], metrics: Metrics
) -> APIRouter:
    """``ping`` raises `StoreUnavailable` when the database is away; ``pool`` gives (busy, idle)."""
    router = APIRouter(tags=["operations"])

    @router.head("/healthz", include_in_schema=False)
    @router.get("/healthz", summary="The process is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="The database answers", responses={503: {"description": "It does not"}})
    async def readyz(response: Response) -> dict[str, str]:
        try:
            await ping()
        except StoreUnavailable:
            response.status_code = 503
            response.headers["retry-after"] = "2"
            return {"status": "database away"}
        return {"status": "ready"}

    @router.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def render() -> Response:
        metrics.set_pool(*pool())
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/", include_in_schema=False)
    async def look() -> Response:
        return RedirectResponse("/docs")

    @router.head("/", include_in_schema=False)
    async def knock() -> Response:
        return Response()

    return router
