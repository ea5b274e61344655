"""The services that REST routes use, and how a handler gets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Request

from tersely.service.limits.tenants import Tenants
from tersely.service.memos.memos import Memos
from tersely.service.money.savings import Savings
from tersely.service.search.queries import Queries
from tersely.service.search.session_search import Searcher
from tersely.service.search.tenant_search import TenantSearch
from tersely.service.sessions.activity import Activity
from tersely.service.sessions.artifact_removal import ArtifactRemoval
from tersely.service.sessions.artifacts import Artifacts
from tersely.service.sessions.calls import Calls
from tersely.service.sessions.commands import Commands
from tersely.service.sessions.compactions import Compactions
from tersely.service.sessions.comparisons import Comparisons
from tersely.service.sessions.event_stream import EventStream
from tersely.service.sessions.exports import Exports
from tersely.service.sessions.messages import Messages
from tersely.service.sessions.notes import Notes
from tersely.service.sessions.pins import Pins
from tersely.service.sessions.previews import Previews
from tersely.service.sessions.sessions import Sessions
from tersely.service.sessions.stats import StatsReader
from tersely.service.sessions.visibility import Visibility
from tersely.service.summaries.daily_memory import DailyMemory
from tersely.service.tools.tools import Tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The use cases behind the routes. ``strategy`` and ``epoch`` are the configured defaults, as configured."""

    sessions: Sessions
    messages: Messages
    pins: Pins
    visibility: Visibility
    exports: Exports
    previews: Previews
    searcher: Searcher
    queries: Queries
    stats: StatsReader
    event_stream: EventStream
    artifacts: Artifacts
    artifact_removal: ArtifactRemoval
    compactions: Compactions
    notes: Notes
    memos: Memos
    daily_memory: DailyMemory
    tools: Tools
    commands: Commands
    calls: Calls
    activity: Activity
    search: TenantSearch
    comparisons: Comparisons
    savings: Savings
    tenants: Tenants
    clock: Callable[[], datetime]
    strategy: str
    epoch: str


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


AppServices = Annotated[Services, Depends(_services)]
