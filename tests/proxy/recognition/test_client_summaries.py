"""Two clients, one tenant, equal words: each goes on from its own summary, nobody from another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import override

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import Answered, body_of, post
from tests.support.injected_clients import WIRES, first_request
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.upstreams import Model

SUMMARY = "The user asked about the lighthouse of {key}; it was answered that it is red and white. Nothing is open."
ASKED_FOR = "Please provide a concise summary of our conversation so far, capturing all that matters."  # Continue
GOES_ON = f"Here is a summary of the conversation to date:\n\n{SUMMARY}"  # LangChain

# By what a client is known, and by what a stranger.
CLIENTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "program": ({"User_Agent": "QwenCode/0.15.10 (linux; x64)"}, {"User_Agent": "ai-sdk/openai-compatible/3.0.37"}),
    "version of a runtime": (
        {"User_Agent": "OpenAI/JS 6.26.0", "X_Stainless_Runtime_Version": "v20"},
        {"User_Agent": "OpenAI/JS 6.26.0", "X_Stainless_Runtime_Version": "v22"},
    ),
    "credentials": ({"Authorization": "Bearer sk-one"}, {"Authorization": "Bearer sk-other"}),
    "installation": (
        {"X_Gemini_Api_Privileged_User_Id": "2be576bb"},
        {"X_Gemini_Api_Privileged_User_Id": "97623a1a"},
    ),
    "id": ({"X_Session_Id": "one-{key}"}, {"X_Session_Id": "other-{key}"}),
    "an id and none": ({"X_Session_Id": "one-{key}"}, {}),
    "none and an id": ({}, {"X_Session_Id": "other-{key}"}),
}


@pytest.fixture(scope="module")
def replica(store: Database, model: Model) -> Iterator[Service]:
    """Another process of the same service."""
    with serve(store, model.url) as running:
        yield running


class Client:
    def __init__(self, service: Service, model: Model, key: str, headers: dict[str, str]) -> None:
        self.service, self.model, self.key = service, model, key
        self.headers = {name: value.format(key=key) for name, value in headers.items()}
        self.history: list[Any] = []
        self.summary, self.goes_on = SUMMARY.format(key=key), GOES_ON.format(key=key)

    async def send(self, *messages: Any, reply: str) -> Answered:
        user = self.model.script(f"{self.key}-{reply}", ScriptedReply(message={"content": reply}))
        answered = await post(self.service, body_of(*messages, user=user), **self.headers)
        assert answered.status == 200, answered.body
        return answered

    async def ask(self, text: str, reply: str) -> Answered:
        answered = await self.send(*self.history, text, reply=reply)
        self.history += [text, {"role": "assistant", "content": reply}]
        return answered

    async def compact(self) -> None:
        answered = await self.send(*self.history, ASKED_FOR, reply=self.summary)
        assert "x-tersely-session" not in answered.headers
        self.history = [self.goes_on]


@pytest.mark.parametrize("known_by", list(CLIENTS))
async def test_a_stranger_begins_a_conversation_of_its_own(
    service: Service, model: Model, key: str, known_by: str
) -> None:
    ours, theirs = (Client(service, model, key, headers) for headers in CLIENTS[known_by])
    first = await ours.ask(f"What of the lighthouse of {key}?", f"It is red and white, {key}.")
    await ours.compact()

    theirs.history = [ours.goes_on]
    stranger = await theirs.ask("And what of the harbour?", f"The harbour is closed, {key}.")
    going_on = await ours.ask("And the keeper?", f"The keeper is away, {key}.")

    assert stranger.session != first.session
    assert stranger.headers["x-tersely-session-source"] == "new"
    assert going_on.session == first.session
    texts = [each.text for each in await messages_by_number(service, first.session)]
    assert not any("harbour" in text for text in texts)
    assert any("keeper" in text for text in texts)


@pytest.mark.parametrize("known_by", list(CLIENTS))
async def test_each_conversation_continues_from_its_own_summary(
    service: Service, model: Model, key: str, known_by: str
) -> None:
    both = [Client(service, model, key, headers) for headers in CLIENTS[known_by]]
    first = [
        await client.ask(f"Question {number} of {key}", f"A reply of some length, {number}")
        for number, client in enumerate(both)
    ]
    for client in both:
        await client.compact()
    second = [
        await client.ask(f"Going on with {number}", f"Another reply of some length, {number}")
        for number, client in enumerate(both)
    ]
    third = [await client.ask("Further", f"A last reply, {number}") for number, client in enumerate(both)]

    assert first[0].session != first[1].session
    for before, after, last in zip(first, second, third, strict=True):
        assert before.session == after.session == last.session


async def test_indistinguishable_conversations_start_new_sessions(service: Service, model: Model, key: str) -> None:
    both = [Client(service, model, key, {}) for _ in range(2)]
    first = [await client.ask(f"Question {n} of {key}", f"A reply to {n}") for n, client in enumerate(both)]
    for client in both:
        await client.compact()
    second = [await client.ask(f"More of {n}", f"Another reply to {n}") for n, client in enumerate(both)]
    assert len({answered.session for answered in (*first, *second)}) == 4


async def test_an_sdk_used_both_ways_is_one_client(service: Service, model: Model, key: str) -> None:
    """LlamaIndex asks for its summary synchronously, and for the rest not."""
    client = Client(service, model, key, {"User_Agent": "AsyncOpenAI/Python 2.54.0"})
    first = await client.ask(f"A question of {key}", f"A reply of some length, {key}")
    client.headers["User_Agent"] = "OpenAI/Python 2.54.0"
    await client.compact()
    client.headers["User_Agent"] = "AsyncOpenAI/Python 2.54.0"
    assert (await client.ask("More", f"More of it, {key}")).session == first.session


class WireClient(Client):
    """The same in any wire format, whole or streamed."""

    def __init__(self, dialect: str, *given: Any, streams: bool = False) -> None:
        super().__init__(*given)
        self.dialect, self.wire, self.streams = dialect, WIRES[dialect], streams

    @override
    async def send(self, *messages: Any, reply: str) -> Answered:
        self.model.script(f"{self.key}-{reply}", ScriptedReply(message=self.wire.reply(reply)))
        listed = [self.wire.user(each) if isinstance(each, str) else self._spoken(each["content"]) for each in messages]
        body, path = {**self.wire.body, **first_request(self.dialect, *listed)}, self.wire.path
        if self.streams and self.wire.member == "contents":
            path = path.replace(":generateContent", ":streamGenerateContent") + "?alt=sse"
        elif self.streams:
            body["stream"] = True
        given = {"X_Script": f"{self.key}-{reply}", "Authorization": "Bearer k", **self.headers}
        answered = await post(self.service, json.dumps(body).encode(), path=path, **given)
        assert answered.status == 200, answered.body
        return answered

    def _spoken(self, text: str) -> dict[str, Any]:
        reply = self.wire.reply(text)
        if self.wire.member == "input":
            return dict(reply["output"][0])
        return {"role": "model" if self.wire.member == "contents" else "assistant", **reply}


@pytest.mark.parametrize("flow", ["whole", "streamed", "two replicas"])
@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("known_by", ["program", "credentials"])
async def test_summaries_join_their_own_client_in_every_dialect(
    service: Service, replica: Service, model: Model, key: str, known_by: str, dialect: str, flow: str
) -> None:
    ours, theirs, late = (
        WireClient(dialect, service, model, key, headers, streams=flow == "streamed")
        for headers in (*CLIENTS[known_by], CLIENTS[known_by][1])
    )
    first = [
        await client.ask(f"Question {number} of {key}", f"A reply of some length, {number}")
        for number, client in enumerate((ours, theirs))
    ]
    for client in (ours, theirs):
        await client.compact()
        client.service = replica if flow == "two replicas" else service
    late.history = [GOES_ON.format(key=f"nobody {key}")]
    strangers = await late.ask("And what of the harbour?", f"The harbour is closed, {key}.")
    second = [
        await client.ask(f"Going on with {number}", f"Another reply of some length, {number}")
        for number, client in enumerate((ours, theirs))
    ]
    assert len({answered.session for answered in (*first, strangers)}) == 3
    assert [answered.session for answered in second] == [answered.session for answered in first]
