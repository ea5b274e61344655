"""``/api/sessions/{id}/query``: the agent's own SQL."""

from __future__ import annotations

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.search import QueryOut, RunQuery
from tersely.api.rest.services import AppServices

router = APIRouter(route_class=GuardedRoute)


@router.post("/sessions/{session_id}/query", summary="Query a session with SQL", response_model=QueryOut)
async def query_session(services: AppServices, tenant: Tenant, session_id: SessionId, body: RunQuery) -> Response:
    """Run `query_db`: one read-only SELECT in SQLite's dialect over the session's own messages.

    `messages(id, turn, role, kind, status, content, tool_name, created_at, tokens)`: `id` is the sequence number.
    `turn` is a number (0: the current instructions). `kind` is one of `text`, `tool_call`, `tool_result`, `media`,
    `reasoning`. `status` is `live`, or `dropped` for dropped, undone and superseded messages. `created_at` is in UTC. A
    query may take 2 seconds. An answer holds at most 200 rows and 256 KiB, a value 64 KiB; `notes` name what was left
    out. 422 with SQLite's explanation for invalid SQL.
    """
    result = await services.queries.run(tenant, session_id, body.sql)
    return json_response(
        {"columns": result.columns, "rows": result.rows, "truncated": result.truncated, "notes": result.notes}
    )
