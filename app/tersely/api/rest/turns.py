"""``/api/sessions/{id}/turns`` and ``undo``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response, page_response, write_time
from tersely.api.rest.schemas.common import MAX_TURN, Limit
from tersely.api.rest.schemas.turns import TurnOut, TurnPage
from tersely.api.rest.services import AppServices
from tersely.domain.history.turns import read_turn_id, write_turn_id
from tersely.store.commit.turns import TurnRow

Text = Annotated[str | None, Query(max_length=2000)]
router = APIRouter(route_class=GuardedRoute)


@router.get("/sessions/{session_id}/turns", summary="List turns", response_model=TurnPage)
async def list_turns(
    services: AppServices, tenant: Tenant, session_id: SessionId, after: Text = None, limit: Limit = 100
) -> Response:
    """Turns in order with their token usage; `after` is a turn id."""
    start = 0 if after is None else _turn(after, "after")
    found, following = await services.sessions.turns(tenant, session_id, after=start, limit=limit)
    return page_response([write_turn(turn) for turn in found], None if following is None else write_turn_id(following))


@router.get("/sessions/{session_id}/turns/{turn}", summary="A turn", response_model=TurnOut)
async def get_turn(services: AppServices, tenant: Tenant, session_id: SessionId, turn: str) -> Response:
    return json_response(write_turn(await services.sessions.turn(tenant, session_id, _turn(turn))))


@router.delete("/sessions/{session_id}/turns/{turn}", status_code=204, summary="Remove a turn for good")
async def delete_turn(services: AppServices, tenant: Tenant, session_id: SessionId, turn: str) -> Response:
    """The turn's content is deleted everywhere. Its sequence numbers are not used again."""
    await services.sessions.remove(tenant, session_id, _turn(turn))
    return Response(status_code=204)


@router.post("/sessions/{session_id}/turns/{turn}/drop", summary="Hide a turn", response_model=TurnOut)
async def hide_turn(services: AppServices, tenant: Tenant, session_id: SessionId, turn: str) -> Response:
    """The turn stays stored. No context contains it any more."""
    return json_response(write_turn(await services.sessions.drop(tenant, session_id, _turn(turn))))


@router.post("/sessions/{session_id}/undo", summary="Take the last turn back", response_model=TurnOut)
async def undo_turn(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    """Take the last turn back and return it. 409 if there is none."""
    return json_response(write_turn(await services.sessions.undo(tenant, session_id)))


def write_turn(turn: TurnRow) -> dict[str, Any]:
    """Return a turn as JSON members."""
    return {
        "turn": write_turn_id(turn.turn),
        "status": turn.status,
        "messages": turn.messages,
        "first_seq": turn.first_seq,
        "last_seq": turn.last_seq,
        "tokens": turn.tokens,
        "terse": turn.terse,
        "usage": turn.usage,
        "created_at": write_time(turn.created_at),
        "updated_at": write_time(turn.updated_at),
    }


def _turn(text: str, field: str = "turn") -> int:
    return min(read_turn_id(text, field=field), MAX_TURN)
