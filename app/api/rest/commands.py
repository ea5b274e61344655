"""``/api/sessions/{id}/commands``: what people type into a chat to handle its context."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, printable
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import RunCommand
from app.domain.chat_commands import is_command, parse_command
from app.domain.errors import InvalidRequest
from app.service.commands import Commands
from app.service.compactions import Means


def commands_router(service: Commands, router: APIRouter) -> None:
    """Add the route."""

    @router.post("/sessions/{session_id}/commands", summary="Run a chat command", response_model=schemas.CommandAnswer)
    async def run(tenant: Tenant, session_id: SessionId, body: RunCommand) -> Response:
        """`/context`, `/undo`, `/message`, `/session scratchpad`, `/config`; the answer is text for people."""
        if not is_command(body.text):
            raise InvalidRequest("text must be a command such as /context", field="text")
        return answer({"text": printable(await service.run(tenant, session_id, parse_command(body.text), Means()))})
