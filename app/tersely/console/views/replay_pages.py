"""The page that plays transcripts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import JSONResponse, Response

from tersely.console.pages import HEADERS, link
from tersely.console.router import PageRequest
from tersely.console.views.base import ViewGroup, redirect, replay_of
from tersely.domain.errors import InvalidRequest
from tersely.service.common.replay_tenants import replay_tenant
from tersely.service.replays.replays import MAX_BYTES, MAX_SECONDS, ReplayOptions
from tersely.store.history.session_lists import SessionFilter
from tersely.strategies.presets import STRATEGIES

DEMO = Path(__file__).parents[2] / "data" / "demo_transcript.json"
DEMO_NAME = "demo_transcript.json"
DEMO_EPOCH = '{"high": 12000, "low": 5000}'
REPLAY_POLICIES = {
    "": "as configured",
    DEMO_EPOCH: "small: cut at 12,000 tokens down to 5,000",
    '{"high": 32000, "low": 9000}': "default: cut at 32,000 tokens down to 9,000",
    "every_request": "a new epoch at every call",
}
PATIENCE = 8.0
"""Seconds that a page waits for a replay; a longer one goes on behind the page that shows it."""


class ReplayPages(ViewGroup):
    """Transcripts that are played without a model."""

    async def show_replays(self, page: PageRequest) -> Response:
        """The demo, a place to drop a transcript on, and the replays that are kept."""
        found, _ = await self._services.sessions.page(
            replay_tenant(page.visitor.tenant), SessionFilter(), sort="created", after=None, limit=50
        )
        return self._render(
            page, "replay.html", "replay", listed=[(each, replay_of(each.session.metadata)) for each in found],
            strategies=STRATEGIES, policies=REPLAY_POLICIES, most=MAX_BYTES // 2**20, seconds=MAX_SECONDS,
        )  # fmt: skip

    async def play_demo(self, page: PageRequest) -> Response:
        """Play the built-in transcript."""
        options = ReplayOptions(epoch=DEMO_EPOCH)
        content = await asyncio.to_thread(DEMO.read_bytes)
        return redirect(await self._play(page, DEMO_NAME, content, options))

    async def play_file(self, page: PageRequest, content: bytes) -> Response:
        """Play an uploaded transcript, and return the address of the result."""
        options = ReplayOptions(
            strategy=page.get("strategy"), epoch=page.get("epoch"), model=page.get("model").strip()[:200]
        )
        return JSONResponse(
            {"go": await self._play(page, page.get("name"), content, options)},
            headers={**HEADERS, "cache-control": "no-store"},
        )

    async def _play(self, page: PageRequest, name: str, content: bytes, options: ReplayOptions) -> str:
        """Play a transcript and return the address of the result. Raises `InvalidRequest`, `Busy`."""
        replays = self._services.replays
        replay = await replays.start(page.visitor.tenant, await replays.read(name, content), options)
        await replays.wait(replay, PATIENCE)
        if replay.trouble and not replay.played:
            raise InvalidRequest(replay.trouble, field="file")
        if len(replay.sessions) == 1:
            return link("replay/session", id=replay.sessions[0])
        return link("replay")

    async def delete_replay(self, page: PageRequest) -> Response:
        """Delete a replay."""
        await self._services.sessions.delete(replay_tenant(page.visitor.tenant), page.get("id"))
        return redirect(link("replay"))
