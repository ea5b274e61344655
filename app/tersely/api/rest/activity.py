"""``/api/events`` and ``/api/search``: over all sessions of the tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Response
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field

from tersely.api.rest.calls import write_call
from tersely.api.rest.guard import GuardedRoute, Permission, Tenant
from tersely.api.rest.responses import AS_EVENTS, EVENT_STREAM, json_response, page_response, write_json, write_time
from tersely.api.rest.schemas.common import Body, Limit, Since
from tersely.api.rest.schemas.search import HitsOut
from tersely.api.rest.schemas.stats import TenantEventPage
from tersely.api.rest.services import AppServices
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.turns import write_turn_id
from tersely.service.common.auth import while_permitted
from tersely.service.search.tenant_search import Passage, PassageMessage
from tersely.service.sessions.activity import ActivityItem
from tersely.service.sessions.call_infos import info
from tersely.store.ops.calls import CallRow

QUIET_LOOKS = 15


class SearchSessions(Body):
    """A search in all sessions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "empty customer id", "mode": "relevant"}]})

    query: str = Field(min_length=1, max_length=2000)
    mode: Literal["search", "relevant"] = "search"
    limit: int = Field(20, ge=1, le=200)


router = APIRouter(route_class=GuardedRoute)


@router.get(
    "/events",
    summary="Events of all sessions",
    response_model=TenantEventPage,
    responses=AS_EVENTS,
)
async def list_events(
    services: AppServices,
    tenant: Tenant,
    permission: Permission,
    since: Since = None,
    limit: Limit = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> Response:
    """Finished calls, started epochs and compactions of all sessions, in order of time.

    With `Accept: text/event-stream`: server-sent events, which continue as events happen.
    """
    if since is not None and since.tzinfo is None:
        raise InvalidRequest("since must have a time zone, such as 2026-01-31T00:00:00Z", field="since")
    if EVENT_STREAM in accept.lower():
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        batches = while_permitted(permission, services.activity.follow(tenant, since))
        return StreamingResponse(_stream(batches), media_type=EVENT_STREAM, headers=headers)
    if since is None:
        raise InvalidRequest("since is needed, unless the answer is a stream of events", field="since")
    return page_response(
        [write_happening(each) for each in await services.activity.since(tenant, since, limit=limit)], None
    )


@router.post("/search", summary="Search all sessions", response_model=HitsOut)
async def search_sessions(services: AppServices, tenant: Tenant, body: SearchSessions) -> Response:
    """Matching messages of all sessions, most recently called session first, each with its neighbours. `searched`: the
    number of sessions that were searched. `is_whole`: whether these are all sessions.
    """
    hits = await services.search.search(tenant, body.query, mode=body.mode, limit=body.limit)
    return json_response(
        {
            "hits": [hit for passage in hits.passages for hit in _write_hits(passage)],
            "searched": hits.searched,
            "is_whole": hits.is_whole,
        }
    )


def _write_hits(passage: Passage) -> Iterator[dict[str, Any]]:
    for before, message, after in zip(
        (None, *passage.messages), passage.messages, (*passage.messages[1:], None), strict=False
    ):
        if message.is_hit:
            yield {
                "session": passage.session_id,
                "title": passage.title,
                **_write_found(message),
                "before": None if before is None else _write_found(before),
                "after": None if after is None else _write_found(after),
            }


def _write_found(message: PassageMessage) -> dict[str, Any]:
    return {
        "seq": message.seq,
        "turn": write_turn_id(message.turn) if message.turn else None,
        "role": message.role,
        "excerpt": message.excerpt,
    }


def write_happening(happening: ActivityItem) -> dict[str, Any]:
    """Return an event as JSON members."""
    data = happening.body
    if isinstance(data, CallRow):
        return {"type": "call", **write_call(info(data))}
    return {**data, "session": happening.session_id, "created_at": write_time(happening.at)}


async def _stream(batches: AsyncIterator[list[ActivityItem]]) -> AsyncIterator[bytes]:
    quiet = 0
    async for found in batches:
        for each in found:
            data = write_happening(each)
            yield b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), write_json(data))
        if not found and quiet % QUIET_LOOKS == 0:
            yield b": quiet\n\n"
        quiet = 0 if found else quiet + 1
