"""The page of calls as they run, and its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from tersely.console.epoch_reasons import explain_epoch
from tersely.console.pages import HEADERS, link
from tersely.console.router import PageRequest
from tersely.console.views.base import ViewGroup
from tersely.domain.errors import StoreUnavailable
from tersely.service.common.auth import while_permitted
from tersely.service.common.call_board import CallNote, RunningCall
from tersely.service.sessions.activity import ActivityItem
from tersely.service.sessions.comparisons import readable
from tersely.store.ops.activity import StoredCall
from tersely.store.ops.calls import CallRow


class LivePages(ViewGroup):
    """Calls under way, by server-sent events."""

    async def show_live(self, page: PageRequest) -> Response:
        """Calls as they run."""
        latest, _ = await self._services.calls.latest(page.tenant, after=None, limit=30)
        running = _running(
            await self._services.activity.running(page.tenant), self._services.board.running(page.tenant)
        )
        overheads = sorted(call.row.overhead_ms for call in latest if call.row.overhead_ms is not None)
        return self._render(
            page, "live.html", "live", latest=latest, running=running, overheads=overheads,
            notes=[_written(note) for note in self._services.board.notes(page.tenant)],
        )  # fmt: skip

    async def stream_live(self, page: PageRequest) -> Response:
        """The events of the live view."""
        headers = {**HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(page), media_type="text/event-stream", headers=headers)

    async def _events(self, page: PageRequest) -> AsyncIterator[bytes]:
        tenant = page.tenant
        yield b"retry: 2000\n\n"
        shown: object = None
        async for found in while_permitted(page.permission, self._services.activity.follow(tenant)):
            for each in found:
                yield b"event: happening\ndata: %b\n\n" % msgspec.json.encode(_event_row(each))
            stored: Sequence[StoredCall] = ()
            with suppress(StoreUnavailable):
                stored = await self._services.activity.running(tenant)
            now = {
                "calls": _running(stored, self._services.board.running(tenant)),
                "notes": [_written(note) for note in self._services.board.notes(tenant)],
            }
            if now != shown:
                shown = now
                yield b"event: running\ndata: %b\n\n" % msgspec.json.encode(now)
            else:
                yield b": quiet\n\n"
            await asyncio.sleep(0)


def _running(stored: Sequence[StoredCall], of_worker: Sequence[RunningCall]) -> list[dict[str, Any]]:
    """Calls under way: those that the database knows, with the state of those that this worker makes, and the rest."""
    states = {call.session_id: call.state for call in of_worker if call.session_id}
    known = {call.session_id for call in stored}
    found: list[dict[str, Any]] = [
        {
            "link": link("session", id=call.session_id),
            "title": readable(call.title or call.session_id),
            "call": call.number,
            "client": call.client or "",
            "state": states.get(call.session_id, "under way"),
            "since": call.created_at,
        }
        for call in stored
    ]
    found += [
        {
            "link": link("session", id=call.session_id) if call.session_id else "",
            "title": call.session_id or "a call that is not stored yet",
            "call": None,
            "client": call.client,
            "state": call.state,
            "since": call.began,
        }
        for call in of_worker
        if call.session_id not in known
    ]
    return found


def _written(note: CallNote) -> dict[str, Any]:
    return {
        "kind": note.kind,
        "at": note.at,
        "text": note.text,
        "link": link("session", id=note.session_id) if note.session_id else "",
    }


def _event_row(happening: ActivityItem) -> dict[str, Any]:
    row = happening.body
    event: dict[str, Any] = {
        "kind": happening.kind,
        "session": happening.session_id,
        "at": happening.at,
        "link": link("session", id=happening.session_id),
    }
    if isinstance(row, CallRow):
        seconds = (row.finished_at - row.created_at).total_seconds() if row.finished_at else None
        hit = row.cached_tokens / row.input_tokens if row.cached_tokens is not None and row.input_tokens else None
        return event | {
            "link": link("session", id=row.session_id, call=row.number),
            "number": row.number,
            "model": row.model,
            "client": row.client,
            "strategy": row.strategy,
            "before": row.tokens_before,
            "after": row.tokens_after,
            "hit": hit,
            "status": row.status,
            "seconds": seconds,
            "overhead": row.overhead_ms,
        }
    reason = row.get("reason") or row.get("result") or ""
    return event | {
        "reason": explain_epoch(reason) if happening.kind == "epoch" else reason,
        "number": row.get("number"),
    }
