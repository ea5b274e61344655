"""``/api/memory``: what was trimmed or cleared from the contexts of sessions, by day."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tersely.api.rest.guard import GuardedRoute, Tenant
from tersely.api.rest.responses import (
    AS_JSON_LINES,
    json_lines_response,
    json_response,
    page_response,
    write_time,
)
from tersely.api.rest.schemas.common import Limit
from tersely.api.rest.schemas.memory import ForgottenOut, MemoryPage, SearchMemory
from tersely.api.rest.services import AppServices
from tersely.domain.errors import InvalidRequest
from tersely.service.common.cursors import read_cursor, write_cursor
from tersely.service.summaries.daily_memory import read_day
from tersely.store.notes.daily_memory import MemoryCursor, MemoryEntry

After = Annotated[str | None, Query(max_length=2000, description="The `next` of the previous page.")]
Day = Annotated[str | None, Query(max_length=10, description="YYYY-MM-DD, in UTC.", examples=["2026-01-31"])]
OfSession = Annotated[str | None, Query(alias="session", max_length=256, description="Only entries of this session.")]


router = APIRouter(route_class=GuardedRoute)


@router.get("/memory", summary="List the memory", response_model=MemoryPage)
async def list_memory(
    services: AppServices,
    tenant: Tenant,
    day: Day = None,
    session: OfSession = None,
    after: After = None,
    limit: Limit = 100,
) -> Response:
    """Summaries of messages that were cut from contexts, newest first."""
    cursor = None if after is None else _read_cursor(after)
    found, following = await services.daily_memory.page(
        tenant, day=_day(day), session_id=session, after=cursor, limit=limit
    )
    return page_response([_write(entry) for entry in found], None if following is None else _write_cursor(following))


@router.post("/memory/search", summary="Search the memory", response_model=MemoryPage)
async def search_memory(services: AppServices, tenant: Tenant, body: SearchMemory) -> Response:
    """Best first. Stop words are ignored."""
    found = await services.daily_memory.search(
        tenant, query=body.query, day=_day(body.day), session_id=body.session, limit=body.limit
    )
    return page_response([_write(entry) for entry in found], None)


@router.get(
    "/memory/export",
    summary="Export the memory",
    response_class=Response,
    responses=AS_JSON_LINES,
)
async def export_memory(services: AppServices, tenant: Tenant) -> Response:
    """All of it, the newest first, streamed as JSON lines."""
    return await json_lines_response(_write(entry) async for entry in services.daily_memory.export(tenant))


@router.delete("/memory", summary="Delete memory", response_model=ForgottenOut)
async def delete_memory(services: AppServices, tenant: Tenant, day: Day = None, session: OfSession = None) -> Response:
    """Delete the entries of a day, of a session, or of one day of a session. `day` or `session` is required."""
    return json_response({"deleted": await services.daily_memory.forget(tenant, day=_day(day), session_id=session)})


def _write(entry: MemoryEntry) -> dict[str, Any]:
    return {
        "day": entry.created_at.date().isoformat(),
        "session": entry.session_id,
        "first_seq": entry.first_seq,
        "last_seq": entry.last_seq,
        "ranges": [{"first_seq": first, "last_seq": last} for first, last in entry.ranges],
        "text": entry.text,
        "created_at": write_time(entry.created_at),
    }


def _day(text: str | None) -> Any:
    return None if text is None else read_day(text)


def _write_cursor(cursor: MemoryCursor) -> str:
    at, session_id, first, last = cursor
    return write_cursor(at, f"{first} {last} {session_id}")


def _read_cursor(cursor: str) -> MemoryCursor:
    at, item = read_cursor(cursor)
    steps = item.split(" ", 2)
    if len(steps) != 3 or not all(step.isascii() and step.isdigit() and len(step) < 19 for step in steps[:2]):
        raise InvalidRequest("after must be the `next` of an earlier page", field="after")
    return at, steps[2], int(steps[0]), int(steps[1])
