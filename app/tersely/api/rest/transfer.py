"""``/api/sessions/{id}/export``, ``import`` and ``terse``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant, verbatim_items
from tersely.api.rest.responses import json_response, page_response
from tersely.api.rest.schemas.common import MAX_TURN, Limit
from tersely.api.rest.schemas.notes import TersePage
from tersely.api.rest.schemas.sessions import ImportedSessionOut
from tersely.api.rest.schemas.transfer import ExportOut, ImportSession
from tersely.api.rest.services import AppServices
from tersely.api.rest.sessions import write_session
from tersely.domain.errors import InvalidRequest
from tersely.service.sessions.exports import SessionImport, write_entry
from tersely.service.sessions.sessions import SessionChange
from tersely.store.history.packed_log import LogCursor

router = APIRouter(route_class=GuardedRoute)


@router.get("/sessions/{session_id}/terse", summary="The terse log", response_model=TersePage)
async def list_terse_entries(
    services: AppServices,
    tenant: Tenant,
    session_id: SessionId,
    after: Annotated[str | None, Query(max_length=60)] = None,
    limit: Limit = 100,
) -> Response:
    """List the model's summary of each turn, or a derived one where the model wrote none."""
    found, following = await services.exports.log(tenant, session_id, after=_read_cursor(after), limit=limit)
    return page_response(
        [write_entry(entry) for entry in found], None if following is None else ".".join(map(str, following))
    )


@router.get("/sessions/{session_id}/export", summary="Export a session", response_model=ExportOut)
async def export_session(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    """The live history, its terse log, and the data that restores the same session at import, streamed
    as one document.
    """
    pieces = services.exports.export(tenant, session_id)
    first = await anext(pieces)
    return StreamingResponse(_chain(first, pieces), media_type="application/json")


@router.post("/sessions/import", status_code=201, summary="Import a session", response_model=ImportedSessionOut)
async def import_session(services: AppServices, request: Request, tenant: Tenant, body: ImportSession) -> Response:
    """Create a session from an exported document. Of a document of Tersely's own the export is the same again."""
    given = SessionImport(
        id=body.id,
        parent=body.parent,
        dialect=body.dialect,
        context=await verbatim_items(request, "context"),
        terse=body.terse,
        configuration=SessionChange(strategy=body.strategy, epoch=body.epoch, metadata=body.metadata),
        snapshot=body.tersely,
    )
    return json_response(write_session(services, await services.exports.import_session(tenant, given)), 201)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _read_cursor(text: str | None) -> LogCursor:
    if text is None:
        return 0, 0, 0
    steps = text.split(".")
    if len(steps) != 3 or not all(step.isascii() and step.isdigit() and len(step) < 19 for step in steps):
        raise InvalidRequest("after must be the `next` of an earlier page", field="after")
    turn, seq, number = map(int, steps)
    return min(turn, MAX_TURN), seq, min(number, MAX_TURN)
