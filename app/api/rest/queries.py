"""``/api/sessions/{id}/query``: the agent's own SQL."""

from __future__ import annotations

from fastapi import APIRouter, Response

from app.api.rest import schemas
from app.api.rest.answers import answer
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import RunQuery
from app.service.queries import Queries


def queries_router(service: Queries, router: APIRouter) -> None:
    """Add the route."""

    @router.post("/sessions/{session_id}/query", summary="Query a session with SQL", response_model=schemas.QueryOut)
    async def query(tenant: Tenant, session_id: SessionId, body: RunQuery) -> Response:
        """`query_db`: one SELECT in SQLite's dialect over the session's own messages, read-only.

        `messages(id, turn, role, kind, status, content, tool_name, created_at, tokens)`: `id` is the sequence number,
        `turn` a number (0: the current instructions), `kind` one of `text`, `tool_call`, `tool_result`, `media`,
        `reasoning`, `status` is `live`, or `dropped` for what was dropped, undone or superseded, `created_at` UTC. A
        query may take 2 seconds; an answer holds at most 200 rows and 256 KiB, a value 64 KiB; `notes` say what was
        left out. 422 says what is wrong with the SQL.
        """
        result = await service.run(tenant, session_id, body.sql)
        return answer(
            {"columns": result.columns, "rows": result.rows, "truncated": result.truncated, "notes": result.notes}
        )
