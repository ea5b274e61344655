"""``/api/tools`` and ``/api/sessions/{id}/tools/{name}``: Tersely's tools for agents that run them themselves."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response, page_response
from tersely.api.rest.schemas.tools import CallTool, ToolAnswer, ToolPage
from tersely.api.rest.services import AppServices
from tersely.domain.tools.catalog import OFFERED_BY_DEFAULT

router = APIRouter(route_class=GuardedRoute)


@router.get("/tools", summary="The tools", response_model=ToolPage)
async def list_tools(services: AppServices) -> Response:
    """The definitions of the tools, and the strategies under which models are offered them in proxied calls."""
    offered = {strategy: {offer.name for offer in services.tools.offers(strategy)} for strategy in OFFERED_BY_DEFAULT}
    items = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strategies": [strategy for strategy, names in offered.items() if tool.name in names],
        }
        for tool in services.tools.catalog
    ]
    return page_response(items, None)


@router.post("/sessions/{session_id}/tools/{name}", summary="Call a tool", response_model=ToolAnswer)
async def call_tool(
    services: AppServices, tenant: Tenant, session_id: SessionId, name: str, body: CallTool
) -> Response:
    """Returns the tool's answer to a model. For invalid arguments the answer names the error (`is_error`)."""
    done = await services.tools.call(tenant, session_id, name, body.arguments)
    return json_response({"text": done.text, "is_error": done.is_error})
