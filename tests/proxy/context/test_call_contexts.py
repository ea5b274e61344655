"""`GET /api/sessions/{id}/calls/{n}/context` gives what the model was sent, byte for byte, for every call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from tersely.dialects.wire import raw_json
from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tersely.service.context.sent_contexts import body_parts
from tersely.service.sessions.call_infos import ALTERED, DELETED
from tersely.store.history.sent_contexts import VERSION, SentContext, encode
from tersely.strategies.presets import STRATEGIES
from tests.conftest import Database
from tests.support.conversations import KINDS, Conversation, script
from tests.support.loop_time import callback_times
from tests.support.rows import query as look
from tests.support.services import Service, serve
from tests.support.upstreams import Model, scripted

DIALECTS = {
    "chat": "openai_chat",
    "anthropic": "anthropic",
    "gemini": "gemini",
    "code": "gemini_gca",
    "responses": "openai_responses",
}


@pytest.fixture(scope="module")
def answering() -> Iterator[Model]:
    """A scripted model that answers each marked question."""
    with scripted() as running:
        running.state.script = script
        yield running


@pytest.fixture(scope="module")
def fronting(store: Database, answering: Model) -> Iterator[Service]:
    """A service in front of it whose epochs are short."""
    with serve(store, answering.url, epoch='{"stride": 2}') as running:
        yield running


def dialect_of(kind: str) -> str:
    """The dialect of a kind of conversation."""
    return DIALECTS[kind.split()[0]]


async def get(service: Service, path: str) -> bytes:
    """The body of an answer under ``/api``."""
    async with aiohttp.ClientSession() as http, http.get(f"{service.url}/api{path}") as response:
        body = await response.read()
        assert response.status == 200, body
        return body


async def post(service: Service, path: str) -> int:
    async with aiohttp.ClientSession() as http, http.post(f"{service.url}/api{path}", json={}) as response:
        return response.status


class Recorder:
    """Notes what the upstream received for each call of a session, and compares it with the API."""

    def __init__(self, service: Service, model: Model, dialect: str) -> None:
        self.service, self.model, self.dialect = service, model, dialect
        self.sent: dict[int, bytes] = {}
        self.session = ""

    async def note(self, session: str) -> None:
        """Note the newest request as that of the session's newest call, and compare."""
        self.session = session
        (row,) = await look(self.service, "SELECT max(number) AS number FROM calls WHERE session_id = $1", session)
        self.sent[row["number"]] = self.model.last.body
        await self.compare(row["number"])

    async def compare(self, number: int) -> dict[str, bytes]:
        """The members of the API's answer about a call, which must give what was sent."""
        body = await get(self.service, f"/sessions/{self.session}/calls/{number}/context")
        members = raw_json.split_object(body)
        assert members["exact"] == b"true", members["reason"]
        elements, instructions, tools = body_parts(self.sent[number], self.dialect)
        assert raw_json.split_array(members["messages"]) == elements
        assert members["instructions"] == (instructions or b"null")
        assert (members["tools"], members["tools_reason"]) == (tools or b"[]", b"null")
        lines = json.loads(members["lines"])
        (row,) = await look(
            self.service,
            "SELECT count(*) AS stored FROM messages m JOIN calls c USING (tenant_id, session_id) "
            "WHERE c.number = $2 AND session_id = $1 AND m.seq <= c.last_seq",
            self.session,
            number,
        )
        assert len([line for line in lines if line["seq"] is not None]) == row["stored"]
        covered = {line["index"] for line in lines if line["index"] is not None}
        assert covered == set(range(len(elements)))
        return members

    async def compare_all(self) -> int:
        """Every call so far still gives what it sent. Return how many calls there are."""
        for number in self.sent:
            await self.compare(number)
        return len(self.sent)


async def session_of(service: Service, name: str) -> str:
    """The session that holds a conversation's first question."""
    rows = await look(
        service, "SELECT DISTINCT session_id FROM messages WHERE position($1::bytea IN raw) > 0", f"Q:{name}:".encode()
    )
    return str(rows[0]["session_id"])


@pytest.mark.parametrize("strategy", [*STRATEGIES])
@pytest.mark.parametrize("kind", KINDS)
async def test_call_context_equals_the_request_to_the_model(
    fronting: Service, answering: Model, kind: str, strategy: str
) -> None:
    talk = Conversation(url=fronting.url, kind=kind)
    noted = Recorder(fronting, answering, dialect_of(kind))
    async with aiohttp.ClientSession(headers={"X-Tersely-Strategy": strategy}) as http:
        for number in range(6):
            got = await talk.ask(http)
            assert got.has_ended, got
            await noted.note(await session_of(fronting, talk.name))
            if number == 3:
                assert await post(fronting, f"/sessions/{noted.session}/undo") in {200, 409}
    await noted.compare_all()
    assert await post(fronting, f"/sessions/{noted.session}/clear") in {200, 201, 202, 204}
    await noted.compare_all()


async def test_removed_messages_are_not_reconstructed(fronting: Service, answering: Model) -> None:
    talk = Conversation(url=fronting.url, kind="chat")
    noted = Recorder(fronting, answering, "openai_chat")
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            await talk.ask(http)
            await noted.note(await session_of(fronting, talk.name))
        url = f"{fronting.url}/api/sessions/{noted.session}/turns/t1"
        async with http.delete(url) as response:
            assert response.status == 204
    shown_context = json.loads(await get(fronting, f"/sessions/{noted.session}/calls/3/context"))
    assert shown_context["exact"] is False
    assert shown_context["messages"] is None
    assert "deleted" in shown_context["reason"]


@pytest.mark.parametrize(
    "element",
    [
        {1: ((0, 0), False, [0] * 2)},  # two messages, of which there is one
        {1: ((0, 0, 0, 0), False, [0])},
        {1: ((b"x" * 1024,), False, [0] * 300_000)},
        {1: ((b"x" * 1024,), False, [-1] * 300_000)},
        {1: 300_000},
        {1: ((1,), False, [0])},
        [1, 0, b"", [0, 5, -(2**63), 2**64 - 1]],
        msgspec.Raw(b"\x91" * 100_000),
        [1, 0, b"", [], "", [], False, msgspec.Raw(b"\x91" * 100_000)],
        {1: msgspec.Raw(b"\x91" * 100_000)},
    ],
)
async def test_descriptions_that_no_call_had_are_refused(fronting: Service, answering: Model, element: object) -> None:
    """A document that is imported may have any."""
    talk = Conversation(url=fronting.url, kind="chat")
    async with aiohttp.ClientSession() as http:
        assert (await talk.ask(http)).has_ended
    session = await session_of(fronting, talk.name)
    sent = SentContext(
        version=VERSION, dialect="openai_chat", blocks=(), rest=msgspec.msgpack.encode([element]), instructions=b"",
        layers=(), rounds=(), checksum=1, count=1,
    )  # fmt: skip
    change = "UPDATE calls SET sent = $2 WHERE session_id = $1 RETURNING number"
    await look(fronting, change, session, encode(sent))
    members = json.loads(await get(fronting, f"/sessions/{session}/calls/1/context"))
    assert members["messages"] is None
    assert members["reason"] in {ALTERED, DELETED}


@pytest.mark.parametrize("count", [1, 999_999])
async def test_no_callback_is_long_for_a_description_of_a_million_elements(
    fronting: Service, answering: Model, count: int
) -> None:
    """Few bytes of an imported description may stand for very many messages: all of them one, or of no session."""
    talk = Conversation(url=fronting.url, kind="chat")
    async with aiohttp.ClientSession() as http:
        assert (await talk.ask(http)).has_ended
    session = await session_of(fronting, talk.name)
    runs = [{1: count}] * (999_999 // count)
    sent = SentContext(
        version=VERSION, dialect="openai_chat", blocks=(), rest=msgspec.msgpack.encode(runs), instructions=b"",
        layers=(), rounds=(), checksum=1, count=999_999,
    )  # fmt: skip
    change = "UPDATE calls SET sent = $2 WHERE session_id = $1 RETURNING number"
    await look(fronting, change, session, encode(sent))
    with callback_times(fronting) as times:
        members = json.loads(await get(fronting, f"/sessions/{session}/calls/1/context"))
    assert members["messages"] is None
    assert times.worst[0] < 0.2, times.worst  # freeing a million objects takes half of it


async def test_history_with_another_spelling_is_recognised(store: Database) -> None:
    """Clients write spaces, escapes and cache marks differently from call to call: the bytes are those of the call."""
    with scripted() as model, serve(store, model.url, instructions="off") as service:
        noted = Recorder(service, model, "anthropic")
        history: list[dict[str, Any]] = []
        async with aiohttp.ClientSession() as http:
            for number in range(5):
                words = f"frage über {number} " + "wörter " * 40
                mark = {"cache_control": {"type": "ephemeral"}}
                text: dict[str, Any] = {"type": "text", "text": words}
                question = {"role": "user", "content": [{**text, **mark}]}
                body = {"model": "claude-sonnet-4-5", "max_tokens": 50, "messages": [*history, question]}
                model.script("k", ScriptedReply(message={"role": "assistant", "content": f"answer {number}"}))
                data = json.dumps(body, ensure_ascii=bool(number % 2), indent=number or None).encode()
                headers = {"x-script": "k", "content-type": "application/json", "anthropic-version": "2023-06-01"}
                async with http.post(f"{service.url}/v1/messages", data=data, headers=headers) as response:
                    reply = json.loads(await response.read())
                    session = response.headers["x-tersely-session"]
                await noted.note(session)
                history += [{"role": "user", "content": [text]}, {"role": "assistant", "content": reply["content"]}]
        assert await noted.compare_all() == 5


async def test_another_process_gives_the_same(store: Database, answering: Model) -> None:
    talk = Conversation(url="", kind="chat stream")
    sent: dict[int, bytes] = {}
    for _ in range(3):
        with serve(store, answering.url) as service:
            talk.url = service.url
            noted = Recorder(service, answering, "openai_chat")
            noted.sent = sent
            async with aiohttp.ClientSession() as http:
                for _ in range(2):
                    await talk.ask(http)
                    await noted.note(await session_of(service, talk.name))
            assert await noted.compare_all() == len(sent)
    assert [*sent] == [1, 2, 3, 4, 5, 6]


async def test_calls_have_their_cost(fronting: Service, answering: Model) -> None:
    talk = Conversation(url=fronting.url, kind="chat")
    async with aiohttp.ClientSession(headers={"user-agent": "claude-cli/2.1 (external)"}) as http:
        for _ in range(2):
            await talk.ask(http)
    session = await session_of(fronting, talk.name)
    page = json.loads(await get(fronting, f"/sessions/{session}/calls"))
    assert [call["number"] for call in page["items"]] == [1, 2]
    for call in page["items"]:
        assert call["client"] == "claude-code"
        assert call["money"]["sent"] > 0
        assert call["money"]["saved"] == pytest.approx(call["money"]["full"] - call["money"]["sent"], abs=1e-5)
        assert call["overhead_ms"] > 0
        assert call["request_id"]
        assert {layer["name"] for layer in call["layers"]} >= {"instructions", "tail"}
    listed = json.loads(await get(fronting, f"/sessions/{session}"))
    assert listed["title"].startswith("Q:")
    assert listed["client"] == "claude-code"
    assert listed["models"] == ["gpt-4o-mini"]
    assert listed["money"]["sent"] == pytest.approx(sum(call["money"]["sent"] for call in page["items"]), abs=1e-5)
    report = json.loads(await get(fronting, "/savings?by=client"))
    (row,) = [each for each in report["items"] if each["key"] == "claude-code"]
    assert row["calls"] == 2
    assert row["money"]["sent"] == pytest.approx(listed["money"]["sent"], abs=1e-5)


async def test_context_of_a_shortened_retry_is_the_answered_one(store: Database) -> None:
    """Of an overflow and the smaller request after it, the call shows the request that the model answered."""
    words = "the quick brown fox jumps over the lazy dog " * 30
    history: list[dict[str, Any]] = []
    for number in range(40):
        history += [{"role": "user", "content": f"{number} {words}"}, {"role": "assistant", "content": words}]
    refusal = {"error": {"message": "maximum context length is 4000 tokens", "code": "context_length_exceeded"}}
    with scripted() as model, serve(store, model.url, instructions="off") as service:
        model.script(
            "k",
            ScriptedReply(status=400, body=json.dumps(refusal).encode()),
            ScriptedReply(message={"role": "assistant", "content": "it fits"}),
        )
        noted = Recorder(service, model, "openai_chat")
        body = {"model": "gpt-4o", "user": "k", "messages": [*history, {"role": "user", "content": "last"}]}
        async with aiohttp.ClientSession() as http, http.post(f"{service.url}/v1/chat/completions", json=body) as got:
            assert got.status == 200
            assert len(model.requests("k")) == 2
            await noted.note(got.headers["x-tersely-session"])
        members = await noted.compare(1)
        kept = {line["kept"] for line in json.loads(members["lines"])}
        assert "added" in kept
        assert kept & {"terse", "left_out"}


@pytest.mark.parametrize("strategy", ["full", "slim"])
async def test_context_of_a_live_call_equals_the_request_to_the_model(
    store: Database, answering: Model, strategy: str
) -> None:
    with serve(store, answering.url, live_sessions="64", epoch='{"stride": 2}') as service:
        talk = Conversation(url=service.url, kind="chat")
        noted = Recorder(service, answering, "openai_chat")
        async with aiohttp.ClientSession(headers={"X-Tersely-Strategy": strategy}) as http:
            for _ in range(7):
                assert (await talk.ask(http)).has_ended
                await noted.note(await session_of(service, talk.name))
        await noted.compare_all()


def script_with_tags(received: ReceivedRequest) -> ScriptedReply | None:
    """Answer each question at some length, and end with a tag that the client does not see."""
    reply = script(received)
    if reply is None or not (message := reply.message) or not message["content"]:
        return reply
    content = f"{message['content']} {'at some length ' * 8}<terse>{message['content']}</terse>"
    return replace(reply, message={**message, "content": content})


@pytest.mark.parametrize("live_sessions", ["off", "64"])
@pytest.mark.parametrize("kind", ["chat", "chat stream", "anthropic", "gemini", "responses"])
async def test_context_with_tags_equals_the_request_to_the_model(
    store: Database, kind: str, live_sessions: str
) -> None:
    """Descriptions refer to the model's views of replies: they repeat neither the tags nor the words."""
    with (
        scripted() as model,
        serve(store, model.url, live_sessions=live_sessions, epoch='{"low": 50000, "high": 90000}') as service,
    ):
        model.state.script = script_with_tags
        talk = Conversation(url=service.url, kind=kind)
        noted = Recorder(service, model, dialect_of(kind))
        async with aiohttp.ClientSession(headers={"X-Tersely-Strategy": "slim"}) as http:
            for _ in range(7):
                assert (await talk.ask(http)).has_ended
                await noted.note(await session_of(service, talk.name))
        # The model sees the tags of its earlier replies.
        assert b"<terse>the answer" in model.last.body
        assert await noted.compare_all() == 7
        rows = await look(
            service,
            "SELECT sent AS raw FROM calls WHERE session_id = $1 UNION ALL "
            "SELECT raw FROM attributes WHERE session_id = $1 AND kind = 'sent'",
            noted.session,
        )
        told = [row["raw"] for row in rows if b"<terse>the answer" in row["raw"] or b"at some length" in row["raw"]]
        assert not told, told[:2]


@pytest.mark.parametrize("kind", ["chat", "anthropic", "gemini", "responses"])
async def test_instructions_of_the_client_are_never_called_left_out(
    fronting: Service, answering: Model, kind: str
) -> None:
    """Most dialects send them beside the list of messages."""
    instructions = "You are a careful engineer."
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": (
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": "hi"}],
            },
        ),
        "anthropic": (
            "/v1/messages",
            {"model": "m", "max_tokens": 9, "system": instructions, "messages": [{"role": "user", "content": "hi"}]},
        ),
        "gemini": (
            "/v1beta/models/m:generateContent",
            {
                "systemInstruction": {"parts": [{"text": instructions}]},
                "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            },
        ),
        "responses": ("/v1/responses", {"model": "m", "instructions": instructions, "input": "hi"}),
    }
    path, body = bodies[kind]
    headers = {"X-Tersely-Session": f"told-{kind}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{fronting.url}{path}", json=body) as response,
    ):
        assert response.status == 200, await response.text()
    shown_context = json.loads(await get(fronting, f"/sessions/told-{kind}/calls/1/context"))
    kept = {line["role"]: (line["kept"], line["reason"]) for line in shown_context["lines"] if line["seq"] is not None}
    assert {role: kept for role, (kept, _) in kept.items()} == {"system": "full", "user": "full"}
    assert ("beside the messages" in kept["system"][1]) == (kind != "chat")


TOOL = {"type": "function", "function": {"name": "read_é", "description": "reads", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("live_sessions", ["256", "off"])
async def test_tools_of_a_call_are_given_back_with_the_added_ones_named(store: Database, live_sessions: str) -> None:
    with (
        scripted() as model,
        serve(store, model.url, epoch='{"high": 1500, "low": 500}', live_sessions=live_sessions) as service,
    ):
        history: list[dict[str, Any]] = []
        noted = Recorder(service, model, "openai_chat")
        own = []
        async with aiohttp.ClientSession() as http:
            for number in range(8):
                history.append({"role": "user", "content": f"{number} tools of {live_sessions} " + "word " * 300})
                tools = {"tools": [TOOL]} if number != 6 else {}
                async with http.post(
                    f"{service.url}/v1/chat/completions", json={"model": "m", "messages": history, **tools}
                ) as got:
                    assert got.status == 200
                    history.append((await got.json())["choices"][0]["message"])
                    await noted.note(got.headers["X-Tersely-Session"])
                own.append(json.loads((await noted.compare(number + 1))["own_tools"]))
        await noted.compare_all()
        assert own[0] == []
        assert own[-1] == own[6] == ["context_search"]
        await look(service, "DELETE FROM attributes WHERE session_id = $1 AND kind = 'tools'", noted.session)
        context = json.loads(await get(service, f"/sessions/{noted.session}/calls/8/context"))
        assert (context["tools"], "deleted" in context["tools_reason"]) == (None, True), "nothing is guessed"
