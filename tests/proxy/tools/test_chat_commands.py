"""Commands in proxied chats, typed through the providers' own clients: answered, forgotten, and in no model's sight."""

from __future__ import annotations

import json
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import openai
import pytest

from tersely.dialects.clients.command_traces import MARK
from tersely.fakellm.scripted import ReceivedRequest
from tersely.service.common.auth import new_key
from tersely.store.db.connection import Database as Store
from tersely.store.ops import keys
from tests.conftest import Database
from tests.support.http import STORED, Answered, body_of, post
from tests.support.relay import relay
from tests.support.rows import messages_by_number, query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import MODEL, Model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from google import genai
    from google.genai import types


# A chat with one turn that was said: what the user says next, and what the chat answers.
Say = Callable[[str], str]


@pytest.fixture(scope="module")
def commanded(store: Database, model: Model) -> Iterator[Service]:
    """The service with commands in chats."""
    with serve(store, model.url, epoch=FROM_THE_START, chat_commands="on") as running:
        yield running


def received(model: Model, key: str) -> list[ReceivedRequest]:
    return [each for each in list(model.state.received) if each.headers.get("X-Script") == key]


def openai_chat(service: Service, headers: dict[str, str], *, streams: bool) -> Say:
    client: Any = openai.OpenAI(base_url=service.base_url, api_key="sk-upstream", max_retries=0)
    history: list[Any] = [{"role": "system", "content": "You are kind."}]

    def say(text: str) -> str:
        history.append({"role": "user", "content": text})
        options: dict[str, Any] = {"model": MODEL, "messages": history, "extra_headers": headers}
        if streams:
            wants = {"include_usage": True}
            chunks = list(client.chat.completions.create(**options, stream=True, stream_options=wants))
            assert chunks[-1].usage is not None
            assert chunks[-2].choices[0].finish_reason == "stop"
            reply = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            reply = client.chat.completions.create(**options).choices[0].message.content
        history.append({"role": "assistant", "content": reply})
        return str(reply)

    return say


def openai_responses(service: Service, headers: dict[str, str], *, streams: bool) -> Say:
    client: Any = openai.OpenAI(base_url=service.base_url, api_key="sk-upstream", max_retries=0)
    history: list[Any] = []

    def say(text: str) -> str:
        history.append({"role": "user", "content": text})
        options: dict[str, Any] = {
            "model": MODEL,
            "input": history,
            "instructions": "You are kind.",
            "extra_headers": headers,
        }
        if streams:
            with client.responses.stream(**options) as stream:
                events = list(stream)
                answer: Any = stream.get_final_response()
            deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert deltas == answer.output_text
        else:
            answer = client.responses.create(**options)
        history.extend(item.model_dump(exclude_none=True) for item in answer.output)
        return str(answer.output_text)

    return say


def anthropic_messages(service: Service, headers: dict[str, str], *, streams: bool) -> Say:
    client: Any = anthropic.Anthropic(base_url=service.url, api_key="sk-upstream", max_retries=0)
    history: list[Any] = []

    def say(text: str) -> str:
        history.append({"role": "user", "content": [{"type": "text", "text": text}]})
        options: dict[str, Any] = {"model": "claude-opus-test", "max_tokens": 99, "messages": list(history)}
        if streams:
            with client.messages.stream(**options, system="You are kind.", extra_headers=headers) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**options, system="You are kind.", extra_headers=headers)
        history.append({"role": "assistant", "content": answer.content})
        assert answer.stop_reason == "end_turn"
        return "".join(block.text for block in answer.content)

    return say


def gemini(service: Service, headers: dict[str, str], *, streams: bool) -> Say:
    client: Any = genai.Client(api_key="g-upstream", http_options=types.HttpOptions(base_url=service.url))
    options = types.GenerateContentConfig(
        http_options=types.HttpOptions(headers=headers), system_instruction="You are kind."
    )
    chat = client.chats.create(model="gemini-3-flash", config=options)

    def say(text: str) -> str:
        if not streams:
            return str(chat.send_message(text).text)
        return "".join(chunk.text or "" for chunk in chat.send_message_stream(text))

    def closing(text: str) -> str:
        assert client is not None  # a client that nobody holds closes its connections
        return say(text)

    return closing


CHATS = [openai_chat, openai_responses, anthropic_messages, gemini]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("has_id", [False, True])
@pytest.mark.parametrize("chat", CHATS)
async def test_a_command_between_two_turns(
    commanded: Service, model: Model, key: str, chat: Callable[..., Say], has_id: bool, streams: bool
) -> None:
    headers = {"X-Script": key} | ({"X-Tersely-Session": key} if has_id else {})
    say = chat(commanded, headers, streams=streams)
    say(f"first question of {key}")
    (session,) = await sessions_of(commanded, key)

    listed, missing = say("/message list"), say("/message show 7")

    assert listed.startswith(f"{MARK}\nt1 · ")
    assert f"first question of {key}" in listed
    assert missing.startswith(f"{MARK}\n")
    assert len(received(model, key)) == 1
    before = [(each.role, each.text) for each in await messages_by_number(commanded, session)]
    assert [role for role, _ in before] == ["system", "user", "assistant"]

    reply = say("second question")

    assert reply.startswith(f"I was sent {3 + (chat is openai_chat)} messages. You said: second question")
    sent = received(model, key)[-1].body
    assert MARK.encode() not in sent
    assert b"/message" not in sent
    assert await sessions_of(commanded, key) == [session]
    rows = await messages_by_number(commanded, session)
    assert [each.role for each in rows] == ["system", "user", "assistant", "user", "assistant"]
    assert [each.status for each in rows] == ["live"] * 5
    assert not [each for each in rows if MARK.encode() in each.raw or b"/message" in each.raw]


@pytest.mark.parametrize("chat", CHATS)
async def test_command_as_the_first_message(
    commanded: Service, model: Model, key: str, chat: Callable[..., Say]
) -> None:
    say = chat(commanded, {"X-Script": key}, streams=True)

    assert "no session yet" in say("/context")
    assert not received(model, key)
    assert say(f"first question of {key}").startswith(f"I was sent {1 + (chat is openai_chat)} messages")

    (session,) = await sessions_of(commanded, key)
    assert [each.role for each in await messages_by_number(commanded, session)] == ["system", "user", "assistant"]
    assert b"/context" not in received(model, key)[-1].body


@pytest.mark.parametrize("chat", CHATS)
async def test_a_turn_that_was_taken_back_is_not_sent_again(
    commanded: Service, model: Model, key: str, chat: Callable[..., Say]
) -> None:
    say = chat(commanded, {"X-Script": key}, streams=False)
    say(f"first question of {key}")
    say("a mistake")
    assert say("/undo") == f"{MARK}\nt2 was taken back."
    say("third question")

    sent = received(model, key)[-1].body
    assert f"first question of {key}".encode() in sent
    assert b"a mistake" not in sent
    assert b"/undo" not in sent
    (session,) = await sessions_of(commanded, key)
    assert {each.turn: each.status for each in await messages_by_number(commanded, session) if each.turn} == {
        1: "live",
        2: "undone",
        3: "live",
    }


async def sessions_of(service: Service, key: str) -> list[str]:
    """The sessions in which ``key`` was said."""
    rows = await query(
        service,
        "SELECT DISTINCT session_id FROM messages WHERE position($1::bytea IN raw) > 0 ORDER BY 1",
        f"first question of {key}".encode(),
    )
    return [row["session_id"] for row in rows]


async def test_command_response_is_labelled_as_a_command(commanded: Service, key: str) -> None:
    await post(commanded, body_of("hello"), X_Tersely_Session=key)
    answer = await post(commanded, body_of("  /config\n"), X_Tersely_Session=key)

    assert answer.context == "command"
    assert (answer.session, answer.headers["x-tersely-session-source"]) == (key, "header")
    assert text_of(answer) == f"{MARK}\nstrategy: slim\nepoch: {FROM_THE_START}"
    metrics = (await post(commanded, b"", path="/metrics", method="GET")).body.decode()
    assert re.search(r'tersely_chat_commands_total{command="config"} [1-9]', metrics)


def text_of(answer: Answered) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


@pytest.mark.parametrize("text", ["/contexts", "/help me", "/context\nand more", "what does /context do?", "/"])
async def test_text_that_is_no_command_goes_to_the_model(commanded: Service, model: Model, key: str, text: str) -> None:
    answer = await post(commanded, body_of(text), X_Tersely_Session=key, X_Script=key)
    assert answer.context in STORED
    assert json.loads(received(model, key)[-1].body)["messages"][-1]["content"] == text


async def test_help_is_answered_also_before_there_is_a_session(commanded: Service, model: Model, key: str) -> None:
    for history in (("/help",), ("hello", {"role": "assistant", "content": "hi"}, "/help")):
        answer = await post(commanded, body_of(*history), X_Script=key)
        assert answer.context == "command"
        assert "/context drop TURN" in text_of(answer)
    assert not received(model, key)


async def test_a_line_for_the_scratchpad_is_added(commanded: Service, model: Model, key: str) -> None:
    await post(commanded, body_of("hello"), X_Tersely_Session=key)
    for line in ("- [x] write it", "- [ ] test it"):
        answer = await post(commanded, body_of(f"/session scratchpad {line}"), X_Tersely_Session=key)
        assert line in text_of(answer)
    stored = await post(commanded, b"", path=f"/api/sessions/{key}/scratchpad", method="GET")
    assert stored.json["text"] == "- [x] write it\n- [ ] test it"
    shown = text_of(await post(commanded, body_of("/session scratchpad"), X_Tersely_Session=key))
    assert shown == f"{MARK}\n- [x] write it\n- [ ] test it"


async def test_a_parameter_of_another_strategy_names_its_owner(commanded: Service, model: Model, key: str) -> None:
    await post(commanded, body_of("hello"), X_Tersely_Session=key)
    answer = text_of(await post(commanded, body_of("/config agent_max_context_turns 30"), X_Tersely_Session=key))
    assert "max_context_turns is a parameter of trim; this session's strategy is slim" in answer
    command = answer[answer.index("/config strategy") :]
    assert "max_context_turns" in text_of(await post(commanded, body_of(command), X_Tersely_Session=key))
    session = await post(commanded, b"", path=f"/api/sessions/{key}", method="GET")
    assert session.json["strategy"] == {"name": "trim", "max_context_turns": 30}


async def test_wrong_command_gets_its_usage(commanded: Service, model: Model, key: str) -> None:
    await post(commanded, body_of("hello"), X_Tersely_Session=key)
    answer = await post(commanded, body_of("/context shut"), X_Tersely_Session=key, X_Script=key)
    assert "/context show" in text_of(answer)
    assert not received(model, key)


async def test_only_a_command_with_its_answer_is_removed(commanded: Service, model: Model, key: str) -> None:
    history = [
        "hello",
        {"role": "assistant", "content": f"{MARK}\nis what I call it"},
        "/undo",
        "/context",
        {"role": "assistant", "content": f"{MARK}\n1 messages"},
        "bye",
    ]
    await post(commanded, body_of(*history), X_Tersely_Session=key, X_Script=key)
    sent = json.loads(received(model, key)[-1].body)["messages"]
    contents = [each["content"] for each in sent if each["role"] != "system"]
    assert contents == ["hello", f"{MARK}\nis what I call it", "/undo", "bye"]


async def test_text_beside_a_command_stays(commanded: Service, model: Model, key: str) -> None:
    reminder = "<system-reminder>Today is a Tuesday.</system-reminder>"
    command = {"role": "user", "content": [{"type": "text", "text": reminder}, {"type": "text", "text": "/context"}]}
    first = await post(commanded, body_of(command), X_Script=key)
    assert first.context == "command"
    await post(commanded, body_of(command, first.json["choices"][0]["message"], "hello"), X_Script=key)
    sent = received(model, key)[-1].body
    assert b"Tuesday" in sent
    assert b"/context" not in sent


async def test_chain_of_responses_continues_from_the_providers_id(commanded: Service, model: Model, key: str) -> None:
    async def ask(text: str, previous: str | None) -> Any:
        body = json.dumps({"model": MODEL, "input": text, "previous_response_id": previous}).encode()
        return (await post(commanded, body, path="/v1/responses", X_Script=key)).json

    unknown = await ask("/context", None)
    first = await ask("hello", unknown["id"])
    assert "previous_response_id" not in json.loads(received(model, key)[-1].body)
    report = await ask("/context", first["id"])
    assert report["id"] == first["id"]


@pytest.mark.parametrize("method", ["generateContent", "streamGenerateContent", "streamGenerateContent?alt=sse"])
@pytest.mark.parametrize("dialect", ["gemini", "gemini_gca"])
async def test_google_in_every_shape(commanded: Service, key: str, dialect: str, method: str) -> None:
    request: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "/context"}]}]}
    is_wrapped = dialect == "gemini_gca"
    path = f"/v1internal:{method}" if is_wrapped else f"/v1beta/models/gemini-3-flash:{method}"
    body = json.dumps({"model": "m", "request": request} if is_wrapped else request).encode()
    answer = await post(commanded, body, path=path, X_Tersely_Session=key)

    assert answer.status == 200
    if method.endswith("sse"):
        assert answer.headers["content-type"] == "text/event-stream"
        reply = json.loads(answer.body.removeprefix(b"data: "))
    else:
        reply = answer.json[0] if method.startswith("stream") else answer.json
    (candidate,) = (reply["response"] if is_wrapped else reply)["candidates"]
    assert candidate["content"]["parts"][0]["text"].startswith(MARK)


async def test_disabled_command_goes_to_the_model(service: Service, model: Model, key: str) -> None:
    answered = {"role": "assistant", "content": f"{MARK}\n1 messages"}
    await post(service, body_of("/context", answered, "/context"), X_Tersely_Session=key, X_Script=key)
    sent = json.loads(received(model, key)[-1].body)["messages"]
    assert [each["content"] for each in sent if each["role"] != "system"] == [
        "/context",
        answered["content"],
        "/context",
    ]
    assert [each.text for each in await messages_by_number(service, key)][:3] == [
        "/context",
        answered["content"],
        "/context",
    ]


async def test_bypassed_calls_are_left_alone(commanded: Service, model: Model, key: str) -> None:
    body = body_of("/context")
    answer = await post(commanded, body, X_Tersely_Bypass="true", X_Script=key)
    assert answer.context == "bypass"
    assert received(model, key)[-1].body == body


async def test_command_cannot_reach_another_tenants_session(store: Database, model: Model, key: str) -> None:
    database = Store(dsn=store.dsn)
    await database.open()
    with serve(store, model.url, chat_commands="on", auth="keys") as locked:
        ours, theirs = [await _key(database) for _ in range(2)]
        first = await post(locked, body_of(f"secret {key}"), X_Tersely_Key=ours, X_Tersely_Session=key)
        history = body_of(f"secret {key}", first.json["choices"][0]["message"], "/message list")
        for headers in ({"X_Tersely_Session": key}, {}):
            assert f"secret {key}" in text_of(await post(locked, history, X_Tersely_Key=ours, **headers))
            assert "no session yet" in text_of(await post(locked, history, X_Tersely_Key=theirs, **headers))
    await database.close()


async def _key(database: Store) -> str:
    name = f"tenant-{secrets.token_hex(4)}"
    text, stored = new_key(
        name, "", now=datetime.now(UTC), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32)
    )
    await keys.add(database, stored)
    return text


async def test_unavailable_database_is_reported_in_the_chat(store: Database, model: Model, key: str) -> None:
    with relay(store) as way, serve(store, model.url, dsn=way.dsn, database_timeout=1.0, chat_commands="on") as service:
        await post(service, body_of("hello"), X_Tersely_Session=key)
        way.cut()
        answer = await post(service, body_of("/context"), X_Tersely_Session=key, X_Script=key)
        assert answer.context == "command"
        assert text_of(answer).lower().startswith(f"{MARK}\nthe database".lower())
        assert not received(model, key)


async def test_calls_beside_the_chat_carry_no_trace_and_are_no_commands(
    commanded: Service, model: Model, key: str
) -> None:
    title = {"role": "system", "content": "You are a title generator."}
    answer = await post(commanded, body_of(title, "/context"), X_Script=key)
    assert answer.context == "passthrough"
    summary = {"role": "system", "content": "You are a context summarization agent."}
    echoed = {"role": "assistant", "content": f"{MARK}\n1 messages"}
    await post(commanded, body_of(summary, "hello", "/context", echoed, "Summarise."), X_Script=key)
    assert len(received(model, key)) == 2
    sent = json.loads(received(model, key)[-1].body)["messages"]
    assert [each["content"] for each in sent[1:]] == ["hello", "Summarise."]


@pytest.mark.parametrize(
    ("command", "left"), [("/context clear", []), ("/context drop t1", ["two"]), ("/message remove t2", ["one"])]
)
@pytest.mark.parametrize("has_id", [False, True])
async def test_the_effect_of_a_command_holds_when_clients_resend_everything(
    commanded: Service, model: Model, key: str, command: str, left: list[str], has_id: bool
) -> None:
    say = openai_chat(commanded, {"X-Script": key} | ({"X-Tersely-Session": key} if has_id else {}), streams=False)
    for words in (f"number one of {key}", f"number two of {key}"):
        say(words)
    say(command)
    say(f"number three of {key}")
    reply = say(f"number four of {key}")
    assert reply.rstrip().endswith(f"number four of {key}")
    sent = json.loads(received(model, key)[-1].body)["messages"]
    questions = [each["content"].split()[1] for each in sent if each["role"] == "user"]
    assert questions == [*left, "three", "four"]
