"""The pages of one session: its calls beside the contexts that were sent, cache, savings, tools, artifacts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from starlette.responses import Response

from tersely.console.cache_causes import find_breaks
from tersely.console.router import PageRequest
from tersely.console.strip import MOST, draw
from tersely.console.tool_list import list_tools
from tersely.console.views.base import ViewGroup, redirect, replay_of
from tersely.service.sessions.comparisons import MAX_CHARS, readable
from tersely.service.sessions.sent_lines import text_of_instructions

ROWS = 60
"""Rows of a session that a page holds; others come when they are scrolled to."""
MAX_ARTIFACT = 500_000
"""Characters of an artifact that a page shows."""


class SessionPages(ViewGroup):
    """Pages of one session; each takes its id from the address."""

    async def show_session(self, page: PageRequest) -> Response:
        """Show the client's messages beside the messages that one call sent to the model."""
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        last = await self._services.calls.last(page.tenant, session_id, limit=1)
        if not last:
            return self._render(
                page, "session.html", "sessions", tab="context", listed=listed, calls=[], current=None, replay={}
            )
        newest = last[-1].row.number
        number = min(max(1, page.number("call", newest) or newest), newest)
        end = min(newest, max(number + MOST // 2, MOST))
        calls = await self._services.calls.last(page.tenant, session_id, limit=MOST, before=end + 1)
        epochs, _ = await self._services.calls.epochs(page.tenant, session_id, after=0, limit=1000)
        compared = await self._services.comparisons.rows(
            page.tenant, session_id, number, start=0, limit=ROWS, seq=page.number("seq")
        )
        return self._render(
            page, "session.html", "sessions", tab="context", listed=listed, calls=calls, newest=newest,
            strip=draw(calls, epochs, number), current=compared.context.call, compared=compared, number=number,
            gaps_before=_gaps(0, compared.start), seq=page.number("seq"),
            gaps_after=_gaps(compared.start + len(compared.rows), compared.total),
            link_rows=self._link_rows(page, number), reason=compared.context.reason,
            instructions=readable(text_of_instructions(compared.context.instructions or b"null"))[:MAX_ARTIFACT],
            replay=replay_of(listed.session.metadata) if page.is_replay else {},
        )  # fmt: skip

    def _link_rows(self, page: PageRequest, number: int) -> Callable[[int, int], str]:
        def write(start: int, count: int) -> str:
            return page.link("session/rows", id=page.get("id"), call=number, start=start, count=count)

        return write

    async def show_rows(self, page: PageRequest) -> Response:
        """Further rows, as they are scrolled to."""
        number, start = page.number("call", 1) or 1, page.number("start", 0) or 0
        count = min(page.number("count", ROWS) or ROWS, ROWS)
        compared = await self._services.comparisons.rows(page.tenant, page.get("id"), number, start=start, limit=count)
        listed = await self._services.sessions.figures(page.tenant, page.get("id"))
        return self._render(page, "rows.html", "sessions", compared=compared, listed=listed, number=number, seq=None)

    async def show_text(self, page: PageRequest) -> Response:
        """The whole text of a part that a row shows the beginning of."""
        text = await self._services.comparisons.whole_text(
            page.tenant,
            page.get("id"),
            page.number("call", 1) or 1,
            seq=page.number("seq"),
            index=page.number("index"),
            part=page.number("part", 0) or 0,
        )
        return self._pages.render("text.html", text=text[MAX_CHARS:])

    async def show_tools(self, page: PageRequest) -> Response:
        """The tool definitions that a call sent: for a page that asks by script the list alone."""
        number = page.number("call", 1) or 1
        tools = await self._services.calls.tools(page.tenant, page.get("id"), number)
        definitions = await asyncio.to_thread(list_tools, tools)
        if "hx-request" in page.request.headers:
            return self._pages.render("tools.html", definitions=definitions, reason=tools.reason)
        listed = await self._services.sessions.figures(page.tenant, page.get("id"))
        return self._render(
            page, "tools_page.html", "sessions", listed=listed, number=number, definitions=definitions,
            reason=tools.reason,
        )  # fmt: skip

    async def show_artifact(self, page: PageRequest) -> Response:
        """A tool output that was kept apart."""
        content = await self._services.artifacts.get(page.tenant, page.get("sha"))
        text = readable(content.decode("utf-8", "replace"))
        return self._render(
            page, "artifact.html", "sessions", sha=page.get("sha"), session_id=page.get("id"), size=len(content),
            text=text[:MAX_ARTIFACT], is_cut=len(text) > MAX_ARTIFACT, act=page.get("act"),
        )  # fmt: skip

    async def delete_artifact(self, page: PageRequest) -> Response:
        """Delete a tool output for good."""
        await self._services.artifact_removal.delete(page.tenant, page.get("sha"))
        return redirect(page.link("session/memory", id=page.get("id")))

    async def show_cache(self, page: PageRequest) -> Response:
        """Each change of the cached beginning, with its cause and its cost."""
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        calls = await self._services.calls.last(page.tenant, session_id, limit=1000)
        epochs, _ = await self._services.calls.epochs(page.tenant, session_id, after=0, limit=1000)
        breaks = find_breaks(calls, epochs, lifetime=self._services.lifetime, price=self._services.prices.of)
        known = [each.cost for each in breaks if each.cost is not None]
        return self._render(
            page, "cache.html", "sessions", tab="cache", listed=listed, calls=calls, breaks=list(reversed(breaks)),
            cost=sum(known) if known else None, again=sum(each.again or 0 for each in breaks),
        )  # fmt: skip

    async def show_session_savings(self, page: PageRequest) -> Response:
        """Show the cost of each call of a session beside the cost of the full history."""
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        calls = await self._services.calls.last(page.tenant, session_id, limit=1000)
        chart = [
            [call.row.number, call.row.cost_sent, call.row.cost_full, call.row.tokens_before, call.row.tokens_after]
            for call in calls
        ]
        return self._render(
            page, "session_savings.html", "sessions", tab="savings", listed=listed, calls=list(reversed(calls)),
            shadow=await self._services.savings.shadow_of(page.tenant, session_id),
            chart=msgspec.json.encode(chart).decode(),
        )  # fmt: skip


def _gaps(start: int, end: int) -> list[tuple[int, int]]:
    """Portions of rows that are not on the page: (first, how many)."""
    return [(first, min(ROWS, end - first)) for first in range(start, end, ROWS)]
