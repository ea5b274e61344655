"""Reports and figures say what is so: turns brought back, weights, levels, summaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.chat_messages import assistant, user
from tests.support.http import body_of, post
from tests.support.injected_clients import WIRES, InjectingClient, first_request
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, RawUpstream, http_head

TIERED = {"name": "tiered", "total_budget": 3000, "session_budget": 500, "working_budget": 700}


def made(service: Service, strategy: object, *messages: dict[str, Any]) -> str:
    session = str(httpx.post(f"{service.url}/api/sessions", json={"strategy": strategy}).json()["id"])
    append(service, session, *messages)
    return session


def append(service: Service, session: str, *messages: dict[str, Any]) -> None:
    url = f"{service.url}/api/sessions/{session}/messages"
    httpx.post(url, json={"messages": messages}, timeout=60).raise_for_status()


def read(service: Service, session: str, what: str) -> dict[str, Any]:
    answer = httpx.get(f"{service.url}/api/sessions/{session}/{what}", timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


async def test_a_turn_that_was_brought_back_whole_is_full(service: Service, model: Model, key: str) -> None:
    headers = {"X_Tersely_Session": key, "X_Tersely_Strategy": json.dumps(TIERED)}
    model.script(key, ScriptedReply(message=assistant("off by one in kraken_parser.py")))
    await post(service, body_of(user("the kraken parser drops tentacles in kraken_parser.py"), user=key), **headers)
    append(service, key, *[m for _ in range(40) for m in (user("chat " + "lorem " * 90), assistant("ipsum " * 90))])
    question = user("does the kraken parser still drop tentacles?" + " hm" * 1200)
    await post(service, body_of(question, user=key), **headers)
    sent = json.dumps(model.requests(key)[-1].request)
    assert "the kraken parser drops tentacles in kraken_parser.py" in sent
    # The next context goes on from this epoch.
    built = httpx.post(f"{service.url}/api/sessions/{key}/context", json={}, timeout=60).json()
    assert "the kraken parser drops tentacles in kraken_parser.py" in json.dumps(built["messages"])
    turns = {turn["turn"]: turn for turn in built["report"]["turns"]}
    assert list(turns) == [f"t{number}" for number in range(1, 43)]
    assert (turns["t1"]["kept"], turns["t1"]["reason"]) == ("full", "brought back")
    assert turns["t1"]["tokens"] > 0
    assert turns["t20"]["kept"] == "summary"
    assert read(service, key, "stats")["tiered"]["retrieved"][:1] == ["t1"]


async def test_a_pinned_message_alone_does_not_make_its_turn_full(service: Service, key: str) -> None:
    del key
    strategy = {"name": "slim", "recent_turns": 1}
    turns = [m for number in range(4) for m in (user(f"question {number}"), assistant(f"answer {number}"))]
    session = made(service, strategy, *turns)
    url = f"{service.url}/api/sessions/{session}"
    for seq in (1, 3, 4):  # half of t1, and all of t2
        httpx.post(f"{url}/messages/{seq}/pin").raise_for_status()
    built = httpx.post(f"{url}/context", json={"epoch": "every_request"}).json()
    kept = {turn["turn"]: turn["kept"] for turn in built["report"]["turns"]}
    assert kept == {"t1": "truncated", "t2": "full", "t3": "terse", "t4": "full"}


async def test_pinned_messages_are_permanent_in_the_report(service: Service) -> None:
    session = made(service, "tiered", user("begin " * 50), assistant("done " * 50), user("more"), assistant("fine"))
    url = f"{service.url}/api/sessions/{session}"

    def levels() -> dict[str, int]:
        return {level["name"]: level["tokens"] for level in read(service, session, "stats")["tiered"]["levels"]}

    before = levels()
    tokens = httpx.post(f"{url}/messages/2/pin").json()["tokens"]
    after = levels()
    assert after["permanent"] - before["permanent"] == tokens > 0
    assert before["working"] - after["working"] == tokens


async def test_rebuilt_state_is_not_reported_as_a_summary(store: Database, raw: RawUpstream) -> None:
    message = {"role": "assistant", "content": "### STATE\nGoal: Ship src/app.py"}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    raw.answer(http_head("application/json"), json.dumps({"choices": choices}).encode())
    options = {"summarizer_model": "m", "summarizer_base_url": f"{raw.url}/v1", "summarizer_api_key": "k"}
    with serve(store, raw.url, **options) as service:
        session = made(service, "window", user("Please ship src/app.py"), assistant("Shipped src/app.py to 10.0.0.1."))
        rebuilt = await post(service, b"{}", path=f"/api/sessions/{session}/state/rebuild")
        assert rebuilt.status == 200, rebuilt.body
        assert rebuilt.json["source"] == "rebuilt"
        summaries = read(service, session, "stats")["summaries"]
    assert (summaries["total"], summaries["compression_ratio"], summaries["last_at"]) == (0, None, None)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def offering(store: Database, model: Model) -> Iterator[Service]:
    with serve(store, model.url, strategy="window", instructions="off", epoch=FROM_THE_START) as running:
        yield running


PAD = {"name": "manage_scratchpad", "arguments": '{"action": "read"}'}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WIRES)
def test_the_weight_of_a_turn_is_that_of_its_last_round(
    offering: Service, model: Model, http: httpx.Client, key: str, dialect: str, streams: bool
) -> None:
    client = InjectingClient(
        offering, model, key, dialect, first_request(dialect),
        headers={"x_tersely_session": key}, http=http, streams=streams,
    )  # fmt: skip
    if streams and dialect == "openai_chat":
        client.body["stream_options"] = {"include_usage": True}
    calls = [{"id": "c1", "type": "function", "function": PAD}]
    looking = {"role": "assistant", "content": None, "tool_calls": calls}
    model.script(key, ScriptedReply(message=looking, usage=client.wire.usage(100, 10)))
    client.ask(client.wire.user("What is noted?"), usage=client.wire.usage(150, 20))
    found = read(offering, key, "turns/t1")["usage"]
    assert (found["calls"], found["input"], found["output"]) == (1, 250, 30)
    assert found["weight"] == 170
    client.ask(client.wire.user("Sure?"), usage=client.wire.usage(200, 5))
    assert read(offering, key, "turns/t2")["usage"]["weight"] == 205


@pytest.mark.parametrize("dialect", WIRES)
def test_turns_brought_back_are_full_in_every_dialect(
    service: Service, model: Model, http: httpx.Client, key: str, dialect: str
) -> None:
    client = InjectingClient(
        service, model, key, dialect, first_request(dialect),
        headers={"x_tersely_session": key, "x_tersely_strategy": json.dumps(TIERED)}, http=http,
    )  # fmt: skip
    client.say("the kraken parser drops tentacles in kraken_parser.py")
    for number in range(12):
        client.say(f"chat {number} " + "lorem " * 250)
    client.say("does the kraken parser still drop tentacles?" + " hm" * 1200)
    sent = [each for each in list(model.state.received) if each.headers.get("X-Script") == key][-1]
    assert b"the kraken parser drops tentacles" in sent.body
    built = httpx.post(f"{service.url}/api/sessions/{key}/context", json={"dialect": dialect}, timeout=60).json()
    assert "the kraken parser drops tentacles" in json.dumps(built["messages"])
    turns = {turn["turn"]: turn for turn in built["report"]["turns"]}
    assert (turns["t1"]["kept"], turns["t1"]["reason"]) == ("full", "brought back")
    assert turns["t6"]["kept"] == "summary"
