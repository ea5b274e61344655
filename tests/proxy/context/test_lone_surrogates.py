"""Halves of surrogate pairs, which clients that cut text leave in it: every text of a conversation has one."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tersely.strategies.presets import STRATEGIES
from tests.conftest import Database
from tests.support.conversations import Conversation, compare, script, waits_for_spool
from tests.support.http import STORED
from tests.support.locks import locked
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

HALF = "\ud83d"
LATER = "\udc00"
WORDS = f" {HALF}{' words of a question' * 60} {LATER}"
STATE = f"### STATE\nGoal: ship {HALF}\nContext: src/{LATER}.py\nResolved: none\nTechnical Anchors: 8484"
TURNS = 9
READ = (
    "", "/calls", "/calls/1", f"/calls/{TURNS}/context", "/epochs", "/messages", "/messages?view=all", "/turns",
    "/turns/t1", "/terse", "/export", "/state", "/state/history", "/scratchpad", "/stats",
)  # fmt: skip
SEARCHES = ({"query": "words", "mode": "search"}, {"query": "question", "mode": "relevant"})


def halves(received: ReceivedRequest) -> ScriptedReply | None:
    reply = script(received)
    if reply is not None and reply.message:
        answer = f"{HALF} {reply.message['content']} {' words of a reply' * 60}{LATER}"
        # Without a note of the model's, the log has the reply's own words.
        note = f"<terse>said {LATER}it</terse>\n{STATE}" if re.search(r":[13579]\.", answer) else ""
        return ScriptedReply(message={"role": "assistant", "content": f"{answer}\n{note}"})
    return reply


@contextmanager
def slowed(model: Model) -> Iterator[None]:
    """The model takes a second for each reply."""

    async def delayed(received: ReceivedRequest) -> ScriptedReply | None:
        await asyncio.sleep(1)
        return halves(received)

    usual, model.state.script = model.state.script, delayed
    try:
        yield
    finally:
        model.state.script = usual


@pytest.fixture(scope="module")
def halving() -> Iterator[Model]:
    with scripted() as running:
        running.state.script = halves
        yield running


@pytest.fixture(scope="module")
def service(store: Database, halving: Model) -> Iterator[Service]:
    with serve(store, halving.url) as running:
        yield running


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["chat", "chat stream", "chat delta", "anthropic", "gemini stream", "responses named"])
async def test_every_call_and_every_view_of_it_works(service: Service, kind: str, strategy: str) -> None:
    epoch = json.dumps({"high": 1500, "low": 600})
    headers = {"X-Tersely-Strategy": strategy, "X-Tersely-Epoch": epoch}
    talk = Conversation(url=service.url, kind=kind, headers=headers, words=WORDS)
    async with aiohttp.ClientSession() as http:
        got = [await talk.ask(http) for _ in range(TURNS)]
        assert [each.status for each in got] == [200] * TURNS, got[-1]
        assert all(each.has_ended for each in got)
        assert all(HALF in each.text for each in got)
        assert {each.session for each in got[1:]} == {got[0].session}
        session = f"{service.url}/api/sessions/{got[0].session}"
        for path in READ:
            async with http.get(session + path) as answer:
                assert answer.status == 200, (path, await answer.text())
                (await answer.read()).decode()
        async with http.post(f"{session}/compact", json={}) as answer:
            assert answer.status == 200, await answer.text()
        async with http.post(f"{session}/context", json={}) as answer:
            assert answer.status == 200, await answer.text()
        for body in SEARCHES:
            for path in (f"{session}/search", f"{service.url}/api/search"):
                async with http.post(path, json=body) as answer:
                    assert answer.status == 200, (path, body, await answer.text())
        for page in (f"session?id={got[0].session}", "sessions?q=words"):
            async with http.get(f"{service.url}/console/{page}") as answer:
                assert answer.status == 200, (page, await answer.text())
        async with http.get(f"{session}/export") as answer:
            exported = {**await answer.json(), "id": f"again-{got[0].session}"}
        async with http.post(f"{service.url}/api/sessions/import", json=exported) as answer:
            assert answer.status == 201, await answer.text()
        assert (await talk.ask(http)).has_ended


@pytest.mark.parametrize("kind", ["chat", "chat stream", "anthropic", "gemini stream"])
@pytest.mark.parametrize("strategy", ["slim", "window"])
async def test_a_reply_is_spooled_and_stored(
    database: Database, halving: Model, tmp_path: Path, kind: str, strategy: str
) -> None:
    """With a note or a state, according to the strategy."""
    epoch = '{"instructions_at": 0}'
    with serve(
        database, halving.url, database_timeout=1.0, data_dir=tmp_path / "data", strategy=strategy, epoch=epoch
    ) as service:
        talk = Conversation(url=service.url, kind=kind, words=WORDS)
        async with aiohttp.ClientSession() as http:
            for _ in range(3):
                assert (await talk.ask(http)).has_ended
            with slowed(halving):
                asking = asyncio.create_task(talk.ask(http))
                await asyncio.sleep(0.5)
                async with locked(database.admin_dsn):
                    got = await asking
            assert got.has_ended, got
            assert got.context in STORED
            await waits_for_spool(service.url)
            assert (await talk.ask(http)).has_ended
            compared = await compare(database.admin_dsn, [talk])
            assert compared.is_right, compared
            assert compared.acknowledged == 5


_CALL = {"id": HALF, "type": "function", "function": {"name": "f", "arguments": json.dumps({HALF: HALF})}}
_QUESTION = {"role": "user", "name": HALF, "content": HALF}
_ROUND = [
    _QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": HALF, "content": f"{HALF} " + "a line of a result\n" * 2_000},
]
_CHAT, _CLAUDE = "/v1/chat/completions", "/v1/messages"
_PARTS = {"parts": [{"text": HALF}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_CHAT, {"model": HALF, "messages": [_QUESTION]}),
        (_CHAT, {"model": "m", "user": HALF, "messages": [_QUESTION]}),
        (_CHAT, {"model": "m", "metadata": {HALF: HALF}, "messages": [_QUESTION]}),
        (_CHAT, {"model": "m", "prompt_cache_key": HALF, "messages": [_QUESTION]}),
        (_CHAT, {"model": "m", "messages": _ROUND}),
        (
            _CLAUDE,
            {
                "model": "m",
                "max_tokens": 9,
                "system": HALF,
                "metadata": {"user_id": f'{{"session_id":"{HALF}"}}'},
                "messages": [{"role": "user", "content": HALF}],
            },
        ),
        ("/v1/responses", {"model": "m", "input": HALF, "instructions": HALF, "user": HALF}),
        ("/v1beta/models/m:generateContent", {"systemInstruction": _PARTS, "contents": [{"role": "user", **_PARTS}]}),
    ],
)
async def test_other_members_of_a_request_may_have_them(service: Service, path: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(service.url + path, json=body) as answer:
                assert answer.status in (200, 400, 404), await answer.text()
        for page in ("/api/sessions", "/api/calls", "/console/sessions"):
            async with http.get(service.url + page) as answer:
                assert answer.status == 200, await answer.text()
