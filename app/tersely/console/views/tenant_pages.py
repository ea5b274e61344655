"""The pages over all sessions of a tenant: the list, savings, search."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import cast, get_args

import msgspec
from starlette.responses import Response

from tersely.console.router import PageRequest
from tersely.console.views.base import PAGE, ViewGroup
from tersely.service.search.tenant_search import SearchMode
from tersely.store.history.session_lists import SessionFilter, Sort
from tersely.store.ops.calls import GroupBy
from tersely.strategies.presets import STRATEGIES

LIVE = timedelta(seconds=60)
PERIODS = {"1": "Today", "7": "7 days", "30": "30 days", "365": "A year"}
SORTS = {"last_call": "Last call", "saved": "Tokens saved", "tokens": "Tokens stored", "created": "Newest"}


class TenantPages(ViewGroup):
    """Pages over all sessions of a tenant."""

    async def list_sessions(self, page: PageRequest) -> Response:
        """Sessions with their figures; filters, order and cursor are in the address."""
        sort = cast("Sort", page.get("sort") if page.get("sort") in SORTS else "last_call")
        parent = page.get("parent") or None
        session_filter = SessionFilter(
            query=page.get("query") or None,
            client=page.get("client") or None,
            model=page.get("model") or None,
            strategy=page.get("strategy") or None,
            since=_since(page.get("days"), page.now),
            parent=parent,
            tops=parent is None and not page.get("query"),
        )
        found, following = await self._services.sessions.page(
            page.tenant, session_filter, sort=sort, after=page.get("after") or None, limit=PAGE
        )
        children = await self._services.sessions.children(page.tenant, [each.session.id for each in found])
        given = {name: page.get(name) for name in ("query", "client", "model", "strategy", "days", "parent")}
        shadows = await self._services.savings.shadows_of(page.tenant, [each.session.id for each in found])
        return self._render(
            page, "sessions.html", "sessions", listed=found, following=following, sort=sort, sorts=SORTS, given=given,
            children=children, strategies=STRATEGIES, periods=PERIODS, live=LIVE, shadows=shadows,
            is_narrowed=any(given.values()),
        )  # fmt: skip

    async def show_children(self, page: PageRequest) -> Response:
        """The subagents of a session, as rows under it."""
        parent = page.get("parent")
        found, _ = await self._services.sessions.page(
            page.tenant, SessionFilter(parent=parent), sort="created", after=None, limit=PAGE
        )
        children = await self._services.sessions.children(page.tenant, [each.session.id for each in found])
        return self._render(page, "children.html", "sessions", listed=found, children=children, live=LIVE, under=parent)

    async def show_savings(self, page: PageRequest) -> Response:
        """Money and tokens by day, model, strategy or client."""
        by = cast("GroupBy", page.get("by") if page.get("by") in get_args(GroupBy) else "day")
        days = page.get("days") if page.get("days") in PERIODS else "30"
        since = _since(days, page.now)
        report = await self._services.savings.report(page.tenant, since=since, by=by)
        daily = report if by == "day" else await self._services.savings.report(page.tenant, since=since, by="day")
        chart = [
            [row.key, row.money.sent if row.money else None, row.money.full if row.money else None, row.tokens_before,
             row.tokens_after]
            for row in daily.rows
        ]  # fmt: skip
        return self._render(
            page, "savings.html", "savings", report=report, by=by, days=days, periods=PERIODS,
            groups=get_args(GroupBy), chart=msgspec.json.encode(chart).decode(),
        )  # fmt: skip

    async def show_search(self, page: PageRequest) -> Response:
        """Messages of all sessions."""
        query = page.get("query").strip()
        mode = cast("SearchMode", page.get("mode") if page.get("mode") in get_args(SearchMode) else "search")
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id) if session_id else None
        found = None
        if query and listed is not None:
            found = await self._services.search.search_session(page.tenant, session_id, query, mode=mode)
        elif query:
            found = await self._services.search.search(page.tenant, query, mode=mode, limit=50)
        places = [
            (passage.session_id, message.seq)
            for passage in (found.passages if found is not None else ())
            for message in passage.messages
            if message.is_hit
        ]
        calls = await self._services.calls.first_with(page.tenant, places)
        return self._render(
            page, "search.html", "sessions" if listed is not None else "search", query=query, mode=mode, found=found,
            mark=_marked, listed=listed, tab="", calls=calls,
        )  # fmt: skip


def _since(days: str, now: datetime) -> datetime | None:
    if days not in PERIODS:
        return None
    start = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return start - timedelta(days=int(days) - 1)


def _marked(text: str, query: str) -> list[tuple[bool, str]]:
    """Split text into pieces, with those that match the query marked."""
    words = sorted({query, *query.split()}, key=len, reverse=True)
    folded = text.lower()
    found: list[tuple[bool, str]] = []
    index = plain = 0
    while index < len(text):
        hit = next((word for word in words if word and folded.startswith(word.lower(), index)), None)
        if hit is None or len(folded) != len(text):
            index += 1
            continue
        found += [(False, text[plain:index]), (True, text[index : index + len(hit)])]
        index = plain = index + len(hit)
    return [*found, (False, text[plain:])]
