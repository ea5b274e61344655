"""``/api/memos``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from app.api.rest import schemas
from app.api.rest.answers import AS_JSON_LINES, answer, json_lines, moment, page, printable
from app.api.rest.guard import Tenant
from app.api.rest.schemas import Limit, NewMemo, SearchMemos
from app.domain.memos import Memo
from app.service.cursors import read_cursor, write_cursor
from app.service.memos import Memos

After = Annotated[str | None, Query(max_length=2000, description="The `next` of the page before.")]
Everything = Annotated[bool, Query(alias="all", description="All memos, whatever their tags.")]
Tags = Annotated[list[str] | None, Query(alias="tag", description="Memos with any of these tags.")]


def memos_router(service: Memos, router: APIRouter) -> None:
    """Add the routes."""

    @router.post("/memos", status_code=201, summary="Save a memo", response_model=schemas.MemoOut)
    async def save(tenant: Tenant, body: NewMemo) -> Response:
        memo = await service.save(tenant, content=body.content, tags=body.tags, session_id=body.session)
        return answer(_write(memo), 201)

    @router.get("/memos", summary="List memos", response_model=schemas.MemoPage)
    async def listed(tenant: Tenant, after: After = None, limit: Limit = 100, tags: Tags = None) -> Response:
        """The newest first."""
        place = None if after is None else read_cursor(after)
        found, following = await service.page(tenant, after=place, tags=tags, limit=limit)
        return page([_write(memo) for memo in found], None if following is None else write_cursor(*following))

    @router.post("/memos/search", summary="Search memos", response_model=schemas.MemoPage)
    async def search(tenant: Tenant, body: SearchMemos) -> Response:
        """By tags, the newest first; with a query, the best first. Stop words find nothing."""
        found = await service.search(tenant, tags=body.tags, query=body.query, limit=body.limit)
        return page([_write(memo) for memo in found], None)

    @router.get("/memos/export", summary="Export memos", response_class=Response, responses=AS_JSON_LINES)
    async def export(tenant: Tenant, tags: Tags = None) -> Response:
        """All of them, or those with any of the tags, the newest first, streamed as JSON lines."""
        return await json_lines(_write(memo) async for memo in service.export(tenant, tags=tags))

    @router.delete("/memos", summary="Delete memos", response_model=schemas.ForgottenOut)
    async def forget(tenant: Tenant, *, tags: Tags = None, everything: Everything = False) -> Response:
        """Those with any of the tags, or all of them; one of both must be said."""
        return answer({"deleted": await service.forget(tenant, tags=tags, everything=everything)})

    @router.get("/memos/{memo_id}", summary="A memo", response_model=schemas.MemoOut)
    async def get(tenant: Tenant, memo_id: str) -> Response:
        return answer(_write(await service.get(tenant, memo_id)))

    @router.delete("/memos/{memo_id}", status_code=204, summary="Delete a memo")
    async def delete(tenant: Tenant, memo_id: str) -> Response:
        await service.delete(tenant, memo_id)
        return Response(status_code=204)


def _write(memo: Memo) -> dict[str, Any]:
    return {
        "id": memo.id,
        "content": printable(memo.content),
        "tags": list(memo.tags),
        "session": memo.session_id,
        "created_at": moment(memo.created_at),
    }
