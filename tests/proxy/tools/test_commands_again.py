"""Commands that come again: what a client sends twice because no answer reached it is carried out once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tersely.dialects.clients.command_traces import MARK
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.proxy import command_deduplicator as once
from tersely.service.proxy.command_deduplicator import AGAIN
from tests.conftest import Database
from tests.support.http import Answered, body_of, post
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, many, serve
from tests.support.upstreams import MODEL, Model, scripted

RETRY = {"x_stainless_retry_count": "1"}
SLOW = 2.0


@pytest.fixture(scope="module")
def slow() -> Iterator[Model]:
    """A model that takes its time for a state."""
    with scripted() as running:
        state = {"role": "assistant", "content": "### STATE\nGoal: a slow one"}
        running.state.script = lambda _: ScriptedReply(message=state, first_delay=SLOW)
        yield running


@pytest.fixture(scope="module")
def workers(store: Database, model: Model, slow: Model) -> Iterator[tuple[Service, Service]]:
    """Two services that know of each other only through the database."""
    settings: dict[str, Any] = {
        "chat_commands": "on",
        "heartbeat": 0.3,
        "strategy": "window",
        "summarizer_model": "m",
        "summarizer_base_url": slow.url,
        "summarizer_api_key": "k",
    }
    with many(serve(store, model.url, **settings), serve(store, model.url, **settings)) as (one, other):
        yield one, other


async def talk(service: Service, *words: str) -> list[object]:
    """A history of these turns, with their replies."""
    history: list[object] = []
    for each in words:
        history.append(each)
        history.append((await post(service, body_of(*history))).json["choices"][0]["message"])
    return history


async def undone(service: Service, answer: Answered) -> list[int]:
    return sorted({each.turn for each in await messages_by_number(service, answer.session) if each.status == "undone"})


def text_of(answer: Answered) -> str:
    return str(answer.json["choices"][0]["message"]["content"])


async def test_a_retry_at_another_worker_gets_the_same_answer(workers: tuple[Service, Service], key: str) -> None:
    history = await talk(workers[0], f"one of {key}", "two", "three")
    first = await post(workers[0], body_of(*history, "/undo"))
    again = await post(workers[1], body_of(*history, "/undo"), **RETRY)

    assert text_of(first) == text_of(again) == f"{MARK}\nt3 was taken back."
    assert await undone(workers[0], first) == [3]


async def test_a_key_names_one_command(workers: tuple[Service, Service], key: str) -> None:
    history = await talk(workers[0], f"one of {key}", "two", "three")
    first = await post(workers[0], body_of(*history, "/undo"), Idempotency_Key="a")
    again = await post(workers[1], body_of(*history, "/undo"), Idempotency_Key="a")
    assert text_of(again) == text_of(first)
    assert await undone(workers[0], first) == [3]
    await post(workers[1], body_of(*history, "/undo"), Idempotency_Key="b")
    assert await undone(workers[0], first) == [2, 3]


async def test_the_same_once_more_without_a_word_about_it(workers: tuple[Service, Service], key: str) -> None:
    history = await talk(workers[0], f"one of {key}", "two", "three")
    first = await post(workers[0], body_of(*history, "/undo"))
    again = await post(workers[1], body_of(*history, "/undo"))

    assert text_of(again) == f"{text_of(first)}\n{AGAIN}"
    assert await undone(workers[0], first) == [3]


async def test_a_command_sent_twice_at_once_runs_once(workers: tuple[Service, Service], key: str) -> None:
    history = await talk(workers[0], f"one of {key}", "two", "three", "four")
    body = body_of(*history, "/undo")
    answers = await asyncio.gather(*(post(workers[n % 2], body, **RETRY) for n in range(8)))

    assert {text_of(answer) for answer in answers} == {f"{MARK}\nt4 was taken back."}
    assert await undone(workers[0], answers[0]) == [4]


async def test_command_typed_twice_runs_twice(workers: tuple[Service, Service], key: str) -> None:
    history = await talk(workers[0], f"one of {key}", "two", "three")
    first = await post(workers[0], body_of(*history, "/undo"))
    exchange = ["/undo", first.json["choices"][0]["message"]]
    second = await post(workers[1], body_of(*history, *exchange, "/undo"))
    retried = await post(workers[1], body_of(*history, *exchange, "/undo"), **RETRY)
    assert text_of(second) == text_of(retried) == f"{MARK}\nt2 was taken back."
    assert await undone(workers[0], second) == [2, 3]


@pytest.mark.parametrize("between", ["a turn", "/context"])
async def test_repeated_command_after_another_message_runs_again(
    workers: tuple[Service, Service], key: str, between: str
) -> None:
    for words in ("one", "two", "/undo", between):
        await post(workers[0], body_of(words), X_Tersely_Session=key)
    answer = await post(workers[0], body_of("/undo"), X_Tersely_Session=key)
    assert text_of(answer).startswith(f"{MARK}\nt{3 if between == 'a turn' else 1} was taken back.")
    assert AGAIN not in text_of(answer)


async def test_another_command_of_the_same_kind_is_meant(workers: tuple[Service, Service], key: str) -> None:
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    answers = [await post(workers[0], body_of(f"/context window {n}"), X_Tersely_Session=key) for n in (3, 4, 3)]
    assert '"context_size": 3' in text_of(answers[2])
    (row,) = await query(workers[0], "SELECT strategy FROM sessions WHERE id = $1", key)
    assert json.loads(row["strategy"])["context_size"] == 3


async def test_later_the_same_bytes_are_meant(
    workers: tuple[Service, Service], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in ("one", "two", "three", "/undo"):
        await post(workers[0], body_of(words), X_Tersely_Session=key)
    monkeypatch.setattr(once, "REPEATED", once.REPEATED * 0)
    retried = await post(workers[1], body_of("/undo"), X_Tersely_Session=key, **RETRY)
    assert text_of(retried) == f"{MARK}\nt3 was taken back."
    meant = await post(workers[1], body_of("/undo"), X_Tersely_Session=key)
    assert text_of(meant) == f"{MARK}\nt2 was taken back."


async def test_a_failed_command_may_be_tried_again(workers: tuple[Service, Service], key: str) -> None:
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    refused = [await post(worker, body_of("/context drop t9"), X_Tersely_Session=key) for worker in workers]
    assert text_of(refused[0]) == text_of(refused[1])
    assert AGAIN not in text_of(refused[1])


async def test_a_command_whose_worker_died_is_not_done_again(workers: tuple[Service, Service], key: str) -> None:
    for words in ("one", "two", "/undo"):
        await post(workers[0], body_of(words), X_Tersely_Session=key)
    forget = (
        "UPDATE commands SET finished_at = NULL, text = NULL, until = $2 WHERE session_id = $1 RETURNING started_at"
    )
    (row,) = await query(workers[0], "SELECT finished_at FROM commands WHERE session_id = $1", key)
    await query(workers[0], forget, key, row["finished_at"])
    answer = await post(workers[1], body_of("/undo"), X_Tersely_Session=key, **RETRY)
    assert "broken off" in text_of(answer)
    assert await undone(workers[0], answer) == [2]


async def test_a_client_that_loses_patience_gets_the_answer_of_its_first_try(
    workers: tuple[Service, Service], slow: Model, key: str
) -> None:
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    before = len(slow.state.received)
    async with openai.AsyncOpenAI(
        base_url=workers[0].base_url, api_key="k", timeout=SLOW * 0.7, max_retries=4
    ) as client:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "/context rebuild"}],
            extra_headers={"X-Tersely-Session": key},
        )
    assert "Goal: a slow one" in str(answer.choices[0].message.content)
    assert len(slow.state.received) == before + 1


STREAMS = [
    ("/v1/chat/completions", {"model": MODEL, "messages": []}, b": keep-alive\n\n"),
    ("/v1/responses", {"model": MODEL, "input": []}, b": keep-alive\n\n"),
    ("/v1/messages", {"model": "claude-opus-test", "max_tokens": 9, "messages": []}, b"event: ping\n"),
    ("/v1beta/models/gemini-3-flash:streamGenerateContent?alt=sse", {"contents": []}, b""),
    ("/v1beta/models/gemini-3-flash:streamGenerateContent", {"contents": []}, b""),
]


@pytest.mark.parametrize(("path", "body", "beat"), STREAMS, ids=[path for path, *_ in STREAMS])
async def test_a_slow_command_keeps_its_stream_alive(
    workers: tuple[Service, Service], key: str, path: str, body: dict[str, Any], beat: bytes
) -> None:
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    command = {"role": "user", "content": "/context rebuild", "parts": [{"text": "/context rebuild"}]}
    del command["content" if "contents" in body else "parts"]
    sent = {name: [command] if value == [] else value for name, value in body.items()}
    if "contents" not in body:
        sent["stream"] = True
    answer = await post(workers[0], json.dumps(sent).encode(), path=path, X_Tersely_Session=key)

    assert answer.context == "command"
    assert answer.session == key
    assert answer.seconds >= SLOW
    assert b"Goal: a slow one" in answer.body
    if beat:
        assert answer.body.startswith(beat)
        assert answer.body.count(beat) >= 3
    else:
        assert b"keep-alive" not in answer.body
        assert b"ping" not in answer.body


async def test_providers_clients_take_the_signs_of_life(workers: tuple[Service, Service], key: str) -> None:
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    async with (
        anthropic.AsyncAnthropic(base_url=workers[0].url, api_key="k", max_retries=0) as client,
        client.messages.stream(
            model="claude-opus-test",
            max_tokens=9,
            messages=[{"role": "user", "content": "/context rebuild"}],
            extra_headers={"X-Tersely-Session": key},
        ) as stream,
    ):
        words = "".join([text async for text in stream.text_stream])
    assert "Goal: a slow one" in words
