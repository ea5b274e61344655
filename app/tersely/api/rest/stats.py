"""``/api/sessions/{id}/stats`` and ``events``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from tersely.api.rest.guard import GuardedRoute, Permission, SessionId, Tenant
from tersely.api.rest.responses import AS_EVENTS, EVENT_STREAM, json_response, page_response, write_json, write_time
from tersely.api.rest.schemas.common import Limit
from tersely.api.rest.schemas.stats import EventPage, StatsOut
from tersely.api.rest.services import AppServices
from tersely.api.rest.sessions import write_money, write_shadow
from tersely.domain.history.turns import write_turn_id
from tersely.service.common.auth import while_permitted
from tersely.service.sessions.event_stream import Cursor, StreamItem
from tersely.service.sessions.stats import Stats, TieredFigures
from tersely.store.ops.events import Event
from tersely.store.ops.stats import EpochRow

After = Annotated[str, Query(max_length=40, description="The `next` of the previous page, or the id of an event.")]
LastEventId = Annotated[
    str | None, Header(description="With server-sent events: continue after the event with this id.")
]
# After this number of polls without news a comment is sent, so that proxies do not close the stream.
QUIET_LOOKS = 15


router = APIRouter(route_class=GuardedRoute)


@router.get("/sessions/{session_id}/stats", summary="Statistics of a session", response_model=StatsOut)
async def get_session_stats(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    """Counts of stored messages, sent tokens, tokens that the provider reported, and savings."""
    return json_response(_write(await services.stats.stats(tenant, session_id)))


@router.get(
    "/sessions/{session_id}/events",
    summary="Events of a session",
    response_model=EventPage,
    responses=AS_EVENTS,
)
async def list_session_events(
    services: AppServices,
    tenant: Tenant,
    session_id: SessionId,
    permission: Permission,
    after: After = "0",
    limit: Limit = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: LastEventId = None,
) -> Response:
    """Events in order: started epochs with their reason and savings, and compactions at their start and end with their
    result.

    With `Accept: text/event-stream`: server-sent events, which continue as events happen. An event's name is its
    `type`; its data is the same JSON as in the list. `after` or `Last-Event-ID` sets the starting point.
    """
    if EVENT_STREAM not in accept.lower():
        found = await services.event_stream.poll(tenant, session_id, Cursor.read(after, field="after"), limit=limit + 1)
        following = found[limit - 1][1].write() if len(found) > limit else None
        return page_response([_write_item(each) for each, _ in found[:limit]], following)
    cursor = Cursor.read(*((after, "after") if last_event_id is None else (last_event_id, "Last-Event-ID")))
    await services.event_stream.poll(tenant, session_id, cursor)
    batches = while_permitted(permission, services.event_stream.follow(tenant, session_id, cursor))
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(write_stream(batches), media_type=EVENT_STREAM, headers=headers)


async def write_stream(batches: AsyncIterator[list[StreamItem]]) -> AsyncIterator[bytes]:
    """Yield server-sent events, and a comment now and then where nothing happens."""
    quiet = 0
    async for found in batches:
        for each, cursor in found:
            data = _write_item(each)
            yield b"id: %b\nevent: %b\ndata: %b\n\n" % (
                cursor.write().encode(),
                data["type"].encode(),
                write_json(data),
            )
        # The first poll is answered at once, so that the client sees that the stream is open.
        if not found and quiet % QUIET_LOOKS == 0:
            yield b": quiet\n\n"
        quiet = 0 if found else quiet + 1


def _write(stats: Stats) -> dict[str, Any]:
    session, calls, compression = stats.session, stats.calls, stats.compression
    return {
        "messages": session.last_seq,
        "messages_by_status": stats.messages,
        "turns": session.turns,
        "tokens": session.tokens,
        "live_tokens": stats.live_tokens,
        "calls": calls.calls,
        "failed_calls": calls.failed,
        "tokens_before": calls.tokens_before,
        "tokens_after": calls.tokens_after,
        "saved": stats.saved,
        "saved_share": stats.saved_share,
        "reported": {"input": calls.input, "cached": calls.cached, "output": calls.output},
        "cache_hit_share": stats.cache_hit_share,
        "epochs": {"total": sum(stats.epochs.values()), "current": session.epoch, "by_reason": stats.epochs},
        "terse": stats.terse,
        "summaries": {
            "total": compression.summaries,
            "compression_ratio": compression.ratio,
            "last_at": None if compression.last_at is None else write_time(compression.last_at),
            **_write_costs(stats),
        },
        "money": None if stats.call_costs is None else write_money(*stats.call_costs),
        "shadow": None if stats.shadow is None else write_shadow(stats.shadow[1], stats.shadow[0]),
        "tiered": None if stats.tiered is None else _write_tiered(stats.tiered),
    }


def _write_costs(stats: Stats) -> dict[str, Any]:
    costs, today = stats.summary_costs, stats.summary_costs_today
    calls, tokens = stats.limits
    return {
        "calls": costs.calls,
        "input_tokens": costs.input_tokens,
        "output_tokens": costs.output_tokens,
        "money": None if stats.money is None else {"currency": "USD", "sent": round(stats.money, 6)},
        "today": {
            "calls": today.calls,
            "tokens": today.tokens,
            "max_calls": calls or None,
            "max_tokens": tokens or None,
            "refused": today.refused,
        },
    }


def _write_tiered(tiered: TieredFigures) -> dict[str, Any]:
    return {
        "tokens": tiered.tokens,
        "budget": tiered.budget,
        "share": tiered.tokens / tiered.budget,
        "levels": tiered.levels,
        "retrieved": [write_turn_id(turn) for turn in tiered.retrieved],
    }


def _write_item(item: EpochRow | Event) -> dict[str, Any]:
    return _write_epoch(item) if isinstance(item, EpochRow) else _write_event(item)


def _write_epoch(row: EpochRow) -> dict[str, Any]:
    return {
        "type": "epoch",
        "number": row.number,
        "reason": row.reason,
        "cut": row.cut,
        "head_tokens": row.head_tokens,
        "tokens_before": row.tokens_before,
        "tokens_after": row.tokens_after,
        "created_at": write_time(row.created_at),
    }


def _write_event(event: Event) -> dict[str, Any]:
    return {**event.body, "type": event.kind, "number": event.number, "created_at": write_time(event.created_at)}
