"""``/api/sessions/{id}/calls``, ``epochs``, ``/api/calls`` and ``/api/savings``: what was sent and what it cost."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response, page_response, raw_value, write_time
from tersely.api.rest.schemas.calls import CallContextOut, CallOut, CallPage, EpochPage, SavingsOut
from tersely.api.rest.schemas.common import Limit, Since
from tersely.api.rest.services import AppServices
from tersely.api.rest.sessions import write_money, write_shadow
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.turns import write_turn_id
from tersely.service.money.savings import SavingsRow
from tersely.service.sessions.call_infos import CallInfo
from tersely.service.sessions.calls import RecordedContext
from tersely.store.ops.calls import GroupBy
from tersely.store.ops.stats import EpochRow

After = Annotated[int, Query(ge=0, lt=2**31, description="The `next` of the previous page.")]
Cursor = Annotated[str | None, Query(max_length=2000, description="The `next` of the previous page.")]
Number = Annotated[int, Path(ge=1, lt=2**62)]


router = APIRouter(route_class=GuardedRoute)


@router.get("/sessions/{session_id}/calls", summary="Calls of a session", response_model=CallPage)
async def list_session_calls(
    services: AppServices, tenant: Tenant, session_id: SessionId, after: After = 0, limit: Limit = 100
) -> Response:
    """List the upstream calls of a session in order: sent tokens, tokens that the provider reported, cost."""
    found, following = await services.calls.page(tenant, session_id, after=after, limit=limit)
    return page_response([write_call(call) for call in found], following)


@router.get("/sessions/{session_id}/calls/{number}", summary="A call", response_model=CallOut)
async def get_call(services: AppServices, tenant: Tenant, session_id: SessionId, number: Number) -> Response:
    return json_response(write_call(await services.calls.get(tenant, session_id, number)))


@router.get(
    "/sessions/{session_id}/calls/{number}/context",
    summary="What a call sent",
    response_model=CallContextOut,
)
async def get_call_context(services: AppServices, tenant: Tenant, session_id: SessionId, number: Number) -> Response:
    """The messages and tools that were sent to the model, byte for byte, and for each stored message whether it was
    kept, shortened or left out.
    """
    context = await services.calls.context(tenant, session_id, number)
    return await asyncio.to_thread(lambda: json_response(_write_context(context)))


@router.get("/sessions/{session_id}/epochs", summary="Epochs of a session", response_model=EpochPage)
async def list_epochs(
    services: AppServices, tenant: Tenant, session_id: SessionId, after: After = 0, limit: Limit = 100
) -> Response:
    """Each epoch in order, with the reason for its start."""
    found, following = await services.calls.epochs(tenant, session_id, after=after, limit=limit)
    return page_response([_write_epoch(row) for row in found], following)


@router.get("/calls", summary="Latest calls", response_model=CallPage)
async def list_calls(services: AppServices, tenant: Tenant, after: Cursor = None, limit: Limit = 100) -> Response:
    """The latest calls of all sessions, newest first."""
    found, following = await services.calls.latest(tenant, after=after, limit=limit)
    return page_response([write_call(call) for call in found], following)


@router.get("/savings", summary="Savings", response_model=SavingsOut)
async def get_savings(
    services: AppServices, tenant: Tenant, since: Since = None, until: Since = None, by: GroupBy = "day"
) -> Response:
    """Tokens and money: as sent, as the full history with a perfect cache would have cost, and the difference.

    Without `since`, the last 30 days.
    """
    for name, at in (("since", since), ("until", until)):
        if at is not None and at.tzinfo is None:
            raise InvalidRequest(f"{name} must have a time zone, such as 2026-01-31T00:00:00Z", field=name)
    report = await services.savings.report(tenant, since=since, until=until, by=by)
    return json_response(
        {
            "since": write_time(report.since),
            "until": write_time(report.until),
            "by": report.by,
            "items": [write_savings(row) for row in report.rows],
            "total": write_savings(report.total),
        }
    )


def write_call(call: CallInfo) -> dict[str, Any]:
    """A call as it is answered."""
    row = call.row
    is_priced = row.cost_sent is not None and row.cost_full is not None
    return {
        "session": row.session_id,
        "number": row.number,
        "turn": write_turn_id(row.turn) if row.turn else None,
        "model": row.model,
        "client": row.client,
        "host": row.host,
        "strategy": row.strategy,
        "epoch": row.epoch,
        "cut": row.cut,
        "tokens_before": row.tokens_before,
        "tokens_after": row.tokens_after,
        "input_tokens": row.input_tokens,
        "cached_tokens": row.cached_tokens,
        "output_tokens": row.output_tokens,
        "money": write_money(row.cost_sent or 0.0, row.cost_full or 0.0) if is_priced else None,
        "overhead_ms": None if row.overhead_ms is None else round(row.overhead_ms, 2),
        "status": row.status,
        "created_at": write_time(row.created_at),
        "finished_at": None if row.finished_at is None else write_time(row.finished_at),
        "request_id": row.request_id,
        "layers": call.layers,
    }


def write_savings(row: SavingsRow) -> dict[str, Any]:
    """Sums as they are answered."""
    strategies = list(row.shadows)
    shadow = None if row.shadow is None else write_shadow(row.shadow, strategies[0] if len(strategies) == 1 else None)
    return {
        "key": row.key,
        "calls": row.calls,
        "tokens_before": row.tokens_before,
        "tokens_after": row.tokens_after,
        "tokens_saved": max(0, row.tokens_before - row.tokens_after),
        "reported": {"input": row.input_tokens, "cached": row.cached_tokens, "output": row.output_tokens},
        "priced_calls": row.priced_calls,
        "summary_calls": row.summary_calls,
        "summary_tokens": row.summary_tokens,
        "money": None if row.money is None else write_money(row.money.sent, row.money.full),
        "shadow": None if shadow is None else {**shadow, "text": row.describe_shadows()},
    }


def _write_context(context: RecordedContext) -> dict[str, Any]:
    return {
        "call": write_call(context.call),
        "dialect": context.dialect,
        "exact": context.messages is not None,
        "reason": context.reason,
        "messages": None if context.messages is None else [raw_value(raw) for raw in context.messages],
        "instructions": raw_value(context.instructions),
        "tools": None if context.tools.raw is None else raw_value(context.tools.raw or b"[]"),
        "own_tools": context.tools.own,
        "tools_reason": context.tools.reason,
        "rounds": context.rounds,
        "lines": [
            {
                "seq": line.seq,
                "turn": write_turn_id(line.turn) if line.turn else None,
                "role": line.role,
                "kept": line.kept,
                "reason": line.reason,
                "tokens": line.tokens,
                "index": line.index,
                "layer": line.layer,
            }
            for line in context.lines
        ],
    }


def _write_epoch(row: EpochRow) -> dict[str, Any]:
    return {
        "number": row.number,
        "cut": row.cut,
        "reason": row.reason,
        "head_tokens": row.head_tokens,
        "tokens_before": row.tokens_before,
        "tokens_after": row.tokens_after,
        "created_at": write_time(row.created_at),
    }
