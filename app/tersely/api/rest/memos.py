"""``/api/memos``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tersely.api.rest.guard import GuardedRoute, Tenant
from tersely.api.rest.responses import (
    AS_JSON_LINES,
    json_lines_response,
    json_response,
    page_response,
    write_time,
)
from tersely.api.rest.schemas.common import Limit
from tersely.api.rest.schemas.memory import ForgottenOut, MemoOut, MemoPage, NewMemo, SearchMemos
from tersely.api.rest.services import AppServices
from tersely.domain.memos import Memo
from tersely.service.common.cursors import read_cursor, write_cursor

After = Annotated[str | None, Query(max_length=2000, description="The `next` of the previous page.")]
Everything = Annotated[bool, Query(alias="all", description="All memos, whatever their tags.")]
Tags = Annotated[list[str] | None, Query(alias="tag", description="Memos with any of these tags.")]


router = APIRouter(route_class=GuardedRoute)


@router.post("/memos", status_code=201, summary="Save a memo", response_model=MemoOut)
async def save_memo(services: AppServices, tenant: Tenant, body: NewMemo) -> Response:
    memo = await services.memos.save(tenant, content=body.content, tags=body.tags, session_id=body.session)
    return json_response(_write(memo), 201)


@router.get("/memos", summary="List memos", response_model=MemoPage)
async def list_memos(
    services: AppServices, tenant: Tenant, after: After = None, limit: Limit = 100, tags: Tags = None
) -> Response:
    """Newest first."""
    cursor = None if after is None else read_cursor(after)
    found, following = await services.memos.page(tenant, after=cursor, tags=tags, limit=limit)
    return page_response([_write(memo) for memo in found], None if following is None else write_cursor(*following))


@router.post("/memos/search", summary="Search memos", response_model=MemoPage)
async def search_memos(services: AppServices, tenant: Tenant, body: SearchMemos) -> Response:
    """Search by tags: newest first. Search by a query: best first. Stop words are ignored."""
    found = await services.memos.search(tenant, tags=body.tags, query=body.query, limit=body.limit)
    return page_response([_write(memo) for memo in found], None)


@router.get("/memos/export", summary="Export memos", response_class=Response, responses=AS_JSON_LINES)
async def export_memos(services: AppServices, tenant: Tenant, tags: Tags = None) -> Response:
    """Export all memos, or those with any of the tags, newest first, streamed as JSON lines."""
    return await json_lines_response(_write(memo) async for memo in services.memos.export(tenant, tags=tags))


@router.delete("/memos", summary="Delete memos", response_model=ForgottenOut)
async def delete_memos(
    services: AppServices, tenant: Tenant, *, tags: Tags = None, everything: Everything = False
) -> Response:
    """Delete memos that have any of the given tags, or all memos. One of the two options is required."""
    return json_response({"deleted": await services.memos.forget(tenant, tags=tags, is_all=everything)})


@router.get("/memos/{memo_id}", summary="A memo", response_model=MemoOut)
async def get_memo(services: AppServices, tenant: Tenant, memo_id: str) -> Response:
    return json_response(_write(await services.memos.get(tenant, memo_id)))


@router.delete("/memos/{memo_id}", status_code=204, summary="Delete a memo")
async def delete_memo(services: AppServices, tenant: Tenant, memo_id: str) -> Response:
    await services.memos.delete(tenant, memo_id)
    return Response(status_code=204)


def _write(memo: Memo) -> dict[str, Any]:
    return {
        "id": memo.id,
        "content": memo.content,
        "tags": list(memo.tags),
        "session": memo.session_id,
        "created_at": write_time(memo.created_at),
    }
