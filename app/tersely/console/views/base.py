"""The values that the views of all pages share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from starlette.responses import RedirectResponse, Response

from tersely.console.pages import HEADERS, Pages
from tersely.console.router import PageRequest
from tersely.domain.errors import NotFound, TerselyError
from tersely.service.common.call_board import CallBoard
from tersely.service.common.operations import Operations
from tersely.service.limits.tenants import Tenants
from tersely.service.memos.memos import Memos
from tersely.service.money.prices import Prices
from tersely.service.money.savings import Savings
from tersely.service.replays.replays import MAX_SECONDS, Replays
from tersely.service.search.tenant_search import TenantSearch
from tersely.service.sessions.activity import Activity
from tersely.service.sessions.artifact_removal import ArtifactRemoval
from tersely.service.sessions.artifacts import Artifacts
from tersely.service.sessions.calls import Calls
from tersely.service.sessions.compactions import Compactions
from tersely.service.sessions.comparisons import Comparisons
from tersely.service.sessions.notes import Notes
from tersely.service.sessions.pins import Pins
from tersely.service.sessions.previews import Preview, PreviewRequest, Previews
from tersely.service.sessions.sessions import Sessions
from tersely.service.summaries.daily_memory import DailyMemory

PAGE = 50
"""Rows of a list on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewServices:
    """The use cases that the views read and change. ``lifetime``: seconds that a provider's cache stays warm."""

    sessions: Sessions
    calls: Calls
    comparisons: Comparisons
    activity: Activity
    board: CallBoard
    search: TenantSearch
    savings: Savings
    prices: Prices
    previews: Previews
    compactions: Compactions
    pins: Pins
    notes: Notes
    memos: Memos
    daily_memory: DailyMemory
    tenants: Tenants
    operations: Operations
    artifacts: Artifacts
    artifact_removal: ArtifactRemoval
    replays: Replays
    lifetime: float
    is_guarded: bool


class ViewGroup:
    """Views that share their services and their rendering."""

    def __init__(self, pages: Pages, services: ViewServices) -> None:
        self._pages = pages
        self._services = services

    def _render(self, page: PageRequest, template: str, view: str, **values: Any) -> Response:
        tenant = page.visitor.tenant
        return self._pages.render(
            template, view=view, token=page.visitor.token, now=page.now, tenant=tenant, link=page.link,
            is_guarded=self._services.is_guarded and bool(tenant), is_replay=page.is_replay, replay_seconds=MAX_SECONDS,
            address=str(page.request.base_url).rstrip("/"), **values,
        )  # fmt: skip


async def try_preview(
    of: ViewServices, tenant: str, session_id: str, options: PreviewRequest
) -> tuple[Preview | None, str]:
    """Return a preview, or why there is none. Raises `NotFound`."""
    try:
        return await of.previews.build(tenant, session_id, options), ""
    except NotFound:
        raise
    except TerselyError as error:
        return None, error.detail


def redirect(path: str) -> RedirectResponse:
    """Send the browser to another page after a change."""
    return RedirectResponse(path, status_code=303, headers={**HEADERS, "cache-control": "no-store"})


def replay_of(metadata: bytes) -> dict[str, Any]:
    """Return what a replay's session records about its transcript."""
    try:
        known = json.loads(metadata or b"{}")
    except ValueError:
        return {}
    found = known.get("replay") if isinstance(known, dict) else None
    return found if isinstance(found, dict) else {}
