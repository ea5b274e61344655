"""``/api/sessions``: sessions and their turns."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from tersely.api.rest.guard import GuardedRoute, SessionId, Tenant
from tersely.api.rest.responses import json_response, page_response, raw_value, write_time
from tersely.api.rest.schemas.common import Limit, Since
from tersely.api.rest.schemas.sessions import CreateSession, PatchSession, SessionOut, SessionPage
from tersely.api.rest.services import AppServices, Services
from tersely.domain.errors import InvalidRequest
from tersely.domain.history.sessions import Session
from tersely.domain.text.encodable import encodable
from tersely.service.sessions.sessions import UNSET, SessionChange
from tersely.store.history.session_lists import ListedSession, SessionFilter, Sort
from tersely.store.ops.shadows import ShadowSums

LIVE = timedelta(seconds=60)
"""A session whose last call began less long ago is live."""
Text = Annotated[str | None, Query(max_length=2000)]


router = APIRouter(route_class=GuardedRoute)


@router.post("/sessions", status_code=201, summary="Create a session", response_model=SessionOut)
async def create_session(services: AppServices, tenant: Tenant, body: CreateSession) -> Response:
    """Create an empty session. 409 if the id is taken."""
    given = SessionChange(strategy=body.strategy, epoch=body.epoch, metadata=body.metadata)
    session = await services.sessions.create(tenant, session_id=body.id, parent=body.parent, given=given)
    return json_response(await _write_whole(services, tenant, session.id), 201)


@router.get("/sessions", summary="List sessions", response_model=SessionPage)
async def list_sessions(
    services: AppServices,
    tenant: Tenant,
    after: Text = None,
    limit: Limit = 100,
    parent: Text = None,
    client_id: Text = None,
    query: Text = None,
    client: Text = None,
    model: Text = None,
    strategy: Text = None,
    since: Since = None,
    sort: Sort = "created",
) -> Response:
    """Sessions with their statistics, newest first or in another order, filtered.

    `query` searches in titles. `since`: only sessions that were called at or after this time.
    """
    if since is not None and since.tzinfo is None:
        raise InvalidRequest("since must have a time zone, such as 2026-01-31T00:00:00Z", field="since")
    session_filter = SessionFilter(
        parent=_plain(parent), client_id=_plain(client_id), query=_plain(query), client=_plain(client),
        model=_plain(model), strategy=_plain(strategy), since=since,
    )  # fmt: skip
    found, following = await services.sessions.page(tenant, session_filter, sort=sort, after=after, limit=limit)
    return page_response([_write_listed(services, each) for each in found], following)


@router.get("/sessions/{session_id}", summary="A session", response_model=SessionOut)
async def get_session(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    return json_response(await _write_whole(services, tenant, session_id))


@router.patch("/sessions/{session_id}", summary="Configure a session", response_model=SessionOut)
async def update_session(services: AppServices, tenant: Tenant, session_id: SessionId, body: PatchSession) -> Response:
    """Change strategy, epoch policy or metadata. The change takes effect at the next context."""
    given = {name: getattr(body, name) if name in body.model_fields_set else UNSET for name in SessionChange.__slots__}
    await services.sessions.change(tenant, session_id, SessionChange(**given))
    return json_response(await _write_whole(services, tenant, session_id))


@router.delete("/sessions/{session_id}", status_code=204, summary="Delete a session with all of its data")
async def delete_session(services: AppServices, tenant: Tenant, session_id: SessionId) -> Response:
    await services.sessions.delete(tenant, session_id)
    return Response(status_code=204)


async def _write_whole(services: Services, tenant: str, session_id: str) -> dict[str, Any]:
    return _write_listed(services, await services.sessions.figures(tenant, session_id))


def _write_listed(services: Services, listed: ListedSession) -> dict[str, Any]:
    return {**write_session(services, listed.session), **write_figures(listed, services.clock())}


def write_figures(listed: ListedSession, now: datetime) -> dict[str, Any]:
    """Return the sums over a session's calls as JSON members."""
    session = listed.session
    last = session.last_call_at
    return {
        "title": listed.title,
        "client": listed.client,
        "models": listed.models,
        "host": listed.host,
        "calls": session.calls,
        "tokens_saved": listed.tokens_saved,
        "reported": {"input": listed.input_tokens, "cached": listed.cached_tokens, "output": listed.output_tokens},
        "cache_hit_share": listed.cached_tokens / listed.input_tokens if listed.input_tokens else None,
        "money": write_money(listed.cost_sent, listed.cost_full) if listed.priced_calls else None,
        "last_call_at": None if last is None else write_time(last),
        "live": last is not None and now - last < LIVE,
    }


def write_money(sent: float, full: float) -> dict[str, Any]:
    """Return costs as JSON members."""
    return {"currency": "USD", "sent": round(sent, 6), "full": round(full, 6), "saved": round(full - sent, 6)}


def write_shadow(sums: ShadowSums, strategy: str | None = None) -> dict[str, Any]:
    """Return what a strategy that was tried out would have sent, as JSON members."""
    return {
        "strategy": strategy,
        "calls": sums.calls,
        "tokens": sums.tokens,
        "cached_tokens": sums.cached_tokens,
        "full_tokens": sums.full_tokens,
        "full_cached": sums.full_cached,
        "relative_price": None if sums.relative_price is None else round(sums.relative_price, 4),
        "missing_calls": sums.missing_calls,
        "references": {
            "referring": sums.referring,
            "lost": sums.lost,
            "pointing": sums.pointing,
            "lost_pointing": sums.lost_pointing,
        },
        "edits": {"calls": sums.edits, "ready": sums.ready, "full_ready": sums.full_ready},
        "money": {"currency": "USD", "shadow": round(sums.cost, 6), "sent": round(sums.full_cost, 6)}
        if sums.priced_calls
        else None,
        "text": sums.describe("this session"),
    }


def _plain(text: str | None) -> str | None:
    """Return text that the database accepts; None for an empty one."""
    return encodable(text.replace("\0", "\ufffd")) if text else None


def write_session(services: Services, session: Session) -> dict[str, Any]:
    """Return a session as JSON members. Unset settings show the configured defaults."""
    return {
        "id": session.id,
        "parent": session.parent,
        "client_id": session.client_id,
        "strategy": _setting(session.strategy or session.last_strategy or services.strategy),
        "epoch": _setting(session.epoch_policy or session.last_epoch_policy or services.epoch),
        "last_call_strategy": session.last_strategy and _setting(session.last_strategy),
        "last_call_epoch": session.last_epoch_policy and _setting(session.last_epoch_policy),
        "metadata": raw_value(session.metadata),
        "turns": session.turns,
        "messages": session.last_seq,
        "tokens": session.tokens,
        "created_at": write_time(session.created_at),
        "updated_at": write_time(session.updated_at),
    }


def _setting(text: str) -> Any:
    """Return a setting as it was given: a name, or an object."""
    return json.loads(text) if text.lstrip().startswith("{") else text
