"""Messages that were dropped, taken back, removed, rewritten or cleared go upstream no more, in whatever form they were
kept.

Every turn has names of its own: one is in the question, in the model's call and in what it gets back, the other one
only in the answer. Whatever speaks of a turn (summary, log, index, digest, state) quotes one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.api.conftest import Api, serve
from tests.conftest import Database
from tests.support.upstreams import MODEL, Model, scripted

Message = dict[str, Any]

STRATEGIES: dict[str, dict[str, object]] = {
    "full": {"name": "full"},
    "slim": {"name": "slim", "recent_turns": 1},
    "window": {"name": "window", "context_size": 2},
    "trim": {"name": "trim", "max_context_turns": 3},
    "compact": {"name": "compact", "max_tokens": 1_500, "keep_recent_tokens": 400, "tool_call_cutoff": 1},
    "digest": {"name": "compact", "max_tokens": 9_000, "tool_call_cutoff": 1, "tool_summary_strategy": "heuristic"},
    "tiered": {"name": "tiered", "total_budget": 1_500, "working_budget": 500, "working_age": 0},
}
POLICIES: dict[str, object] = {
    "auto": {"high": 1_500, "low": 800},
    "every_request": "every_request",
    "stride": {"stride": 2},
}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
NAMES = re.compile(rb"(?:quokka|wombat)_\d\d")
PAD = "and then some more words about it. " * 12
# Of turn 2, which no act here hides. A turn is a question, a call, its result and an answer.
PINNED, PINNED_NAME = 5, "quokka_02"


def question_name(turn: int) -> str:
    return f"quokka_{turn:02}"


def answered(turn: int) -> str:
    return f"wombat_{turn:02}"


def names(*turns: int) -> set[str]:
    return {name for turn in turns for name in (question_name(turn), answered(turn))}


class Chat:
    """A client of one session, which sends its whole history again with each call, or only what is new."""

    def __init__(self, api: Api, model: Model, session: str, *, resends: bool) -> None:
        self.api = api
        self.model = model
        self.session = session
        self.resends = resends
        self.history: list[Message] = []
        self.sent: list[set[str]] = []

    async def do(self, method: str, path: str, **body: Any) -> Any:
        answer = await self.api.http.request(method, f"/api/sessions/{self.session}{path}", **body)
        assert answer.is_success, answer.text
        return answer

    async def send(self, reply: Message) -> None:
        """Ask the model, which says ``reply``; note the names that it was sent."""
        self.model.script(self.session, ScriptedReply(message=reply))
        messages = self.history if self.resends else self.history[-1:]
        body = {"model": MODEL, "user": self.session, "tools": TOOLS, "messages": messages}
        headers = {"x-tersely-session": self.session}
        answer = await self.api.http.post("/v1/chat/completions", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tersely-session"] == self.session
        self.history.append(answer.json()["choices"][0]["message"])
        self.sent.append({name.decode() for name in NAMES.findall(self.model.requests(self.session)[-1].body)})

    async def turn(self, number: int) -> None:
        """A question, a call with its result, an answer."""
        call = {"name": "read", "arguments": json.dumps({"path": f"src/{question_name(number)}.py"})}
        calls = [{"id": f"c{number}", "type": "function", "function": call}]
        self.history.append({"role": "user", "content": f"please see to {question_name(number)}. {PAD}"})
        await self.send({"content": None, "tool_calls": calls})
        text = f"def {question_name(number)}(): ...\n{PAD}"
        self.history.append({"role": "tool", "tool_call_id": f"c{number}", "content": text})
        await self.send(reply_message(number))

    async def act(self, act: str) -> set[str]:
        """Do it to a session of eight turns; the names that have to be gone then."""
        match act:
            case "drop":
                await self.do("POST", "/turns/t5/drop")
                return names(5)
            case "undo":
                await self.do("POST", "/undo")
                await self.do("POST", "/undo")
                return names(7, 8)
            case "remove":
                await self.do("DELETE", "/turns/t5")
                return names(5)
            case "remove by command":
                await self.do("POST", "/commands", json={"text": "/message remove t5"})
                return names(5)
            case "edit":
                self.history = self.history[: 4 * 4]
                await self.turn(15)
                return names(5, 6, 7, 8)
            case "regenerate":
                self.history.pop()
                await self.send({"content": "rather wombat_18"})
                return {answered(8)}
            case _:
                await self.do("POST", "/clear")
                return names(*range(1, 9)) - {PINNED_NAME}


def reply_message(number: int) -> Message:
    """An answer, with what strategies take out of one."""
    state = f"### STATE\nGoal: {answered(number)}\nContext: none\nResolved: none\nTechnical Anchors: none\n"
    return {"content": f"{state}\nDecided to use {answered(number)}. <terse>did {answered(number)}</terse>"}


@asynccontextmanager
async def chatting(database: Database, strategy: str, policy: str, *, resends: bool) -> AsyncIterator[Chat]:
    with scripted() as model:
        async with serve(database.dsn, upstream=model.url, tools="off", instructions="off") as api:
            setting = {"id": "s", "strategy": STRATEGIES[strategy], "epoch": POLICIES[policy]}
            made = await api.http.post("/api/sessions", json=setting)
            assert made.status_code == 201, made.text
            yield Chat(api, model, "s", resends=resends)


ACTS = ["drop", "undo", "remove", "remove by command", "edit", "regenerate", "clear"]
# Every strategy with every act; policies and ways to send a history take turns.
CASES = [
    (strategy, list(POLICIES)[(row + column) % 3], act, act in {"edit", "regenerate"} or (row + column) % 2 == 0)
    for row, strategy in enumerate(STRATEGIES)
    for column, act in enumerate(ACTS)
]


@pytest.mark.parametrize(("strategy", "policy", "act", "resends"), CASES)
async def test_hidden_message_is_no_longer_sent_upstream(
    database: Database, strategy: str, policy: str, act: str, resends: bool
) -> None:
    async with chatting(database, strategy, policy, resends=resends) as chat:
        for number in range(1, 9):
            await chat.turn(number)
            if number == 4:
                await chat.do("POST", f"/messages/{PINNED}/pin")
        await chat.do("POST", "/compact")
        gone = await chat.act(act)
        before = len(chat.sent)
        for number in (21, 22, 23):
            await chat.turn(number)
        await chat.do("POST", "/compact")
        await chat.turn(24)
        # And whatever others make of what is stored.
        for other in ("full", "trim", "compact"):
            await chat.do("PATCH", "", json={"strategy": STRATEGIES[other]})
            await chat.turn(25)
        for number, seen in enumerate(chat.sent[before:]):
            assert not seen & gone, number
            assert PINNED_NAME in seen, number


async def test_an_overflow_retry_leaves_hidden_messages_out_too(database: Database) -> None:
    """A request that is over the model's window goes out as the client sent it, but for what is hidden."""
    async with chatting(database, "slim", "auto", resends=True) as chat:
        await chat.turn(1)
        await chat.turn(2)
        await chat.do("POST", "/turns/t1/drop")
        chat.history.append({"role": "user", "content": f"and then? {PAD * 40}"})
        chat.model.script("s", ScriptedReply(message=reply_message(3)))
        body = {"model": "gpt-4", "user": "s", "tools": TOOLS, "messages": chat.history, "max_tokens": 8_000}
        headers = {"x-tersely-session": "s"}
        answer = await chat.api.http.post("/v1/chat/completions", json=body, headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        sent = chat.model.requests("s")[-1].body
        assert question_name(2).encode() in sent
        assert question_name(1).encode() not in sent
