"""``/api/sessions/{id}/stats`` and ``events``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from app.api.rest import schemas
from app.api.rest.answers import answer, moment, page
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.schemas import MAX_TURN, Limit
from app.service.stats import Figures, Stats
from app.store.stats import EpochRow

After = Annotated[int, Query(ge=0, le=MAX_TURN, description="An epoch's number; the page starts behind it.")]


def figures_router(service: Figures, router: APIRouter) -> None:
    """Add the routes."""

    @router.get("/sessions/{session_id}/stats", summary="Figures of a session", response_model=schemas.StatsOut)
    async def stats(tenant: Tenant, session_id: SessionId) -> Response:
        """What is stored, what was sent, what the provider reported, what was saved."""
        return answer(_write(await service.stats(tenant, session_id)))

    @router.get("/sessions/{session_id}/events", summary="Events of a session", response_model=schemas.EventPage)
    async def events(tenant: Tenant, session_id: SessionId, after: After = 0, limit: Limit = 100) -> Response:
        """The epochs that started, in order, with the reason and what each spared."""
        found, following = await service.epochs(tenant, session_id, after=after, limit=limit)
        return page([_write_epoch(row) for row in found], following)


def _write(stats: Stats) -> dict[str, Any]:
    session, calls = stats.session, stats.calls
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
    }


def _write_epoch(row: EpochRow) -> dict[str, Any]:
    return {
        "type": "epoch",
        "number": row.number,
        "reason": row.reason,
        "cut": row.cut,
        "head_tokens": row.head_tokens,
        "tokens_before": row.tokens_before,
        "tokens_after": row.tokens_after,
        "created_at": moment(row.created_at),
    }
