"""``/api/sessions``: sessions and their turns."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, moment, page, verbatim
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import CreateSession, Limit, PatchSession
from app.domain.sessions import Session
from app.domain.turns import read_turn_id, write_turn_id
from app.service.sessions import UNSET, Change, Sessions
from app.store.turns import TurnRow

Text = Annotated[str | None, Query(max_length=2000)]


def sessions_router(service: Sessions, router: APIRouter, *, strategy: str, epoch: str) -> None:
    """Add the routes. ``strategy`` and ``epoch`` are the configured defaults."""

    def write(session: Session) -> dict[str, Any]:
        return write_session(session, strategy=strategy, epoch=epoch)

    @router.post("/sessions", status_code=201, summary="Make a session", response_model=schemas.SessionOut)
    async def create(tenant: Tenant, body: CreateSession) -> Response:
        """Make an empty session. 409 when the id is taken."""
        given = Change(strategy=body.strategy, epoch=body.epoch, metadata=body.metadata)
        session = await service.create(tenant, session_id=body.id, parent=body.parent, given=given)
        return answer(write(session), 201)

    @router.get("/sessions", summary="List sessions", response_model=schemas.SessionPage)
    async def listed(
        tenant: Tenant, after: Text = None, limit: Limit = 100, parent: Text = None, client_id: Text = None
    ) -> Response:
        """Sessions, the newest first; `parent` and `client_id` narrow the list down."""
        found, following = await service.page(tenant, after=after, parent=parent, client_id=client_id, limit=limit)
        return page([write(session) for session in found], following)

    @router.get("/sessions/{session_id}", summary="A session", response_model=schemas.SessionOut)
    async def get(tenant: Tenant, session_id: SessionId) -> Response:
        return answer(write(await service.get(tenant, session_id)))

    @router.patch("/sessions/{session_id}", summary="Configure a session", response_model=schemas.SessionOut)
    async def patch(tenant: Tenant, session_id: SessionId, body: PatchSession) -> Response:
        """Change strategy, epoch policy or metadata; the next context follows."""
        given = {name: getattr(body, name) if name in body.model_fields_set else UNSET for name in Change.__slots__}
        return answer(write(await service.change(tenant, session_id, Change(**given))))

    @router.delete("/sessions/{session_id}", status_code=204, summary="Delete a session and all of it")
    async def delete(tenant: Tenant, session_id: SessionId) -> Response:
        await service.delete(tenant, session_id)
        return Response(status_code=204)


def turns_router(service: Sessions, router: APIRouter) -> None:
    """Add the routes."""

    @router.get("/sessions/{session_id}/turns", summary="List turns", response_model=schemas.TurnPage)
    async def listed(tenant: Tenant, session_id: SessionId, after: Text = None, limit: Limit = 100) -> Response:
        """Turns in order with their token usage; `after` is a turn id."""
        start = 0 if after is None else _turn(after, "after")
        found, following = await service.turns(tenant, session_id, after=start, limit=limit)
        return page([write_turn(turn) for turn in found], None if following is None else write_turn_id(following))

    @router.get("/sessions/{session_id}/turns/{turn}", summary="A turn", response_model=schemas.TurnOut)
    async def get(tenant: Tenant, session_id: SessionId, turn: str) -> Response:
        return answer(write_turn(await service.turn(tenant, session_id, _turn(turn))))

    @router.delete("/sessions/{session_id}/turns/{turn}", status_code=204, summary="Remove a turn for good")
    async def remove(tenant: Tenant, session_id: SessionId, turn: str) -> Response:
        """Its content is gone from every place; its sequence numbers stay taken."""
        await service.remove(tenant, session_id, _turn(turn))
        return Response(status_code=204)

    @router.post("/sessions/{session_id}/turns/{turn}/drop", summary="Hide a turn", response_model=schemas.TurnOut)
    async def drop(tenant: Tenant, session_id: SessionId, turn: str) -> Response:
        """The turn stays stored and is part of no context any more."""
        return answer(write_turn(await service.drop(tenant, session_id, _turn(turn))))

    @router.post("/sessions/{session_id}/undo", summary="Take the last turn back", response_model=schemas.TurnOut)
    async def undo(tenant: Tenant, session_id: SessionId) -> Response:
        """The turn that was taken back. 409 when there is none."""
        return answer(write_turn(await service.undo(tenant, session_id)))


def write_session(session: Session, *, strategy: str, epoch: str) -> dict[str, Any]:
    """A session as it is answered."""
    return {
        "id": session.id,
        "parent": session.parent,
        "client_id": session.client_id,
        "strategy": _setting(session.strategy or strategy),
        "epoch": _setting(session.epoch_policy or epoch),
        "metadata": verbatim(session.metadata),
        "turns": session.turns,
        "messages": session.last_seq,
        "tokens": session.tokens,
        "created_at": moment(session.created_at),
        "updated_at": moment(session.updated_at),
    }


def write_turn(turn: TurnRow) -> dict[str, Any]:
    """A turn as it is answered."""
    return {
        "turn": write_turn_id(turn.turn),
        "status": turn.status,
        "messages": turn.messages,
        "first_seq": turn.first_seq,
        "last_seq": turn.last_seq,
        "tokens": turn.tokens,
        "terse": turn.terse,
        "usage": turn.usage,
        "created_at": moment(turn.created_at),
        "updated_at": moment(turn.updated_at),
    }


def _setting(text: str) -> Any:
    """A setting as it was given: a name, or an object."""
    return json.loads(text) if text.lstrip().startswith("{") else text


def _turn(text: str, field: str = "turn") -> int:
    return min(read_turn_id(text, field=field), schemas.MAX_TURN)
