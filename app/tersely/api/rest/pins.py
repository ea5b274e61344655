"""``/api/sessions/{id}/messages/{seq}/pin`` and ``priority``."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.messages import Seq, write_message
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.messages import MessageOut, PutPriority
from tersely.api.rest.services import AppServices

router = APIRouter(route_class=GuardedRoute)


@router.post("/sessions/{session_id}/messages/{seq}/pin", summary="Pin a message", response_model=MessageOut)
async def pin_message(services: AppServices, tenant: Tenant, session_id: SessionId, seq: Seq) -> Response:
    """Every context from the next one on contains the message, even if it was cut before."""
    return json_response(write_message(await services.pins.pin(tenant, session_id, seq, pinned=True), "all"))


@router.delete("/sessions/{session_id}/messages/{seq}/pin", summary="Unpin a message", response_model=MessageOut)
async def unpin_message(services: AppServices, tenant: Tenant, session_id: SessionId, seq: Seq) -> Response:
    return json_response(write_message(await services.pins.pin(tenant, session_id, seq, pinned=False), "all"))


@router.put(
    "/sessions/{session_id}/messages/{seq}/priority",
    summary="Set the priority of a message",
    response_model=MessageOut,
)
async def set_message_priority(
    services: AppServices, tenant: Tenant, session_id: SessionId, seq: Seq, body: PutPriority
) -> Response:
    """`tiered` keeps turns with important messages longer."""
    return json_response(write_message(await services.pins.set_priority(tenant, session_id, seq, body.priority), "all"))
