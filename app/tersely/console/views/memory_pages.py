"""The memory pages: state block and scratchpad of a session, memos, daily memory."""

from __future__ import annotations

import difflib
from datetime import date
from typing import Literal

from starlette.responses import Response

from tersely.console.router import PageRequest
from tersely.console.views.base import ViewGroup, redirect
from tersely.domain.errors import InvalidRequest


class MemoryPages(ViewGroup):
    """Memos and memory entries, to be read, changed and deleted."""

    async def show_session_memory(self, page: PageRequest) -> Response:
        """The state block with its history, and the scratchpad."""
        session_id = page.get("id")
        listed = await self._services.sessions.figures(page.tenant, session_id)
        state = await self._services.notes.state(page.tenant, session_id)
        artifacts = await self._services.artifacts.of_session(page.tenant, session_id, limit=100)
        history, _ = await self._services.notes.state_history(page.tenant, session_id, after=None, limit=200)
        scratchpad = await self._services.notes.scratchpad(page.tenant, session_id)
        texts = ["", *(past.state.text for past in history)]
        changes = [(past, _difference(before, past.state.text)) for before, past in zip(texts, history, strict=False)]
        return self._render(
            page, "session_memory.html", "sessions", tab="memory", listed=listed, state=state,
            changes=list(reversed(changes)), scratchpad=scratchpad, artifacts=artifacts,
        )  # fmt: skip

    async def put_state(self, page: PageRequest) -> Response:
        """Write the state block."""
        await self._services.notes.put_state(page.tenant, page.get("id"), page.get("text").replace("\r\n", "\n"))
        return redirect(page.link("session/memory", id=page.get("id")))

    async def put_scratchpad(self, page: PageRequest) -> Response:
        """Write the scratchpad."""
        await self._services.notes.put_scratchpad(page.tenant, page.get("id"), page.get("text").replace("\r\n", "\n"))
        return redirect(page.link("session/memory", id=page.get("id")))

    async def show_memory(self, page: PageRequest) -> Response:
        """Memos and the daily memory of the tenant."""
        memos, _ = await self._services.memos.page(page.tenant, after=None, tags=None, limit=100)
        entries, _ = await self._services.daily_memory.page(
            page.tenant, day=None, session_id=None, after=None, limit=50
        )
        return self._render(page, "memory.html", "memory", memos=memos, entries=entries)

    async def save_memo(self, page: PageRequest) -> Response:
        """Save a new memo."""
        await self._services.memos.save(
            page.tenant, content=_lines(page.get("content")), tags=_tags(page), session_id=None
        )
        return redirect(page.link("memory"))

    async def edit_memo(self, page: PageRequest) -> Response:
        """Change a memo."""
        content = _lines(page.get("content"))
        await self._services.memos.change(page.tenant, page.get("memo"), content=content, tags=_tags(page))
        return redirect(page.link("memory"))

    async def delete_memo(self, page: PageRequest) -> Response:
        """Delete a memo."""
        await self._services.memos.delete(page.tenant, page.get("memo"))
        return redirect(page.link("memory"))

    async def delete_day(self, page: PageRequest) -> Response:
        """Delete the memory entries of one day of a session."""
        try:
            day = date.fromisoformat(page.get("day"))
        except ValueError:
            raise InvalidRequest("day must be a date", field="day") from None
        await self._services.daily_memory.forget(page.tenant, day=day, session_id=page.get("session") or None)
        return redirect(page.link("memory"))


def _lines(text: str) -> str:
    """A form's text with the line ends that were typed."""
    return text.replace("\r\n", "\n")


def _tags(page: PageRequest) -> list[str]:
    return page.get("tags").replace(",", " ").split()


def _difference(before: str, after: str) -> list[tuple[Literal["same", "out", "in"], str]]:
    kinds: dict[str, Literal["same", "out", "in"]] = {"  ": "same", "- ": "out", "+ ": "in"}
    return [
        (kinds[line[:2]], line[2:])
        for line in difflib.ndiff(before.splitlines(), after.splitlines())
        if line[:2] in kinds
    ]
