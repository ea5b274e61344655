"""Search, events and savings over all sessions of a tenant, and the prices behind them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tersely.service.money.prices import PriceFileInvalid, Prices, read_prices
from tests.api.conftest import Api
from tests.api.conftest import serve as serve_api
from tests.conftest import TERSELY, Database
from tests.support.services import serve
from tests.support.upstreams import scripted

USER = {"role": "user", "content": "Where does the heron nest?"}
ASSISTANT = {"role": "assistant", "content": "In the alders by the weir."}


async def test_search_finds_words_in_every_session(api: Api) -> None:
    await api.append("birds", USER, ASSISTANT)
    await api.append(
        "trees", {"role": "user", "content": "How old are the alders?"}, {"role": "assistant", "content": "?"}
    )
    found = (await api.http.post("/api/search", json={"query": "alders"})).json()["hits"]
    assert {hit["session"] for hit in found} == {"birds", "trees"}
    (heron,) = (await api.http.post("/api/search", json={"query": "heron nest"})).json()["hits"]
    assert (heron["session"], heron["seq"], heron["turn"]) == ("birds", 1, "t1")
    assert "heron" in heron["excerpt"]
    assert heron["before"] is None
    assert heron["after"] == {"seq": 2, "turn": "t1", "role": "assistant", "excerpt": ASSISTANT["content"]}
    relevant = await api.http.post("/api/search", json={"query": "alders weir", "mode": "relevant"})
    assert "birds" in {hit["session"] for hit in relevant.json()["hits"]}
    assert (await api.http.post("/api/search", json={"query": "kingfisher"})).json()["hits"] == []


async def test_hits_have_their_neighbours(api: Api) -> None:
    words = ["bread", "an otter", "two otters", "milk", "eggs", "salt", "tea " * 100, "otter again"]
    await api.append("list", *({"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)))

    async def find(mode: str, limit: int) -> list[tuple[int, int | None, int | None]]:
        body = {"query": "otter", "mode": mode, "limit": limit}
        found = (await api.http.post("/api/search", json=body)).json()["hits"]
        for each in (side for hit in found for side in (hit, hit["before"], hit["after"]) if side):
            assert each["excerpt"].rstrip(" …") in words[each["seq"] - 1]
        return [(hit["seq"], *(hit[side] and hit[side]["seq"] for side in ("before", "after"))) for hit in found]

    assert await find("search", 9) == [(2, 1, 3), (3, 2, 4), (8, 7, None)]
    assert await find("search", 2) == [(2, 1, 3), (3, 2, 4)]
    assert [seq for seq, _, _ in await find("search", 1)] == [2]
    relevant = await find("relevant", 3)
    assert (2, 1, 3) in relevant
    assert len(relevant) == 3


@pytest.mark.parametrize("body", [{}, {"query": ""}, {"query": "x" * 2_001}, {"query": "x", "mode": "guess"}])
async def test_search_refuses_an_invalid_query(api: Api, body: dict[str, Any]) -> None:
    assert (await api.http.post("/api/search", json=body)).status_code == 422


async def test_events_tell_of_calls_of_all_sessions(database: Database) -> None:
    with scripted() as upstream:
        async with serve_api(database.dsn, upstream=upstream.url) as api:
            async with asyncio.timeout(60):
                event = asyncio.create_task(first_event(api))
                await asyncio.sleep(0.5)
                called = await api.http.post("/v1/chat/completions", json={"model": "gpt-4o", "messages": [USER]})
                assert called.status_code == 200
                name, body = await event
    assert name in {"call", "epoch"}
    assert body["session"] == called.headers["x-tersely-session"]


async def first_event(api: Api) -> tuple[str, dict[str, Any]]:
    """Return name and data of the first event of the tenant."""
    # The transport of the other tests gives a reply when it has ended; a stream of events does not end.
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await received.put(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/api/events",
        "raw_path": b"/api/events",
        "query_string": b"",
        "headers": [(b"host", b"test"), (b"accept", b"text/event-stream")],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    serving = asyncio.create_task(api.app(scope, receive, send))
    text = ""
    try:
        while True:
            text += (await received.get()).decode()
            for block in text.split("\n\n")[:-1]:
                members = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
                if "event" in members:
                    return members["event"], json.loads(members["data"])
    finally:
        serving.cancel()
        await asyncio.wait({serving})


def test_savings_are_printed(database: Database) -> None:
    with scripted() as upstream, serve(database, upstream.url) as service:
        body = {"model": "gpt-4o", "messages": [USER]}
        assert httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        environment = {**os.environ, "DATABASE_URL": database.dsn}
        command = [TERSELY, "savings", "--by", "model"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "gpt-4o" in done.stdout
        session = httpx.get(f"{service.url}/api/sessions", timeout=60).json()["items"][0]
        stats = httpx.get(f"{service.url}/api/sessions/{session['id']}/stats", timeout=60).json()
        assert stats["money"] == session["money"]
        assert stats["money"]["sent"] > 0


def test_price_comes_from_the_file_before_the_table(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(
        json.dumps({"gpt-4o": {"input": 1, "output": 2, "cached": 0.5}, "local-*": {"input": 0, "output": 0}})
    )
    prices = Prices(read_prices(path))
    own = prices.of("gpt-4o")
    assert own is not None
    assert own.cost(input_tokens=1_000_000, cached=400_000, output=100_000) == pytest.approx(0.6 + 0.2 + 0.2)
    free = prices.of("local-7b")
    assert free is not None
    assert free.cost(input_tokens=10, cached=0, output=10) == 0
    assert prices.of("claude-sonnet-4-5", "anthropic") is not None


@pytest.mark.parametrize("model", ["", "my-own-model", "local-7b"])
def test_unknown_model_has_no_price(model: str) -> None:
    assert Prices().of(model) is None


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        '{"m": {"input": 1}}',
        '{"m": {"input": -1, "output": 1}}',
        '{"m": {"input": 1, "output": 1, "x": 1}}',
    ],
)
def test_file_of_prices_that_cannot_be_used_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(PriceFileInvalid, match="TERSELY_PRICES"):
        read_prices(path)
