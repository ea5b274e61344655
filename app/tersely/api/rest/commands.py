"""``/api/sessions/{id}/commands``: what people type into a chat to handle its context."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.tools import CommandAnswer, RunCommand
from tersely.api.rest.services import AppServices
from tersely.domain.chat_commands import is_command, parse_command
from tersely.domain.errors import InvalidRequest
from tersely.service.sessions.compactions import CompactionOptions

router = APIRouter(route_class=GuardedRoute)


@router.post("/sessions/{session_id}/commands", summary="Run a chat command", response_model=CommandAnswer)
async def run_command(services: AppServices, tenant: Tenant, session_id: SessionId, body: RunCommand) -> Response:
    """`/context`, `/undo`, `/message`, `/session scratchpad` or `/config`. The answer is readable text."""
    if not is_command(body.text):
        raise InvalidRequest("text must be a command such as /context", field="text")
    answer = await services.commands.run(tenant, session_id, parse_command(body.text), CompactionOptions())
    return json_response({"text": answer})
