"""``/api/sessions/{id}/compact``, ``clear`` and ``state/rebuild``: hands on a session's context."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.notes import write_state
from tersely.api.rest.responses import json_response
from tersely.api.rest.schemas.contexts import ChosenSettings, ClearedOut, CompactedOut
from tersely.api.rest.schemas.notes import StateOut
from tersely.api.rest.services import AppServices
from tersely.domain.history.context import Report
from tersely.service.sessions.compactions import CompactionOptions
from tersely.service.sessions.sessions import as_setting
from tersely.service.summaries.summarizer import Compaction

router = APIRouter(route_class=GuardedRoute)


@router.post("/sessions/{session_id}/compact", summary="Compact now", response_model=CompactedOut)
async def compact_session(
    services: AppServices, tenant: Tenant, session_id: SessionId, body: ChosenSettings | None = None
) -> Response:
    """Cut the context down to its low watermark, as at the end of an epoch, without waiting for one.

    Under `compact` and `trim` everything before the last turn is summarised first, by the configured
    model or, without one, from the text itself. History stays. 409 while the session is being summarised already.
    """
    done = await services.compactions.compact(tenant, session_id, _means(body))
    return json_response({"summary": _write_summary(done.summary), "report": _write_report(done.report)})


@router.post("/sessions/{session_id}/clear", summary="Start an empty context", response_model=ClearedOut)
async def clear_session(
    services: AppServices, tenant: Tenant, session_id: SessionId, body: ChosenSettings | None = None
) -> Response:
    """Start an empty context. The model no longer sees earlier messages, except pinned ones; a search still
    finds them.
    """
    return json_response({"report": _write_report(await services.compactions.clear(tenant, session_id, _means(body)))})


@router.post("/sessions/{session_id}/state/rebuild", summary="Make the state block anew", response_model=StateOut)
async def rebuild_state(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    """Write the state block from everything in the current window, with the configured model.

    An existing block is only replaced by one that a model wrote. Without a model, or if it fails, the answer is 409
    with advice, and the block stays. A first block may be extracted from the text without a model; 409 if the text
    names no goal.
    """
    return json_response(write_state(await services.compactions.rebuild_state(tenant, session_id, CompactionOptions())))


def _means(body: ChosenSettings | None) -> CompactionOptions:
    if body is None:
        return CompactionOptions()
    return CompactionOptions(strategy=as_setting(body.strategy), epoch=as_setting(body.epoch))


def _write_summary(done: Compaction | None) -> dict[str, Any] | None:
    if done is None:
        return None
    made = done.summary
    return {
        "result": done.result,
        "first_seq": made.first_seq if made else None,
        "last_seq": made.last_seq if made else None,
        "tokens_before": done.tokens_before,
        "tokens_after": done.tokens_after,
        "error": done.error or None,
    }


def _write_report(report: Report) -> dict[str, Any]:
    return {
        "tokens_before": report.tokens_before,
        "tokens_after": report.tokens_after,
        "epoch": {"number": report.epoch, "reason": report.reason, "cut": report.cut},
        "layers": [{"name": layer.name, "tokens": layer.tokens} for layer in report.layers],
    }
