"""``/api/sessions/{id}/state`` and ``scratchpad``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response, page_response, write_time
from tersely.api.rest.schemas.common import MAX_SEQ, MAX_TURN, Limit
from tersely.api.rest.schemas.notes import AppendText, PutText, ScratchpadOut, StateOut, StatePage
from tersely.api.rest.services import AppServices
from tersely.domain.errors import InvalidRequest
from tersely.domain.text.state import StateBlock
from tersely.store.notes.scratchpads import Scratchpad
from tersely.store.notes.states import PastState, StateCursor

After = Annotated[str | None, Query(max_length=40, description="The `next` of the previous page.")]


router = APIRouter(route_class=GuardedRoute)


@router.get("/sessions/{session_id}/state", summary="The state block", response_model=StateOut)
async def get_state(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    """The newest state whose message is still live."""
    return json_response(write_state(await services.notes.state(tenant, session_id)))


@router.put("/sessions/{session_id}/state", summary="Write the state block", response_model=StateOut)
async def put_state(services: AppServices, tenant: Tenant, session_id: SessionId, body: PutText) -> Response:
    """Write the state block instead of the model. It is valid from the session's last message on. An empty text removes
    the state.

    At most 16,000 characters.
    """
    return json_response(write_state(await services.notes.put_state(tenant, session_id, body.text)))


@router.get("/sessions/{session_id}/state/history", summary="All states of a session", response_model=StatePage)
async def list_states(
    services: AppServices, tenant: Tenant, session_id: SessionId, after: After = None, limit: Limit = 100
) -> Response:
    """All states in order, also those whose message is no longer live."""
    cursor = None if after is None else _read_cursor(after)
    found, following = await services.notes.state_history(tenant, session_id, after=cursor, limit=limit)
    return page_response(
        [_write_past(each) for each in found], None if following is None else "{}.{}".format(*following)
    )


@router.get("/sessions/{session_id}/scratchpad", summary="The scratchpad", response_model=ScratchpadOut)
async def get_scratchpad(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    return json_response(_write_scratchpad(await services.notes.scratchpad(tenant, session_id)))


@router.put("/sessions/{session_id}/scratchpad", summary="Write the scratchpad", response_model=ScratchpadOut)
async def put_scratchpad(services: AppServices, tenant: Tenant, session_id: SessionId, body: PutText) -> Response:
    """Replace all of it. At most 32,000 characters."""
    return json_response(_write_scratchpad(await services.notes.put_scratchpad(tenant, session_id, body.text)))


@router.post(
    "/sessions/{session_id}/scratchpad/append",
    summary="Add to the scratchpad",
    response_model=ScratchpadOut,
)
async def append_to_scratchpad(
    services: AppServices, tenant: Tenant, session_id: SessionId, body: AppendText
) -> Response:
    """Add text on a new line. Returns the whole scratchpad."""
    return json_response(_write_scratchpad(await services.notes.append_scratchpad(tenant, session_id, body.text)))


def write_state(state: StateBlock | None) -> dict[str, Any]:
    """Return a state block as JSON members; empty if there is none."""
    if state is None:
        return {"text": "", "seq": 0, "source": None, "created_at": None}
    return {
        "text": state.text,
        "seq": state.seq,
        "source": state.source,
        "created_at": write_time(state.created_at),
    }


def _write_past(past: PastState) -> dict[str, Any]:
    return {**write_state(past.state), "live": past.is_live}


def _write_scratchpad(scratchpad: Scratchpad) -> dict[str, Any]:
    at = scratchpad.updated_at
    return {"text": scratchpad.text, "updated_at": None if at is None else write_time(at)}


def _read_cursor(cursor: str) -> StateCursor:
    seq, _, number = cursor.partition(".")
    if not (seq.isdecimal() and number.isdecimal() and int(seq) <= MAX_SEQ and int(number) <= MAX_TURN):
        raise InvalidRequest("after must be the `next` of an earlier page", field="after")
    return int(seq), int(number)
