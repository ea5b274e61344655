"""Whatever histories a client sends, in whatever order: what it has just sent is what reaches the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tersely.fakellm.scripted import ScriptedReply
from tersely.strategies.presets import STRATEGIES
from tests.support.chat_messages import assistant, user
from tests.support.http import Answered, post
from tests.support.rows import query
from tests.support.services import Service
from tests.support.upstreams import MODEL, Model

Wire = dict[str, Any]
_numbers = itertools.count(1)

CUT = "every_request"
"""A policy under which contexts are cut as soon as the strategy wants."""


class Client:
    """A client that sends whole histories, and is answered with words of its own each time."""

    def __init__(self, service: Service, model: Model, key: str, *, is_cut: bool = False, **headers: str) -> None:
        self.service, self.model, self.key, self.headers = service, model, key, headers
        self.is_cut = is_cut
        self.session = ""

    async def send(self, history: Sequence[Wire], *, fails: bool = False) -> str:
        """The reply. ``history`` must have reached the model (of one that is cut its end), and be what is current."""
        reply = f"Reply number {next(_numbers)} to {self.key}."
        answered = ScriptedReply(status=500, body=b"{}") if fails else ScriptedReply(message={"content": reply})
        self.model.script(self.key, answered)
        answer = await self._ask(history)
        assert answer.status == (500 if fails else 200), answer.body
        sent = [each for each in json.loads(self.model.last.body)["messages"] if each["role"] != "system"]
        assert sent[-1:] == history[-1:] if self.is_cut else sent == list(history)
        self.session = answer.session
        current = [each["content"] for each in history] + ([] if fails else [reply])
        assert await self.live() == current
        return reply

    async def live(self) -> list[str]:
        """The current history, as the client knows it."""
        rows = await query(
            self.service,
            "SELECT raw FROM messages WHERE session_id = $1 AND status = 'live' AND turn > 0 ORDER BY place, seq",
            self.session,
        )
        return [json.loads(row["raw"])["content"] for row in rows]

    async def _ask(self, history: Sequence[Wire]) -> Answered:
        body = json.dumps({"model": MODEL, "user": self.key, "messages": list(history)}).encode()
        return await post(self.service, body, **self.headers)


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_message_that_was_left_behind_is_sent_when_it_comes_back(
    service: Service, model: Model, key: str, strategy: str
) -> None:
    client = Client(service, model, key, X_Tersely_Strategy=strategy)
    first = assistant(await client.send([user("one")]))
    session = client.session
    await client.send([first, user("two")])
    await client.send([user("one"), first, user("three")])
    assert client.session == session
    rows = await query(service, "SELECT status FROM messages WHERE session_id = $1 AND seq = 1", session)
    assert rows[0]["status"] == "live"


@pytest.mark.parametrize("kept_links", [1, 3, 5])
async def test_history_returning_before_the_cut_is_sent_whole(
    service: Service, model: Model, key: str, kept_links: int
) -> None:
    strategy = '{"name": "slim", "recent_turns": 1}'
    client = Client(service, model, key, is_cut=True, X_Tersely_Strategy=strategy, X_Tersely_Epoch=CUT)
    history = [user("one")]
    for number in range(4):
        history = [*history, assistant(await client.send(history)), user(f"more {number}")]
    session = client.session
    await client.send(history[:kept_links])
    assert client.session == session or kept_links == 1  # a first message alone begins a conversation


async def test_messages_left_before_the_cut_come_back_too(service: Service, model: Model, key: str) -> None:
    strategy = '{"name": "slim", "recent_turns": 3}'
    client = Client(service, model, key, is_cut=True, X_Tersely_Strategy=strategy, X_Tersely_Epoch=CUT)
    history: list[Wire] = []
    for number in range(7):
        history = [*history, user(f"question {number}")]
        history = [*history, assistant(await client.send(history))]
    session = client.session
    await client.send([*history[1:], user("without the first")])
    await client.send([*history, user("with it")])
    assert client.session == session
    (row,) = await query(service, "SELECT cut, edits FROM sessions WHERE id = $1", session)
    assert row["cut"] > 1
    assert row["edits"] == 2


# What a client makes of a history that it has had: a beginning of it, an end, or one without a message; then it goes on
# from there with words of its own, or asks for another reply.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["whole", "beginning", "end", "without one", "rewritten"]),
        st.integers(0, 9),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=2,
    max_size=7,
)


def made_of(history: list[Wire], how: str, index: int) -> list[Wire]:
    at = index % max(1, len(history))
    match how:
        case "beginning":
            return history[: at + 1]
        case "end":
            return history[at:]
        case "without one":
            return [*history[:at], *history[at + 1 :]]
        case "rewritten":
            role = history[at]["role"] if history else "user"
            return [*history[:at], {"role": role, "content": f"Other words, {next(_numbers)}."}, *history[at + 1 :]]
        case _:
            return list(history)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_every_message_of_a_request_reaches_the_model(
    service: Service, model: Model, key: str, strategy: str, named: bool, steps: list[Any]
) -> None:
    key = f"{key}-{next(_numbers)}"
    headers: dict[str, Any] = {"X_Session_Id": key} if named else {}
    client = Client(service, model, key, X_Tersely_Strategy=strategy, **headers)
    history = [user(f"Question {key}.")]
    texts = await talk(client, history, steps)
    assert await client.live() == texts


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, turns=st.integers(1, 4))
async def test_the_current_history_is_the_sent_one_after_cuts_too(
    service: Service, model: Model, key: str, steps: list[Any], turns: int
) -> None:
    key = f"{key}-{next(_numbers)}"
    strategy = '{"name": "slim", "recent_turns": 1}'
    client = Client(service, model, key, is_cut=True, X_Tersely_Strategy=strategy, X_Tersely_Epoch=CUT)
    history = [user(f"Question {key}.")]
    for _ in range(turns):
        history = [*history, assistant(await client.send(history)), user(f"Question {next(_numbers)}.")]
    texts = await talk(client, history, steps)
    assert await client.live() == texts


async def talk(client: Client, history: list[Wire], steps: list[Any]) -> list[str]:
    """Take ``steps``, each checked by `Client.send`. Return the texts of the last request and its reply, if any."""
    histories = [[*history, assistant(await client.send(history))]]
    last = histories[0]
    for back, how, index, asks, fails in steps:
        history = made_of(histories[-1 - back % len(histories)], how, index)
        if asks or not history or history[-1]["role"] == "assistant":
            history = [*history, user(f"Question {next(_numbers)}.")]
        reply = await client.send(history, fails=fails)
        last = history if fails else [*history, assistant(reply)]
        if not fails:
            histories.append(last)
    return [message["content"] for message in last]
