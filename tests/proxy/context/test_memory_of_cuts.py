"""The daily memory of proxied sessions: one entry for each cut, whatever the wire format, and on any replica."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.injected_clients import WIRES, InjectingClient, first_request
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

TRIM = '{"name": "trim", "max_context_turns": 6}'
WORDS = " ".join(f"and so on number {n}" for n in range(20))
OTHERS = {
    "full": "full",
    "slim": "slim",
    "window": '{"name": "window", "context_size": 3}',
    "compact": '{"name": "compact", "max_tokens": 2000}',
    "tiered": '{"name": "tiered", "total_budget": 2000, "working_budget": 1000, "session_budget": 500}',
}
SMALL = '{"high": 2000, "low": 800}'


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    """A host whose models summarise by naming what they were given."""
    with scripted() as running:
        decide = running.state.script

        def script(received: ReceivedRequest) -> Any:
            if "X-Script" in received.headers:
                assert decide is not None
                return decide(received)
            names = sorted(set(re.findall(r"quokka_\d+", received.body.decode())))
            return ScriptedReply(message={"role": "assistant", "content": "- " + " ".join(names)})

        running.state.script = script
        yield running


@pytest.fixture(scope="module")
def replicas(store: Database, model: Model) -> Iterator[tuple[Service, Service]]:
    """Two processes of one service: summaries are written by the sessions' own models, with the callers' keys."""
    settings = {"summarizer_model": "session", "instructions": "off"}
    with serve(store, model.url, **settings) as one, serve(store, model.url, **settings) as other:
        yield one, other


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def text(number: int) -> str:
    return f"quokka_{number:03} is asked for. {WORDS}"


def entries(http: httpx.Client, service: Service, session: str, least: int = 0) -> list[dict[str, Any]]:
    """The session's entries once there are so many and nothing more is written, the oldest first."""
    before, unchanged = None, 0
    end = time.monotonic() + 20
    while unchanged < 4 or (len(before or []) < least and time.monotonic() < end):
        answer = http.get(f"{service.url}/api/memory", params={"session": session})
        answer.raise_for_status()
        now = answer.json()["items"]
        unchanged = unchanged + 1 if now == before else 0
        before = now
        time.sleep(0.05)
    return sorted(before or [], key=lambda each: int(each["first_seq"]))


def cuts(http: httpx.Client, service: Service, session: str) -> list[int]:
    found = http.get(f"{service.url}/api/sessions/{session}/events", params={"limit": 500}).json()["items"]
    return [each["cut"] for each in found if each["type"] == "epoch" and each["cut"] > 1]


def named(entry: dict[str, Any]) -> set[int]:
    return {int(number) for number in re.findall(r"quokka_(\d+)", entry["text"])}


@pytest.mark.parametrize("flow", ["whole", "streamed", "two replicas"])
@pytest.mark.parametrize("dialect", WIRES)
def test_each_cut_has_one_entry_of_exactly_what_it_took(
    replicas: tuple[Service, Service], model: Model, http: httpx.Client, key: str, dialect: str, flow: str
) -> None:
    client = InjectingClient(
        replicas[0], model, key, dialect, first_request(dialect),
        headers={"x_tersely_strategy": TRIM}, http=http, streams=flow == "streamed",
    )  # fmt: skip
    for number in range(1, 6):
        client.say(text(number))
    assert entries(http, replicas[0], client.session) == [], "nothing has left the context"
    for number in range(6, 21):
        client.service = replicas[number % 2 if flow == "two replicas" else 0]
        client.say(text(number))
    at = cuts(http, replicas[0], client.session)
    assert len(at) >= 3
    found = entries(http, replicas[0], client.session, len(at))
    assert [(each["first_seq"], each["last_seq"]) for each in found] == [
        (first, cut - 1) for first, cut in zip([1, *at], at, strict=False)
    ]
    for each in found:
        assert named(each) == set(range((each["first_seq"] + 1) // 2, each["last_seq"] // 2 + 1))
    read = [
        name
        for received in list(model.state.received)
        if "X-Script" not in received.headers and key.encode() in received.body
        for name in set(re.findall(rb"quokka_\d+", received.body))
    ]
    assert len(read) <= 1.5 * len(set(read)), "messages are read again and again"


@pytest.mark.parametrize("strategy", OTHERS)
def test_other_strategies_write_memory_only_when_the_context_is_cleared(
    replicas: tuple[Service, Service], model: Model, http: httpx.Client, key: str, strategy: str
) -> None:
    service = replicas[0]
    client = InjectingClient(
        service, model, key, "anthropic", first_request("anthropic"),
        headers={"x_tersely_strategy": OTHERS[strategy], "x_tersely_epoch": SMALL}, http=http,
    )  # fmt: skip
    for number in range(1, 21):
        client.say(text(number))
    if strategy != "full":
        assert cuts(http, service, client.session)
    assert entries(http, service, client.session) == []
    for _ in range(2):
        http.post(f"{service.url}/api/sessions/{client.session}/clear").raise_for_status()
        (entry,) = entries(http, service, client.session)
        assert named(entry) == set(range(1, 21))


@pytest.mark.parametrize("between", OTHERS)
def test_a_strategy_in_between_has_no_message_told_twice(
    replicas: tuple[Service, Service], model: Model, http: httpx.Client, key: str, between: str
) -> None:
    client = InjectingClient(
        replicas[0], model, key, "openai_chat", first_request("openai_chat"), headers={}, http=http
    )
    for number in range(1, 37):
        strategy = OTHERS[between] if number // 9 % 2 else TRIM
        client.service = replicas[number % 2]
        client.say(text(number), x_tersely_strategy=strategy)
    http.post(f"{replicas[0].url}/api/sessions/{client.session}/clear").raise_for_status()
    found = entries(http, replicas[0], client.session)
    numbers = [number for each in found for number in named(each)]
    assert sorted(numbers) == list(range(1, 37))
    assert len(found) > 1
