"""A change of strategy: the next context is what the new one makes of the whole session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise, product
from typing import Any

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.context import loading
from tersely.store.history import messages
from tersely.strategies import prompts
from tests.conftest import Database
from tests.support.dialect_wires import WIRES
from tests.support.services import Service, serve
from tests.support.upstreams import MODEL, Model

EPOCH = '{"high": 12000, "low": 8000}'
# Small enough that each of them cuts what the sessions here hold.
STRATEGIES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "slim": {"name": "slim", "recent_turns": 2},
    "window": {"name": "window", "context_size": 3},
    "trim": {"name": "trim", "max_context_turns": 5, "max_context_tokens": 16_000},
    "compact": {"name": "compact", "max_tokens": 12_000, "reserve_tokens": 100_000, "keep_recent_tokens": 3_000},
    "tiered": {"name": "tiered", "total_budget": 12_000, "session_budget": 3_000, "working_budget": 4_000},
}


def circuit(names: list[str]) -> list[str]:
    """Every ordered pair of different names once, as steps of one walk."""
    left = {name: [other for other in names if other != name] for name in names}
    walk, stack = [], [names[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def test_the_walk_has_every_ordered_pair() -> None:
    walk = circuit(list(STRATEGIES))
    pairs = set(pairwise(walk))
    assert pairs == {(one, other) for one, other in product(STRATEGIES, repeat=2) if one != other}
    assert len(walk) == len(pairs) + 1


def question(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question q{number:03} about module_{number}.py? " + "why " * 500}


def answer(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Answer a{number:03}: see module_{number}.py. " + "so " * 700}


class Agent:
    """A client that resends its whole history, or (``is_delta``) only what is new. ``is_named``: with a session id."""

    def __init__(
        self, model: Model, key: str, *, is_delta: bool = False, epoch: str = EPOCH, is_named: bool = True
    ) -> None:
        self.key, self.is_delta, self.epoch, self.is_named = key, is_delta, epoch, is_named
        self.history: list[dict[str, Any]] = []
        self._model = model

    def ask(self, service: Service, *, strategy: object = None, session: str | None = None) -> list[dict[str, Any]]:
        """The next turn; what the model was sent."""
        number = len(self.history) // 2
        self.history.append(question(number))
        sent = self.send(service, self.history[-1:] if self.is_delta else self.history, strategy, session or self.key)
        self.history.append(answer(number))
        return sent

    def send(
        self, service: Service, messages: list[dict[str, Any]], strategy: object, session: str
    ) -> list[dict[str, Any]]:
        self._model.script(self.key, ScriptedReply(message=answer(len(self.history) // 2)))
        headers = {"x-tersely-epoch": self.epoch, "authorization": "Bearer k"}
        if self.is_named:
            headers["x-tersely-session"] = session
        if strategy is not None:
            headers["x-tersely-strategy"] = json.dumps(strategy)
        body = {"model": MODEL, "user": self.key, "messages": messages}
        response = httpx.post(f"{service.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        request = self._model.requests(self.key)[-1].request
        assert request is not None
        return list(request["messages"])


@pytest.fixture(scope="module")
def services(store: Database, model: Model) -> Iterator[dict[str, Service]]:
    """One service for each strategy as the operator's setting, on one database."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(serve(store, model.url, strategy=json.dumps(strategy)))
            for name, strategy in STRATEGIES.items()
        }


Switch = Callable[[dict[str, Service], str, str], tuple[Service, object]]


def by_header(services: dict[str, Service], name: str, session: str) -> tuple[Service, object]:
    del session
    return services["full"], STRATEGIES[name]


def by_patch(services: dict[str, Service], name: str, session: str) -> tuple[Service, object]:
    service = services["full"]
    url = f"{service.url}/api/sessions/{session}"
    assert httpx.patch(url, json={"strategy": STRATEGIES[name]}).status_code in {200, 404}
    return service, None


def by_setting(services: dict[str, Service], name: str, session: str) -> tuple[Service, object]:
    del session
    return services[name], None


@pytest.mark.parametrize("is_delta", [False, True], ids=["resent", "delta"])
@pytest.mark.parametrize("switch", [by_header, by_patch, by_setting])
def test_the_first_context_after_a_switch_is_that_of_a_session_which_had_the_strategy(
    services: dict[str, Service], model: Model, key: str, switch: Switch, is_delta: bool
) -> None:
    agent = Agent(model, key, is_delta=is_delta)
    for _ in range(12):
        agent.ask(*place(switch, services, "full", key))
    for step, name in enumerate(circuit(list(STRATEGIES))):
        service, strategy = switch(services, name, key)
        sent = agent.ask(service, strategy=strategy)
        fresh = first_context(agent, services["full"], STRATEGIES[name], f"{key}-{step}")
        assert lacks(agent, sent, fresh) == [], f"step {step}, {name}"


def by_patch_of_rest(url: str, session: str, name: str) -> dict[str, Any]:
    changed = httpx.patch(f"{url}/api/sessions/{session}", json={"strategy": STRATEGIES[name]})
    assert changed.json()["strategy"] == STRATEGIES[name], changed.text
    return {}


def by_member(url: str, session: str, name: str) -> dict[str, Any]:
    del url, session
    return {"strategy": STRATEGIES[name]}


@pytest.mark.parametrize("name", STRATEGIES)
def test_over_rest_the_context_after_a_switch_is_that_of_a_session_which_had_the_strategy(
    services: dict[str, Service], model: Model, name: str
) -> None:
    agent, url = Agent(model, ""), services["full"].url
    for number in range(16):
        agent.history += [question(number), answer(number)]
    fresh = context_of(url, stored(url, "full", agent.history), strategy=STRATEGIES[name])
    others = [before for before in STRATEGIES if before != name]
    for before in others:
        for switch in (by_patch_of_rest, by_member):
            session = stored(url, STRATEGIES[before], agent.history[:20], agent.history[20:24], agent.history[24:])
            sent = context_of(url, session, **switch(url, session, name))
            assert lacks(agent, sent, fresh) == [], f"{before} {switch.__name__}"


def stored(url: str, strategy: object, *batches: list[dict[str, Any]]) -> str:
    """A new session with these messages; its id."""
    given = {"strategy": strategy, "epoch": json.loads(EPOCH)}
    session = str(httpx.post(f"{url}/api/sessions", json=given).json()["id"])
    for batch in batches:
        append(url, session, batch)
    return session


def lacks(agent: Agent, sent: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> list[str]:
    """Return what ``sent`` lacks of ``fresh``: the same messages as they are, and each turn by its question."""
    shown, shown_fresh = (questions_in(each, with_index=False) for each in (sent, fresh))
    return [
        *(["the same messages"] if own(agent, sent) != own(agent, fresh) else []),
        *(["the index"] if questions_in(sent, with_index=True) != set(range(len(agent.history) // 2)) else []),
        *(f"turn {number}" for number in sorted(shown_fresh - shown)),
    ]


def append(url: str, session: str, messages: list[dict[str, Any]]) -> None:
    answered = httpx.post(f"{url}/api/sessions/{session}/messages", json={"messages": messages}, timeout=60)
    assert answered.status_code == 201, answered.text


def context_of(url: str, session: str, **more: Any) -> list[dict[str, Any]]:
    built = httpx.post(f"{url}/api/sessions/{session}/context", json={"model": MODEL, **more}, timeout=60)
    assert built.status_code == 200, built.text
    return list(built.json()["messages"])


# What a session is configured as, and then as what; and how many of its 20 turns are shown whole then.
CHANGES = [
    ({"name": "slim", "recent_turns": 2}, "every_request", {"name": "slim", "recent_turns": 6}, "every_request", 6),
    ({"name": "slim", "recent_turns": 6}, "every_request", {"name": "slim", "recent_turns": 2}, "every_request", 2),
    (
        {"name": "window", "context_size": 3},
        "every_request",
        {"name": "window", "context_size": 0},
        "every_request",
        20,
    ),
    ({"name": "slim", "recent_turns": 2}, "every_request", {"name": "window", "context_size": 0}, "auto", 20),
    ({"name": "slim", "recent_turns": 2}, "every_request", {"name": "slim", "recent_turns": 2}, "auto", 20),
    ({"name": "slim"}, '{"high": 4000, "low": 2000}', {"name": "slim"}, '{"high": 90000, "low": 60000}', 20),
    ({"name": "slim"}, '{"high": 4000, "low": 2000}', {"name": "slim"}, '{"stride": 50}', 3),
    ({"name": "trim", "max_context_turns": 3}, "auto", {"name": "trim", "max_context_turns": 40}, "auto", 20),
    ({"name": "trim", "max_context_tokens": 4_000}, "auto", {"name": "trim"}, "auto", 20),
    ({"name": "compact", "keep_recent_tokens": 2_000}, "auto", {"name": "compact", "auto_compact": False}, "auto", 20),
    ({"name": "tiered", "total_budget": 5_000}, "auto", {"name": "tiered", "total_budget": 90_000}, "auto", 20),
]


@pytest.mark.parametrize("is_delta", [False, True], ids=["resent", "delta"])
@pytest.mark.parametrize(("strategy", "epoch", "other", "other_epoch", "turns"), CHANGES)
def test_context_after_a_switch_equals_the_one_without_a_switch(
    services: dict[str, Service],
    model: Model,
    key: str,
    strategy: dict[str, Any],
    epoch: str,
    other: dict[str, Any],
    other_epoch: str,
    turns: int,
    is_delta: bool,
) -> None:
    agent = Agent(model, key, is_delta=is_delta, epoch=epoch)
    for number in range(16):
        agent.history += [question(number), answer(number)]
    session = stored(services["full"].url, "full", agent.history)
    for _ in range(3):
        agent.ask(services["full"], strategy=strategy, session=session)
    agent.epoch = other_epoch
    sent = agent.ask(services["full"], strategy=other, session=session)
    shown = [text for text in own(agent, sent) if "Question" in text]
    assert len(shown) == turns, shown


def test_strategy_header_decides_each_call_by_itself(services: dict[str, Service], model: Model, key: str) -> None:
    agent = Agent(model, key, epoch="every_request")
    for _ in range(12):
        agent.ask(services["full"])
    for _ in range(4):
        few = agent.ask(services["full"], strategy={"name": "slim", "recent_turns": 2})
        assert len(own(agent, few)) == 3
        everything = agent.ask(services["full"])
        assert everything == agent.history[:-1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WIRES)
async def test_after_a_switch_the_whole_session_is_shown_in_every_dialect(
    services: dict[str, Service], model: Model, key: str, dialect: str, stream: bool
) -> None:
    wire, service = WIRES[dialect], services["full"]
    ends = [f"why why end-{number}." for number in range(10)]

    async def ask(end: str, strategy: dict[str, Any]) -> str:
        headers = {"X_Tersely_Strategy": json.dumps(strategy), "X_Tersely_Epoch": "every_request"}
        text = "Question: " + "why " * 200 + end
        answer = await wire.send(service, text, stream=stream, X_Tersely_Session=key, **headers)
        assert answer.status == 200, answer.body
        return model.last.body.decode()

    sent = [await ask(end, {"name": "slim", "recent_turns": 1}) for end in ends[:5]]
    assert ends[0] not in sent[-1]
    wide: tuple[dict[str, Any], ...] = (
        {"name": "window", "context_size": 0},
        *({"name": name} for name in ("trim", "compact", "tiered", "full")),
    )
    for number, strategy in enumerate(wide, start=5):
        shown = await ask(ends[number], strategy)
        assert [end for end in ends[: number + 1] if shown.count(end) != 1] == [], strategy


def test_of_a_session_without_end_the_newest_part_is_looked_at(
    services: dict[str, Service], model: Model, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "STALE_MESSAGES", 20)
    agent = Agent(model, key, is_delta=True, epoch="every_request")
    for _ in range(20):
        agent.ask(services["full"], strategy={"name": "slim", "recent_turns": 2, "references": 2_000})
    sent = agent.ask(services["full"], strategy={"name": "window", "context_size": 0, "references": 2_000})
    assert own(agent, sent)[-1].startswith("Question q020")
    assert 20 <= len(own(agent, sent)) <= 22
    index = json.dumps(sent[:3])
    assert "module_3.py" in index  # what is older is still known by its names


# Each of them shows more of a session than `slim` with one turn, and not all of it.
WIDER: dict[str, dict[str, Any]] = {
    "slim": {"name": "slim", "recent_turns": 5},
    "window": {"name": "window", "context_size": 5},
    "trim": {"name": "trim", "max_context_turns": 8},
    "compact": {"name": "compact", "reserve_tokens": 119_000, "keep_recent_tokens": 4_000},  # of a window of 128,000
    "tiered": {"name": "tiered", "total_budget": 9_000, "working_budget": 4_000},
}


@pytest.mark.parametrize("live_sessions", ["off", "16"])
@pytest.mark.parametrize("name", WIDER)
def test_calls_after_a_switch_extend_the_first_one(
    store: Database, model: Model, key: str, name: str, live_sessions: str
) -> None:
    """A message that the new strategy shows again stays in the context, whatever a process has cached."""
    agent = Agent(model, key, epoch='{"high": 4000, "low": 1500}', is_named=False)
    given = {"live_sessions": live_sessions}
    with serve(store, model.url, **given) as one, serve(store, model.url, **given) as other:
        for _ in range(11):
            agent.ask(one, strategy={"name": "slim", "recent_turns": 1})
        agent.epoch = '{"high": 9000, "low": 6000}'
        sent = agent.ask(one, strategy=WIDER[name])
        assert 5 < len(own(agent, sent)) < 20
        for service in (one, other):
            later = agent.ask(service, strategy=WIDER[name])
            assert later[: len(sent)] == sent
            sent = later


RULE = "<system-reminder>\nAs you answer, follow quokka rules.\n</system-reminder>"


@pytest.mark.parametrize("name", ["slim", "window", "trim", "compact", "tiered"])
@pytest.mark.parametrize("has_calls", [False, True])
def test_a_session_that_had_cut_nothing_is_looked_at_from_its_newest_part_on(
    services: dict[str, Service], model: Model, key: str, monkeypatch: pytest.MonkeyPatch, name: str, has_calls: bool
) -> None:
    monkeypatch.setattr(loading, "STALE_MESSAGES", 20)
    loaded: list[int] = []
    monkeypatch.setattr(messages, "live_from", _counting(messages.live_from, loaded))
    agent, url = Agent(model, key, is_delta=True), services["full"].url
    for number in range(30):
        agent.history += [question(number), answer(number)]
    agent.history[0]["content"] = [{"type": "text", "text": RULE}, {"type": "text", "text": "Question q000"}]
    session = stored(url, "full", agent.history)
    assert httpx.post(f"{url}/api/sessions/{session}/messages/5/pin").status_code == 200
    if has_calls:
        agent.send(services["full"], [question(30)], None, session)
    loaded.clear()
    sent = agent.send(services["full"], [question(31)], STRATEGIES[name], session)
    assert max(loaded) <= 22
    text = json.dumps(sent)
    assert text.count("follow quokka rules") == 1
    assert "Question q002" in text  # it is pinned
    assert "Question q031" in text
    assert "Question q015" not in text
    again = agent.send(services["full"], [question(32)], STRATEGIES[name], session)
    assert again[: len(sent)] == sent


def _counting(load: Any, counts: list[int]) -> Any:
    async def counted(*args: Any, **named: Any) -> Any:
        found = await load(*args, **named)
        counts.append(len(found))
        return found

    return counted


def own(agent: Agent, sent: list[dict[str, Any]]) -> list[str]:
    """The messages of the session that the model was sent as they are."""
    known = {message["content"] for message in agent.history}
    whole = (text for m in sent for text in known if m["content"].endswith(text))
    return [text[:20] for text in whole]


def questions_in(sent: list[dict[str, Any]], *, with_index: bool) -> set[int]:
    """The turns that a context tells of, in the index of names too or only elsewhere."""
    texts = (m["content"] for m in sent if with_index or not m["content"].startswith(prompts.REFERENCES_TITLE))
    text = "\n".join(texts)
    found = {int(number) for number in re.findall(r"\b(?:module_|[qa])(\d+)", text)}
    for first, last in re.findall(r"\bt(\d+)-t(\d+)\b", text):
        found |= set(range(int(first) - 1, int(last)))
    return found


def first_context(agent: Agent, service: Service, strategy: object, session: str) -> list[dict[str, Any]]:
    """The last question of ``agent`` in a session whose history is all there and has had no context yet."""
    made = httpx.post(f"{service.url}/api/sessions", json={"id": session, "strategy": "full"})
    assert made.status_code == 201, made.text
    append(service.url, session, agent.history[:-2])
    return agent.send(service, agent.history[-2:-1], strategy, session)


def place(switch: Switch, services: dict[str, Service], name: str, session: str) -> tuple[Service]:
    return (switch(services, name, session)[0],)
