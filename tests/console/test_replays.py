"""Replays in the console: the demo, transcripts that are dropped, and what they must not touch."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from bench import demo_transcript
from tersely.domain.errors import InvalidRequest
from tersely.service.common.auth import new_key
from tersely.service.common.replay_tenants import replay_tenant
from tests.conftest import Database
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

DEMO_CALLS = 87


@pytest.fixture
async def there(store: Database) -> AsyncIterator[tuple[Service, httpx.AsyncClient, str, Model]]:
    """A service, a visitor of its console with the token of its forms, and the host that must not be asked."""
    with scripted() as upstream, serve(store, upstream.url) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
            page = await http.get("/console/replay")
            found = re.search(r'name="token" value="([0-9a-f]{64})"', page.text)
            assert found is not None
            yield service, http, found[1], upstream


async def drop(http: httpx.AsyncClient, token: str, content: bytes, **query: str) -> httpx.Response:
    return await http.post("/console/replay/play", params=query, content=content, headers={"x-console-token": token})


async def kept(http: httpx.AsyncClient) -> list[str]:
    """The ids of the replays, the newest first."""
    return re.findall(r'name="id" value="([^"]+)"', (await http.get("/console/replay")).text)


def conversation(turns: int, dialect: str = "openai_chat", words: str = "says") -> dict[str, Any]:
    """A conversation in the wire form of a dialect, a reply for each turn."""
    texts = [(role, f"{role} {words} {turn} " * 40) for turn in range(turns) for role in ("user", "assistant")]
    match dialect:
        case "openai_chat":
            return {"messages": [{"role": role, "content": text} for role, text in texts]}
        case "anthropic":
            return {"system": "Be brief.", "messages": [{"role": role, "content": text} for role, text in texts]}
        case "openai_responses":
            kinds = {"user": "input_text", "assistant": "output_text"}
            return {
                "input": [
                    {"type": "message", "role": role, "content": [{"type": kinds[role], "text": text}]}
                    for role, text in texts
                ]
            }
        case _:
            roles = {"user": "user", "assistant": "model"}
            return {"contents": [{"role": roles[role], "parts": [{"text": text}]} for role, text in texts]}


CLAUDE = [
    {
        "type": role,
        "uuid": f"u{number}",
        "parentUuid": f"u{number - 1}" if number else None,
        "message": {"role": role, "model": "claude-opus-4-1", "content": f"{role} says {number}"}
        | ({"id": f"msg_{number}"} if role == "assistant" else {}),
    }
    for number, role in enumerate(["user", "assistant"] * 3)
]
CODEX = [
    {"type": "session_meta", "payload": {"instructions": "Be brief."}},
    {"type": "turn_context", "payload": {"model": "gpt-5-codex"}},
    *(
        {"type": "response_item", "payload": item}
        for item in conversation(3, "openai_responses")["input"]
    ),
]  # fmt: skip
GEMINI = [
    {"sessionId": "s", "projectHash": "p", "messages": []},
    *(
        {"id": f"m{number}", "type": kind, "content": f"{kind} {number}", "model": "gemini-2.5-flash"}
        for number, kind in enumerate(["user", "gemini"] * 3)
    ),
]
PI = [
    {"type": "session", "cwd": "/home/me"},
    *(
        {
            "type": "message",
            "id": f"e{number}",
            "parentId": f"e{number - 1}" if number else None,
            "message": {"role": role, "content": [{"type": "text", "text": f"{role} {number}"}], "model": "gpt-5-mini"},
        }
        for number, role in enumerate(["user", "assistant"] * 3)
    ),
]


async def test_demo_is_played_without_a_model(there: tuple[Service, httpx.AsyncClient, str, Model]) -> None:
    _, http, token, upstream = there
    played = await http.post("/console/replay/demo", data={"token": token})
    assert played.status_code == 303
    page = await http.get(played.headers["location"])
    assert f"call {DEMO_CALLS} of {DEMO_CALLS}" in page.text
    assert "claude-sonnet-4-5" in page.text
    assert "activity log" in page.text
    cache = (await http.get(played.headers["location"].replace("replay/session", "replay/session/cache"))).text
    assert "the cache had expired" in cache
    assert re.search(r"4[5-9] min since the call before", cache)
    assert "changed instructions" not in cache
    for view in ("session/cache", "session/savings", "session/try"):
        shown = await http.get(played.headers["location"].replace("replay/session", f"replay/{view}"))
        assert shown.status_code == 200, view
    assert upstream.state.calls == 0


async def test_replay_is_in_no_list_or_figure_of_the_tenant(
    there: tuple[Service, httpx.AsyncClient, str, Model],
) -> None:
    _, http, token, _ = there
    before = (await http.get("/metrics")).text
    await http.post("/console/replay/demo", data={"token": token})
    assert (await http.get("/api/sessions")).json()["items"] == []
    assert (await http.get("/api/calls")).json()["items"] == []
    assert (await http.get("/api/savings")).json()["total"]["calls"] == 0
    assert (await http.post("/api/search", json={"query": "nightly"})).json()["hits"] == []

    def counted(text: str) -> list[str]:
        names = ("tersely_cost_usd_total", "tersely_epochs_total", "tersely_tokens_saved", "tersely_upstream_tokens")
        return [line for line in text.splitlines() if line.startswith(names)]

    assert counted((await http.get("/metrics")).text) == counted(before)


@pytest.mark.parametrize(
    ("name", "lines", "model"),
    [
        ("claude.jsonl", CLAUDE, "claude-opus-4-1"),
        ("codex.jsonl", CODEX, "gpt-5-codex"),
        ("gemini.jsonl", GEMINI, "gemini-2.5-flash"),
        ("pi.jsonl", PI, "gpt-5-mini"),
    ],
)
async def test_session_file_of_an_agent_is_played(
    there: tuple[Service, httpx.AsyncClient, str, Model], name: str, lines: list[Any], model: str
) -> None:
    _, http, token, _ = there
    content = "\n".join(json.dumps(line) for line in lines).encode()
    answer = (await drop(http, token, content, name=name)).json()
    assert answer.get("go", "").startswith("/console/replay/session?id="), answer
    page = await http.get(answer["go"])
    assert "call 3 of 3" in page.text
    assert model in page.text


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic", "openai_responses", "gemini"])
async def test_conversation_of_each_dialect_is_played_under_a_chosen_strategy(
    there: tuple[Service, httpx.AsyncClient, str, Model], dialect: str
) -> None:
    _, http, token, _ = there
    content = json.dumps(conversation(30, dialect)).encode()
    query = {"name": "c.jsonl", "strategy": "window", "epoch": "every_request", "model": "gpt-4o"}
    answer = (await drop(http, token, content, **query)).json()
    page = await http.get(answer["go"])
    assert "call 30 of 30" in page.text
    assert "window, epoch" in page.text
    assert "gpt-4o" in page.text


async def test_file_that_is_no_transcript_is_refused(
    there: tuple[Service, httpx.AsyncClient, str, Model],
) -> None:
    _, http, token, _ = there
    before = await kept(http)
    for content in (
        b"",
        b"\x00\xff",
        b"hello",
        b"[]",
        b'{"a": 1}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
    ):
        refused = await drop(http, token, content, name="../../etc/passwd.json")
        assert refused.status_code == 422, content
        assert "/tmp" not in refused.text
    bad = await drop(http, token, json.dumps(conversation(2)).encode(), name="a.jsonl", strategy="nonsense")
    assert (bad.status_code, "nonsense" in bad.json()["trouble"]) == (422, True)
    assert await kept(http) == before


async def test_upload_needs_the_token_and_keeps_to_its_limit(
    there: tuple[Service, httpx.AsyncClient, str, Model],
) -> None:
    _, http, token, _ = there
    content = json.dumps(conversation(1)).encode()
    assert (await drop(http, "0" * 64, content)).status_code == 403
    elsewhere = await http.post(
        "/console/replay/play", content=content, headers={"x-console-token": token, "sec-fetch-site": "cross-site"}
    )
    assert elsewhere.status_code == 403
    too_large = await http.post("/console/replay/play", content=bytes(33 * 2**20), headers={"x-console-token": token})
    assert too_large.status_code == 422
    assert "32 MiB" in too_large.json()["trouble"]


async def test_several_conversations_are_listed_and_deleted(
    there: tuple[Service, httpx.AsyncClient, str, Model],
) -> None:
    _, http, token, _ = there
    before = await kept(http)
    content = "\n".join(json.dumps(conversation(2, words=words)) for words in ("a", "b", "c")).encode()
    assert (await drop(http, token, content, name="many.jsonl")).json() == {"go": "/console/replay"}
    ids = [each for each in await kept(http) if each not in before]
    assert len(ids) == 3
    await http.post("/console/replay/delete", data={"token": token, "id": ids[0]})
    assert ids[0] not in await kept(http)


async def test_old_replays_go(there: tuple[Service, httpx.AsyncClient, str, Model]) -> None:
    _, http, token, _ = there
    content = "\n".join(json.dumps(conversation(1)) for _ in range(20)).encode()
    await drop(http, token, content, name="many.jsonl")
    await drop(http, token, json.dumps(conversation(2)).encode(), name="last.jsonl")
    assert len(await kept(http)) == 20
    assert ">last<" in (await http.get("/console/replay")).text


async def test_recorded_requests_are_played_twice_alike(
    there: tuple[Service, httpx.AsyncClient, str, Model],
) -> None:
    _, http, token, _ = there
    messages = conversation(4)["messages"]
    requests = [{"model": "gpt-4o", "messages": messages[: 2 * n + 1]} for n in range(4)]
    content = "\n".join(json.dumps(each) for each in requests).encode()
    for _ in range(2):
        answer = (await drop(http, token, content, name="requests.jsonl")).json()
        page = await http.get(answer["go"])
        assert "call 4 of 4" in page.text


async def test_keys_for_the_tenants_of_replays_are_not_made() -> None:
    for tenant in ("default", "t" * 128):
        with pytest.raises(InvalidRequest):
            new_key(replay_tenant(tenant), "", now=datetime.now(UTC), key_id="a" * 8, secret="b" * 32)


def stamped(lines: list[Any], minutes: list[int]) -> list[Any]:
    """The lines of a session file with their times."""
    stamps = iter(minutes)
    return [
        {**line, "timestamp": f"2026-03-02T{(minute := next(stamps)) // 60:02d}:{minute % 60:02d}:00.000Z"}
        if line.get("message") or line.get("type") in {"response_item", "user", "gemini"}
        else line
        for line in lines
    ]


@pytest.mark.parametrize("lines", [CLAUDE, CODEX, GEMINI, PI])
async def test_pause_in_a_transcript_makes_the_cache_cold(
    there: tuple[Service, httpx.AsyncClient, str, Model], lines: list[Any]
) -> None:
    _, http, token, _ = there

    async def causes(minutes: list[int]) -> tuple[list[str], str]:
        content = "\n".join(json.dumps(line) for line in stamped(lines, minutes)).encode()
        answer = (await drop(http, token, content, name="paused.jsonl", epoch="auto")).json()
        page = (await http.get(answer["go"].replace("replay/session", "replay/session/cache"))).text
        return re.findall(r"<td>(lifetime passed|new epoch)</td>", page), page

    found, page = await causes([0, 1, 2, 3, 103, 104])
    assert found == ["lifetime passed"]
    assert re.search(r"10[01] min since the call before", page)
    assert (await causes([0, 1, 2, 3, 4, 5]))[0] == []


async def test_demo_saves_a_third_or_more(there: tuple[Service, httpx.AsyncClient, str, Model]) -> None:
    _, http, token, _ = there
    played = await http.post("/console/replay/demo", data={"token": token})
    page = (await http.get(played.headers["location"])).text
    found = re.search(r"\$([\d.]+) instead of \$([\d.]+)", page)
    assert found is not None
    assert float(found[1]) < 0.67 * float(found[2])


async def test_demo_transcript_equals_the_output_of_its_script() -> None:
    written = json.loads(demo_transcript.OUTPUT.read_text(encoding="utf-8"))
    assert written == await demo_transcript.make()
    assert sum(message["role"] == "assistant" for message in written["messages"]) == DEMO_CALLS
