"""``/api/sessions/{id}/state`` and ``scratchpad``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, moment, page, printable
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import AppendText, Limit, PutText
from app.domain.errors import InvalidRequest
from app.domain.state import StateBlock
from app.service.notes import Notes
from app.store.scratchpads import Scratchpad
from app.store.states import PastState, Place

After = Annotated[str | None, Query(max_length=40, description="The `next` of the page before.")]


def notes_router(service: Notes, router: APIRouter) -> None:
    """Add the routes."""

    @router.get("/sessions/{session_id}/state", summary="The state block", response_model=schemas.StateOut)
    async def state(tenant: Tenant, session_id: SessionId) -> Response:
        """The newest one whose message still counts."""
        return answer(write_state(await service.state(tenant, session_id)))

    @router.put("/sessions/{session_id}/state", summary="Write the state block", response_model=schemas.StateOut)
    async def put_state(tenant: Tenant, session_id: SessionId, body: PutText) -> Response:
        """In the model's place; it counts from the session's last message on. An empty one takes the state away.

        At most 16,000 characters.
        """
        return answer(write_state(await service.put_state(tenant, session_id, body.text)))

    @router.get(
        "/sessions/{session_id}/state/history", summary="All states of a session", response_model=schemas.StatePage
    )
    async def history(tenant: Tenant, session_id: SessionId, after: After = None, limit: Limit = 100) -> Response:
        """In order, those whose message counts no more too."""
        place = None if after is None else _read_place(after)
        found, following = await service.state_history(tenant, session_id, after=place, limit=limit)
        return page([_write_past(each) for each in found], None if following is None else "{}.{}".format(*following))

    @router.get("/sessions/{session_id}/scratchpad", summary="The scratchpad", response_model=schemas.ScratchpadOut)
    async def scratchpad(tenant: Tenant, session_id: SessionId) -> Response:
        return answer(_write_scratchpad(await service.scratchpad(tenant, session_id)))

    @router.put(
        "/sessions/{session_id}/scratchpad", summary="Write the scratchpad", response_model=schemas.ScratchpadOut
    )
    async def put_scratchpad(tenant: Tenant, session_id: SessionId, body: PutText) -> Response:
        """Replace all of it. At most 32,000 characters."""
        return answer(_write_scratchpad(await service.put_scratchpad(tenant, session_id, body.text)))

    @router.post(
        "/sessions/{session_id}/scratchpad/append",
        summary="Add to the scratchpad",
        response_model=schemas.ScratchpadOut,
    )
    async def append_scratchpad(tenant: Tenant, session_id: SessionId, body: AppendText) -> Response:
        """On a new line. The whole scratchpad is answered."""
        return answer(_write_scratchpad(await service.append_scratchpad(tenant, session_id, body.text)))


def write_state(state: StateBlock | None) -> dict[str, Any]:
    """A state block as it is answered; an empty one where there is none."""
    if state is None:
        return {"text": "", "seq": 0, "source": None, "created_at": None}
    return {
        "text": printable(state.text),
        "seq": state.seq,
        "source": state.source,
        "created_at": moment(state.created_at),
    }


def _write_past(past: PastState) -> dict[str, Any]:
    return {**write_state(past.state), "live": past.is_live}


def _write_scratchpad(scratchpad: Scratchpad) -> dict[str, Any]:
    at = scratchpad.updated_at
    return {"text": printable(scratchpad.text), "updated_at": None if at is None else moment(at)}


def _read_place(cursor: str) -> Place:
    seq, _, number = cursor.partition(".")
    if not (seq.isdecimal() and number.isdecimal() and int(seq) <= schemas.MAX_SEQ and int(number) <= schemas.MAX_TURN):
        raise InvalidRequest("after must be the `next` of a page before", field="after")
    return int(seq), int(number)
