"""``/api/tools`` and ``/api/sessions/{id}/tools/{name}``: Tersely's tools for agents that run them themselves."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, page
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import CallTool
from app.domain.tool_catalog import OFFERED
from app.service.tools import Tools


def tools_router(service: Tools, router: APIRouter) -> None:
    """Add the routes."""

    @router.get("/tools", summary="The tools", response_model=schemas.ToolPage)
    async def listed(tenant: Tenant) -> Response:
        """Their definitions, and the strategies under which models are offered them in proxied chats."""
        del tenant
        offered = {strategy: {offer.name for offer in service.offers(strategy)} for strategy in OFFERED}
        items = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strategies": [strategy for strategy, names in offered.items() if tool.name in names],
            }
            for tool in service.catalog
        ]
        return page(items, None)

    @router.post("/sessions/{session_id}/tools/{name}", summary="Call a tool", response_model=schemas.ToolAnswer)
    async def call(tenant: Tenant, session_id: SessionId, name: str, body: CallTool) -> Response:
        """What the tool says to a model. With arguments that cannot be used it says what is wrong (`is_error`)."""
        done = await service.call(tenant, session_id, name, body.arguments)
        return answer({"text": done.text, "is_error": done.is_error})
