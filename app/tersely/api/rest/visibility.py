"""``PATCH /api/sessions/{id}/messages/{seq}``: who sees a message."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.messages import Seq, write_message
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.messages import MessageOut, PatchMessage
from tersely.api.rest.services import AppServices

router = APIRouter(route_class=GuardedRoute)


@router.patch(
    "/sessions/{session_id}/messages/{seq}",
    summary="Set the visibility of a message",
    response_model=MessageOut,
)
async def update_message(
    services: AppServices, tenant: Tenant, session_id: SessionId, seq: Seq, body: PatchMessage
) -> Response:
    """Hide a message from the model or from the client's view, or show it again. A field that is left out keeps its
    value.

    From the next call on, a message that is hidden from the model is in no context, log, summary or search. A tool call
    and its results are hidden and shown together. A message that is hidden from the client is in no client view, export
    or search; the model still sees it. Nothing is deleted.
    """
    changed = await services.visibility.change(
        tenant, session_id, seq, client_visible=body.client_visible, model_visible=body.model_visible
    )
    return json_response(write_message(changed, "all"))
