"""A client that begins the reply itself and then sends both as one message goes on in its session."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import Answered, post
from tests.support.rows import query
from tests.support.services import Service
from tests.support.upstreams import Model

PATHS = {
    "anthropic": "/v1/messages",
    "openai_chat": "/v1/chat/completions",
    "gemini": "/v1beta/models/gemini-2.5-pro:generateContent",
}
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "full": {"X_Tersely_Strategy": "full"},
    "cut at once": {"X_Tersely_Strategy": '{"name": "slim", "recent_turns": 1}', "X_Tersely_Epoch": "every_request"},
}
History = list[tuple[str, str]]


def request(dialect: str, history: History) -> bytes:
    if dialect == "gemini":
        roles = {"user": "user", "assistant": "model"}
        return json.dumps({"contents": [{"role": roles[r], "parts": [{"text": t}]} for r, t in history]}).encode()
    messages = [{"role": role, "content": text} for role, text in history]
    return json.dumps({"model": "claude-x", "max_tokens": 99, "messages": messages}).encode()


def texts_of(dialect: str, body: bytes) -> list[str]:
    sent = json.loads(body)
    if dialect == "gemini":
        return ["".join(part.get("text", "") for part in each["parts"]) for each in sent["contents"]]
    contents = [each["content"] for each in sent["messages"] if each["role"] != "system"]
    return [c if isinstance(c, str) else "".join(block.get("text", "") for block in c) for c in contents]


class Client:
    """One that begins each reply with ``prefill`` and keeps prefill and reply as one message, or as two."""

    def __init__(self, service: Service, model: Model, key: str, dialect: str, *, joins: bool = True) -> None:
        self.service, self.model, self.key, self.dialect, self.joins = service, model, key, dialect, joins
        self.history: History = []

    async def ask(self, text: str, prefill: str, reply: str, *, shown: str | None = None, **headers: Any) -> Answered:
        self.model.script(self.key, ScriptedReply(message={"role": "assistant", "content": reply}))
        history = [*self.history, ("user", text), ("assistant", prefill)]
        answer = await post(
            self.service, request(self.dialect, history), path=PATHS[self.dialect], X_Script=self.key, **headers
        )
        assert answer.status == 200, answer.body
        shown = reply if shown is None else shown
        echo = [("assistant", prefill + shown)] if self.joins else [("assistant", prefill), ("assistant", shown)]
        self.history += [("user", text), *echo]
        return answer


async def stored(service: Service, session: str) -> list[tuple[int, str, str, str]]:
    sql = "SELECT turn, role, status, raw FROM messages WHERE session_id = $1 AND turn > 0 ORDER BY place, seq"
    return [
        (row["turn"], row["role"], row["status"], row["raw"].decode()) for row in await query(service, sql, session)
    ]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_prefilled_reply_continues_its_session(
    service: Service, model: Model, key: str, dialect: str, joins: bool, settings: str
) -> None:
    client = Client(service, model, key, dialect, joins=joins)
    answers = [
        await client.ask(f"Question {n} of {key}", "{", f'"number": {n}, "of": "{key}"}}', **SETTINGS[settings])
        for n in range(4)
    ]
    assert {answer.session for answer in answers} == {answers[0].session}
    assert [answer.headers["x-tersely-session-source"] for answer in answers] == ["new", *["lineage"] * 3]
    live = [each for each in await stored(service, answers[0].session) if each[2] == "live"]
    assert [each[0] for each in live if each[1] == "user"] == [1, 2, 3, 4]
    sent = texts_of(dialect, model.last.body)
    assert sent[-1] == "{"
    if settings != "cut at once":
        assert "".join(sent) == "".join(text for _, text in client.history[: -1 if joins else -2]) + "{" * joins + (
            "" if joins else "{"
        )


@pytest.mark.parametrize("dialect", PATHS)
async def test_a_log_tag_of_a_prefilled_reply_goes_back_to_the_model(
    service: Service, model: Model, key: str, dialect: str
) -> None:
    client = Client(service, model, key, dialect)
    first = await client.ask(f"One {key}", "It is", " red.\n<terse>asked; red</terse>", shown=" red.")
    assert b"<terse>" not in first.body
    second = await client.ask("Two", "It is", " blue.")
    assert second.session == first.session
    assert "It is red.\n<terse>asked; red</terse>" in texts_of(dialect, model.last.body)
    terse = await query(service, "SELECT text FROM terse WHERE session_id = $1 ORDER BY turn", first.session)
    assert b"asked; red" in [row["text"] for row in terse]


@pytest.mark.parametrize("dialect", ["anthropic", "openai_chat"])
async def test_a_host_that_repeats_the_prefill(service: Service, model: Model, key: str, dialect: str) -> None:
    client = Client(service, model, key, dialect)
    first = await client.ask(f"One {key}", "It is", f"It is red, {key}.", shown=f" red, {key}.")
    second = await client.ask("Two", "It is", f"It is blue, {key}.", shown=f" blue, {key}.")
    assert second.session == first.session


async def test_a_prefilled_reply_under_a_session_id_is_stored_once(service: Service, model: Model, key: str) -> None:
    client = Client(service, model, key, "anthropic")
    for n in range(3):
        await client.ask(f"Question {n}", "It is", f" number {n}.", X_Tersely_Session=key)
    rows = await stored(service, key)
    assert [each[1] for each in rows] == ["user", *["assistant"] * 3] * 3
    assert [each[1] for each in rows if each[2] == "live"] == ["user", "assistant"] * 2 + ["user", *["assistant"] * 2]


async def test_prefills_of_two_conversations_stay_apart(service: Service, model: Model, key: str) -> None:
    both = [Client(service, model, key, "anthropic") for _ in range(2)]
    first = [await client.ask(f"One {key}", "It is", f" colour {n}.") for n, client in enumerate(both)]
    second = [await client.ask("Two", "It is", f" number {n}.") for n, client in enumerate(both)]
    assert first[0].session != first[1].session
    assert [each.session for each in first] == [each.session for each in second]


async def test_a_prefilled_conversation_is_no_edited_one(service: Service, model: Model, key: str) -> None:
    """No call starts an epoch because of its prefill."""
    client = Client(service, model, key, "anthropic")
    answers = [await client.ask(f"Question {n} of {key}", "It is", f" number {n}.") for n in range(4)]
    (row,) = await query(service, "SELECT edits, epoch FROM sessions WHERE id = $1", answers[0].session)
    assert (row["edits"], len({answer.headers["x-tersely-epoch"] for answer in answers})) == (0, 1)
