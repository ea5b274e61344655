"""The events of the live view while the database is unavailable."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.conftest import Database
from tests.support.relay import relay
from tests.support.services import serve
from tests.support.upstreams import scripted

BODY = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Are you there?"}]}


async def events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield name and data of each event."""
    name = ""
    async for line in lines:
        kind, _, value = line.partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)


@pytest.mark.parametrize("path", ["/console/live/events", "/api/events"])
async def test_stream_goes_on_when_the_database_is_back(store: Database, path: str) -> None:
    with (
        scripted() as model,
        relay(store) as way,
        serve(store, model.url, dsn=way.dsn, database_timeout=0.5) as service,
    ):
        async with (
            asyncio.timeout(60),
            httpx.AsyncClient(base_url=service.url, timeout=60) as http,
            http.stream("GET", path, headers={"accept": "text/event-stream"}) as stream,
        ):
            assert stream.status_code == 200
            following = events(stream.aiter_lines())
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200
            async for name, data in following:
                if name in {"happening", "call"} and "call" in data.values():
                    break
            way.cut()
            away = await http.post("/v1/chat/completions", json=BODY)
            assert away.headers["x-tersely-context"] == "fail-open"
            if path.startswith("/console"):
                async for name, data in following:
                    if name == "running" and any(note["kind"] == "fail-open" for note in data["notes"]):
                        break
            await asyncio.sleep(2)
            way.restore()
            while (again := await http.post("/v1/chat/completions", json=BODY)).headers[
                "x-tersely-context"
            ] == "fail-open":
                await asyncio.sleep(0.3)
            session = again.headers["x-tersely-session"]
            async for _, data in following:
                if data.get("session") == session:
                    break
