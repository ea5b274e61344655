"""``/api/sessions/{id}/compact``, ``clear`` and ``state/rebuild``: hands on a session's context."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from app.api.rest import schemas
from app.api.rest.answers import answer
from app.api.rest.guard import SessionId, Tenant
from app.api.rest.notes import write_state
from app.api.rest.schemas import ChosenSettings
from app.domain.context import Report
from app.service.compactions import Compactions, Means
from app.service.sessions import as_setting
from app.service.summarizer import Compaction


def compactions_router(service: Compactions, router: APIRouter) -> None:
    """Add the routes."""

    @router.post("/sessions/{session_id}/compact", summary="Compact now", response_model=schemas.CompactedOut)
    async def compact(tenant: Tenant, session_id: SessionId, body: ChosenSettings | None = None) -> Response:
        """Cut the context down to its low watermark, as at the end of an epoch, without waiting for one.

        Under `compact` and `trim` everything before the last turn is summarised first, by the configured
        model or, without one, from the text itself. History stays. 409 while the session is being summarised already.
        """
        done = await service.compact(tenant, session_id, _means(body))
        return answer({"summary": _write_summary(done.summary), "report": _write_report(done.report)})

    @router.post("/sessions/{session_id}/clear", summary="Start an empty context", response_model=schemas.ClearedOut)
    async def clear(tenant: Tenant, session_id: SessionId, body: ChosenSettings | None = None) -> Response:
        """Nothing said so far is shown to the model or told of any more, but for pinned messages; search finds it."""
        return answer({"report": _write_report(await service.clear(tenant, session_id, _means(body)))})

    @router.post(
        "/sessions/{session_id}/state/rebuild", summary="Make the state block anew", response_model=schemas.StateOut
    )
    async def rebuild(tenant: Tenant, session_id: SessionId) -> Response:
        """From everything in the current window, by the configured model or, without one, from the text itself."""
        return answer(write_state(await service.rebuild_state(tenant, session_id, Means())))


def _means(body: ChosenSettings | None) -> Means:
    if body is None:
        return Means()
    return Means(strategy=as_setting(body.strategy), epoch=as_setting(body.epoch))


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
