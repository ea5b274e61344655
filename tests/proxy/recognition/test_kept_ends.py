"""Clients that compact by themselves and keep the end of their history: nothing is lost, nothing is stored twice.

What they keep begins with a question, or with a reply whose question went into the summary. The shapes are those that
opencode 1.18.33 and pi 0.73.1 sent. At the next compaction of opencode the earlier summary moves behind what it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import Answered, body_of, post
from tests.support.rows import StoredMessage, messages_by_number
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model

Wire = dict[str, Any]
SMALL = '{"high": 1000, "low": 500}'
STRATEGIES = {
    "full": "full",
    "slim": '{"name": "slim", "recent_turns": 1}',
    "window": '{"name": "window", "context_size": 2}',
    "trim": '{"name": "trim", "max_context_turns": 3}',
    "compact": '{"name": "compact", "max_tokens": 1000}',
    "tiered": '{"name": "tiered", "total_budget": 1000, "working_budget": 500, "session_budget": 300}',
}
RULES = {"role": "system", "content": "You are an interactive CLI tool that helps users with software."}
TITLE = {"role": "system", "content": "You are a title generator. You output ONLY a thread title. Nothing else."}
WHAT = {"role": "user", "content": "What did we do so far?"}
GO_ON = "Continue if you have next steps, or stop and ask for clarification if you are unsure how to proceed."


def transcript(messages: list[Wire]) -> str:
    """A history as pi writes it into the request for its summary."""
    parts = []
    for message in messages:
        if message["role"] == "tool":
            parts.append(f"[Tool result]: {message['content']}")
            continue
        if message["content"]:
            parts.append(f"[{message['role'].title()}]: {message['content']}")
        if calls := message.get("tool_calls"):
            parts.append("[Assistant tool calls]: " + "; ".join(f"{each['function']['name']}()" for each in calls))
    return "\n\n".join(parts)


class Pi:
    """It sends the newest summary as a message of the user, then what it kept, then what followed."""

    headers: ClassVar = {"user_agent": "OpenAI/JS 6.26.0"}
    summarizes = "You are a context summarization assistant. Your task is to read a conversation."

    def __init__(self, service: Service, model: Model, key: str, *, streams: bool, context: str) -> None:
        self.service, self.model, self.key, self.streams, self.context = service, model, key, streams, context
        self.strategy = ""
        self.log: list[Wire] = []
        self.opening: list[Wire] = []
        self.openings: list[Wire] = []
        self.kept: list[Wire] = []
        self.compacted_at = 0
        self.session = ""

    @property
    def history(self) -> list[Wire]:
        return [*self.opening, *self.kept, *self.log[self.compacted_at :]]

    def open_with(self, summary: str) -> list[Wire]:
        begins = "The conversation history before this point was compacted into the following summary:\n\n"
        return [{"role": "user", "content": f"{begins}<summary>\n{summary}\n</summary>"}]

    async def _send(self, *messages: Wire, reply: Wire) -> Answered:
        self.model.script(self.key, ScriptedReply(message=reply))
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.streams else {}
        body = body_of(*messages, user=self.key, **stream)
        headers = {name: value.format(key=self.key) for name, value in self.headers.items()}
        if self.strategy:
            headers |= {"x_tersely_strategy": self.strategy, "x_tersely_epoch": SMALL}
        answer = await post(self.service, body, **headers)
        assert answer.status == 200, answer.body
        return answer

    async def ask(self, text: str, *, uses_tool: bool = False) -> None:
        self.log.append({"role": "user", "content": text})
        if uses_tool:
            ident = f"call_{self.key}_{len(self.log)}"
            call = {"id": ident, "type": "function", "function": {"name": "bash", "arguments": "{}"}}
            asks = {"role": "assistant", "content": None, "tool_calls": [call]}
            await self._answer(asks)
            self.log += [asks, {"role": "tool", "tool_call_id": ident, "content": "bronze-2"}]
        reply = {"role": "assistant", "content": f"Reply {len(self.model.requests(self.key))} to {text}"}
        await self._answer(reply)
        self.log.append(reply)

    async def _answer(self, reply: Wire) -> None:
        answer = await self._send(RULES, *self.history, reply=reply)
        self.session = self.session or answer.session
        assert answer.session == self.session
        if self.strategy:
            return  # the context is cut
        assert answer.context == self.context
        received = self.model.requests(self.key)[-1].request
        assert received is not None
        assert received["messages"][-len(self.history) :] == self.history, "the model got what the client sent"

    async def title(self) -> None:
        message = {"role": "user", "content": "Generate a title for this conversation:\n"}
        assert not (await self._send(TITLE, message, reply={"role": "assistant", "content": "A title"})).session

    async def compact(self, kept_from: int | None) -> None:
        """Summarise all before the message ``kept_from``; None: everything."""
        message = {
            "role": "user",
            "content": f"<conversation>\n{transcript(self.log[:kept_from])}\n</conversation>\n\nSum up.",
        }
        summary = f"Summary {len(self.openings) + 1} of {self.key}: there were questions, and all were answered."
        system = {"role": "system", "content": self.summarizes}
        assert not (await self._send(system, message, reply={"role": "assistant", "content": summary})).session
        self.kept = [] if kept_from is None else self.log[kept_from:]
        self.opening, self.compacted_at = self.open_with(summary), len(self.log)
        self.openings += self.opening


class Opencode(Pi):
    """It asks what was done, has the summary as the reply, and goes on unasked. Its session has an id."""

    headers: ClassVar = {"user_agent": "opencode/1.18.33", "x_session_id": "{key}"}
    summarizes = "You are a context summarization agent. You are given a conversation between a user and an agent."

    @override
    def open_with(self, summary: str) -> list[Wire]:
        return [WHAT, {"role": "assistant", "content": summary}]

    @override
    async def compact(self, kept_from: int | None) -> None:
        await super().compact(kept_from)
        self.log += self.opening
        self.compacted_at = len(self.log)
        await self.ask(GO_ON)


@pytest.fixture(scope="module")
def instructed(store: Database, model: Model) -> Iterator[Service]:
    """A service that gives its own words and tools to the model from the first request on."""
    with serve(store, model.url, epoch=FROM_THE_START) as running:
        yield running


def content(stored: StoredMessage) -> tuple[str, str | None]:
    return stored.role, stored.message.get("content")


# Indexes of the log: the questions are 0, 2 (with a tool call), 6 and 8.
KEPT: dict[str, tuple[int | None, ...]] = {
    "nothing": (None,),
    "the last turn": (8,),
    "three turns": (2,),
    "the last reply": (9,),
    "all but the first question": (1,),
    "the end of a turn with a tool call": (3,),
    "nothing, twice": (None, None),
    "less the second time": (1, 2),
    "less each time": (1, 2, 9),
    "nothing at last": (1, 2, None),
}

CONTEXTS = {"service": "passthrough", "instructed": "built"}


@pytest.mark.parametrize(("where", "streams"), [("service", False), ("instructed", True)], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("program", "kept"),
    [(each, kept) for each in (Opencode, Pi) for kept in KEPT],
)
async def test_turns_stay_behind_a_clients_own_compactions(
    request: pytest.FixtureRequest, model: Model, key: str, where: str, program: type[Pi], kept: str, streams: bool
) -> None:
    service: Service = request.getfixturevalue(where)
    client = program(service, model, key, streams=streams, context=CONTEXTS[where])
    for number in range(1, 5):
        await client.ask(f"Question {number} of {key}", uses_tool=number == 2)
        if number == 1:
            await client.title()
    before = [each for each in await messages_by_number(service, client.session) if each.turn]
    assert [content(each) for each in before] == [(each["role"], each["content"]) for each in client.log]
    assert [each.turn for each in before] == [1, 1, 2, 2, 2, 2, 3, 3, 4, 4]

    for number, kept_from in enumerate(KEPT[kept]):
        await client.compact(kept_from)
        await client.ask(f"Question {2 * number + 5} of {key}", uses_tool=True)
        await client.ask(f"Question {2 * number + 6} of {key}")

    page = await post(service, b"", method="GET", path=f"/api/sessions/{client.session}/messages?view=client&limit=100")
    live = [each for each in page.json["items"] if each["turn"]]
    assert [each["raw"] for each in live] == client.history
    if len(KEPT[kept]) == 1:
        turns = {each["turn"] for each in live[: len(client.opening)]}
        assert len(turns) == 1
        assert turns.isdisjoint(each["turn"] for each in live[len(client.opening) :]), "the summary has its own turn"
    stored = [each for each in await messages_by_number(service, client.session) if each.turn]
    assert [(each.seq, each.turn, content(each)) for each in stored[: len(before)]] == [
        (each.seq, each.turn, content(each)) for each in before
    ], "what was said before stays as it was"
    contents = [content(each) for each in stored]
    assert not any("<conversation>" in (text or "") or text == "A title" for _, text in contents), (
        "a side call was stored"
    )
    for message in [*client.log, *client.openings]:
        content_sent = (message["role"], message["content"])
        copies = sum((each["role"], each["content"]) == content_sent for each in client.log)
        assert (
            contents.count(content_sent) >= 1 if message in client.openings else contents.count(content_sent) == copies
        ), content_sent
    _check_turns(stored, client)


@pytest.mark.parametrize("program", [Opencode, Pi])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_every_strategy_cuts_a_history_with_a_clients_summary(
    service: Service, model: Model, key: str, program: type[Pi], strategy: str
) -> None:
    """A reply whose question went into the summary stands alone in its turn; the host refuses what it cannot read."""
    client = program(service, model, key, streams=False, context="")
    client.strategy = STRATEGIES[strategy]
    for number in range(3):
        for question in range(3):
            await client.ask(f"Question {3 * number + question} of {key}. " + "Tell me. " * 60, uses_tool=question == 1)
        await client.compact(len(client.log) - 3 if number % 2 == 0 else len(client.log) - 1)
    await client.ask(f"The last question of {key}")
    sent = json.dumps((model.requests(key)[-1].request or {})["messages"])
    assert f"The last question of {key}" in sent
    path = f"/api/sessions/{client.session}/messages?view=client&limit=200"
    page = await post(service, b"", method="GET", path=path)
    assert [each["raw"] for each in page.json["items"] if each["turn"]] == client.history


@pytest.mark.parametrize("program", [Opencode, Pi])
@pytest.mark.parametrize("verb", ["drop", "undo", "remove"])
async def test_taking_out_a_kept_turn_leaves_the_clients_summary(
    service: Service, model: Model, key: str, program: type[Pi], verb: str
) -> None:
    """Of the last turn only the reply was kept; the summary in front of it is of everything else."""
    client = program(service, model, key, streams=False, context="passthrough")
    for number in range(1, 4):
        await client.ask(f"Question {number} of {key}")
    await client.compact(5)
    api = f"/api/sessions/{client.session}"
    if program is Pi:
        await client.ask(f"Question 4 of {key}")
    kept = next(each for each in await messages_by_number(service, client.session) if each.message == client.kept[0])
    turn = f"t{kept.turn}"
    paths = {"drop": ("POST", f"{api}/turns/{turn}/drop"), "remove": ("DELETE", f"{api}/turns/{turn}")}
    method, path = paths.get(verb, ("POST", f"{api}/undo"))
    for _ in range(2 if verb == "undo" else 1):
        assert (await post(service, b"", method=method, path=path)).status in {200, 204}
    built = (await post(service, b"{}", path=f"{api}/context")).json["messages"]
    assert [each for each in built if each in client.opening] == client.opening
    assert client.kept[0] not in built


def _check_turns(stored: list[StoredMessage], client: Pi) -> None:
    """Every reply is in the turn of its question, and every new question has a turn of its own."""
    turns: dict[str, set[int]] = {}
    for each in stored:
        if each.role == "user" and each.message not in client.openings:
            turns.setdefault(each.message["content"], set()).add(each.turn)
    for each in stored:
        text = each.message.get("content") or ""
        if each.role == "assistant" and text.startswith("Reply"):
            assert each.turn in turns[text.partition(" to ")[2]]
    questions = [each["content"] for each in client.log if each["role"] == "user" and each not in client.openings]
    assert sum(map(len, turns.values())) == len(set().union(*turns.values())) == len(questions)
