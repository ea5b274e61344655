"""Deltas of several clients on one session at the same time, over two services that share nothing but the database."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.dialect_wires import WIRES, Wire, listed
from tests.support.http import Answered, post, request_bytes, wire
from tests.support.loops import wait_until
from tests.support.rows import StoredMessage, messages_by_number
from tests.support.services import Service, many, serve
from tests.support.upstreams import Model, scripted

MODEL_SECONDS = 0.03
QUESTION = re.compile(r"question <([\w-]+)>")


def _answer_newest(received: ReceivedRequest) -> ScriptedReply:
    """Answer the newest question by its name, after the time that a model takes."""
    name = QUESTION.findall(json.dumps(received.request))[-1]
    return ScriptedReply(message={"content": f"answer <{name}>"}, first_delay=MODEL_SECONDS)


@pytest.fixture(scope="module")
def answering() -> Iterator[Model]:
    with scripted() as running:
        running.state.script = _answer_newest
        yield running


@pytest.fixture(scope="module")
def pair(store: Database, answering: Model) -> Iterator[tuple[Service, Service]]:
    with many(serve(store, answering.url), serve(store, answering.url)) as (one, other):
        yield one, other


@pytest.fixture(params=list(WIRES))
def dialect(request: pytest.FixtureRequest) -> Wire:
    return WIRES[request.param]


async def say(wire: Wire, service: Service, session: str, text: str, **more: Any) -> Answered:
    return await wire.send(service, text, X_Tersely_Session=session, **more)


def check_pairs(found: list[tuple[str, str]], names: set[str]) -> None:
    """Each question is there once, and its answer stands right behind it."""
    assert found == [(kind, name) for name in [name for _, name in found[::2]] for kind in ("question", "answer")]
    assert sorted(name for _, name in found[::2]) == sorted(names)


async def statuses(service: Service, session: str) -> set[str]:
    return {each.status for each in await messages_by_number(service, session)}


@pytest.mark.parametrize("streams", [False, True])
async def test_three_hundred_deltas_of_six_clients_keep_their_answers(
    pair: tuple[Service, Service], key: str, streams: bool
) -> None:
    async def client(number: int) -> None:
        for turn in range(50):
            service = pair[(number + turn) % 2]
            answer = await say(WIRES["openai_chat"], service, key, f"question <c{number}-{turn}>", stream=streams)
            assert answer.status == 200
            assert streams or f"answer <c{number}-{turn}>" in answer.body.decode()

    await say(WIRES["openai_chat"], pair[0], key, "question <first>")
    await asyncio.gather(*map(client, range(6)))

    names = {"first", *(f"c{number}-{turn}" for number in range(6) for turn in range(50))}
    found = await listed(pair[0], key)
    check_pairs(found, names)
    assert found == await listed(pair[1], key)
    assert await statuses(pair[0], key) == {"live"}
    stored = await messages_by_number(pair[0], key)
    assert len(stored) == 2 * len(names)
    turns = {each.turn for each in stored}
    assert len(turns) == len(names), "each question is a turn of its own"


@pytest.mark.parametrize("streams", [False, True])
async def test_racing_deltas_keep_their_answers_in_every_dialect(
    pair: tuple[Service, Service], key: str, dialect: Wire, streams: bool
) -> None:
    async def client(number: int) -> None:
        for turn in range(8):
            answer = await say(dialect, pair[(number + turn) % 2], key, f"question <c{number}-{turn}>", stream=streams)
            assert answer.status == 200

    await asyncio.gather(*map(client, range(5)))

    check_pairs(await listed(pair[0], key), {f"c{number}-{turn}" for number in range(5) for turn in range(8)})
    assert await statuses(pair[0], key) == {"live"}


# One request, sent several times


async def live(service: Service, session: str) -> list[StoredMessage]:
    return [each for each in await messages_by_number(service, session) if each.status == "live"]


SIGNS: dict[str, Any] = {
    "equal bodies": lambda number: {},
    "retry counts": lambda number: {"x_stainless_retry_count": str(number)},
    "one key": lambda number: {"Idempotency_Key": "the one key"},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("sign", list(SIGNS))
@pytest.mark.parametrize("has_begun", [False, True])
async def test_simultaneous_retries_of_one_delta_are_one_turn(
    pair: tuple[Service, Service], key: str, dialect: Wire, sign: str, streams: bool, has_begun: bool
) -> None:
    if has_begun:
        await say(dialect, pair[0], key, "question <first>")

    answers = await asyncio.gather(
        *(
            say(dialect, pair[number % 2], key, "question <again>", stream=streams, **SIGNS[sign](number))
            for number in range(6)
        ),
        say(dialect, pair[0], key, "question <other>", stream=streams),
    )

    assert [answer.status for answer in answers] == [200] * 7
    check_pairs(await listed(pair[0], key), {"again", "other", *(["first"] if has_begun else [])})
    assert len({each.turn for each in await messages_by_number(pair[0], key)}) == 2 + has_begun


async def test_a_key_means_one_turn_also_after_the_answer(
    pair: tuple[Service, Service], answering: Model, key: str, dialect: Wire
) -> None:
    for name in ("first", "second", "third"):
        await say(dialect, pair[0], key, f"question <{name}>", Idempotency_Key=f"key of {name}")
    again = await say(dialect, pair[1], key, "question <second>", Idempotency_Key="key of second")

    assert "answer <second>" in again.body.decode()
    sent = QUESTION.findall(json.dumps(answering.last.request))
    assert sent[-1] == "second"
    assert "third" not in sent, "the context is the history that the request belongs to"
    check_pairs(await listed(pair[0], key), {"first", "second", "third"})

    await say(dialect, pair[0], key, "question <fourth>", Idempotency_Key="key of second")
    check_pairs(await listed(pair[0], key), {"first", "second", "third", "fourth"})
    await say(dialect, pair[1], key, "question <fourth>", Idempotency_Key="key of second")
    check_pairs(await listed(pair[0], key), {"first", "second", "third", "fourth"})
    await say(dialect, pair[1], key, "question <fourth>", Idempotency_Key="another key")
    found = await listed(pair[0], key)
    assert [name for kind, name in found if kind == "question"] == ["first", "second", "third", "fourth", "fourth"]


async def test_a_key_finds_the_first_request_of_a_conversation(
    pair: tuple[Service, Service], key: str, dialect: Wire
) -> None:
    text = f"question <{key}>"

    async def first(number: int) -> Answered:
        return await post(
            pair[number % 2], dialect.body(text), path=dialect.path, Idempotency_Key=key, X_Request=str(number)
        )

    answers = await asyncio.gather(*map(first, range(6)))
    answers.append(await first(6))

    assert len({answer.session for answer in answers}) == 1
    check_pairs(await listed(pair[0], answers[0].session), {key})
    other = await post(pair[0], dialect.body(text), path=dialect.path, Idempotency_Key=f"{key} 2")
    assert other.session != answers[0].session


async def test_a_retry_that_fails_hides_nothing(pair: tuple[Service, Service], answering: Model, key: str) -> None:
    chat = WIRES["openai_chat"]
    for name in ("first", "second"):
        await say(chat, pair[0], key, f"question <{name}>")
    answering.state.script = lambda received: ScriptedReply(status=500, body=b'{"error": {"message": "no"}}')
    try:
        failed = await say(chat, pair[1], key, "question <second>", x_stainless_retry_count="1")
    finally:
        answering.state.script = _answer_newest

    assert failed.status == 500
    check_pairs(await listed(pair[0], key), {"first", "second"})


# Cut off, and sent again


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize("fate", ["before a word", "in the middle", "upstream refuses", "upstream breaks off"])
async def test_a_delta_that_was_cut_off_and_sent_again_is_one_turn(
    pair: tuple[Service, Service], answering: Model, key: str, dialect: Wire, fate: str, others: int
) -> None:
    await say(dialect, pair[0], key, "question <first>")
    fates: dict[str, ScriptedReply] = {
        "before a word": ScriptedReply(message={"content": "too late"}, first_delay=5),
        "in the middle": ScriptedReply(message={"content": "answer <again> " * 20}, delay=0.05),
        "upstream refuses": ScriptedReply(status=503, body=b'{"error": {"message": "overloaded"}}'),
        "upstream breaks off": ScriptedReply(message={"content": "a beginning of words " * 9}, break_after=6),
    }
    cut = [fates[fate]]

    def script(received: ReceivedRequest) -> ScriptedReply | None:
        name = QUESTION.findall(json.dumps(received.request))[-1]
        return cut.pop() if name == "again" and cut else _answer_newest(received)

    answering.state.script = script
    try:
        path = dialect.stream_path or dialect.path
        body = dialect.body("question <again>", stream=True)
        if fate.startswith("upstream"):
            await say(dialect, pair[0], key, "question <again>", stream=True)
        else:
            async with wire(pair[0]) as connection:
                await connection.send(request_bytes(body, path=path, X_Tersely_Session=key))
                if fate == "in the middle":
                    await connection.until(b"answer")
                else:
                    await asyncio.to_thread(wait_until, lambda: not cut)
        for number in range(others):
            await say(dialect, pair[number % 2], key, f"question <other-{number}>", stream=True)
        # A client that was shown the error may mean to go on: its retry is known by its mark.
        mark = {"x_stainless_retry_count": "1"} if fate == "upstream breaks off" else {}
        again = await say(dialect, pair[1], key, "question <again>", stream=True, **mark)
    finally:
        answering.state.script = _answer_newest

    assert again.status == 200
    found = await listed(pair[0], key)
    check_pairs(found, {"first", "again", *(f"other-{number}" for number in range(others))})
    assert [name for _, name in found[2:4]] == ["again", "again"]


async def test_equal_text_after_a_broken_off_reply_continues(
    pair: tuple[Service, Service], answering: Model, key: str, dialect: Wire
) -> None:
    broken = ScriptedReply(message={"content": "answer <go-on> and words without an end " * 9}, break_after=9)
    replies = [broken, broken]
    answering.state.script = lambda received: replies.pop() if replies else _answer_newest(received)
    try:
        for replica in (0, 1, 0):
            await say(dialect, pair[replica], key, "question <go-on>", stream=True)
    finally:
        answering.state.script = _answer_newest

    found = await messages_by_number(pair[0], key)
    assert [(each.role, each.turn) for each in found] == [
        ("user", 1), ("assistant", 1), ("user", 2), ("assistant", 2), ("user", 3), ("assistant", 3),
    ]  # fmt: skip
    assert [each.finish for each in found[1::2]][:2] == ["interrupted", "interrupted"]
    assert {each.status for each in found} == {"live"}


async def test_equal_text_later_is_a_new_turn(pair: tuple[Service, Service], key: str) -> None:
    for _ in range(3):
        await say(WIRES["openai_chat"], pair[0], key, "question <go-on>")
    found = await listed(pair[0], key)
    assert found == [("question", "go-on"), ("answer", "go-on")] * 3


@pytest.mark.parametrize("strategy", ["slim", "window", "trim", "compact", "tiered", "full"])
async def test_contexts_of_racing_deltas_keep_questions_and_answers_together(
    pair: tuple[Service, Service], answering: Model, key: str, strategy: str
) -> None:
    """Epochs start while replies are under way: no context shows an answer without its question in front of it."""
    shape = {"X_Tersely_Strategy": strategy, "X_Tersely_Epoch": '{"high": 1500, "low": 500}'}
    padding = "words that make the question longer than it would have to be " * 6

    async def client(number: int) -> None:
        for turn in range(12):
            text = f"question <{key}-c{number}-{turn}> {padding}"
            answer = await say(WIRES["openai_chat"], pair[(number + turn) % 2], key, text, **shape)
            assert answer.status == 200

    await asyncio.gather(*map(client, range(5)))

    check_pairs(await listed(pair[0], key), {f"{key}-c{number}-{turn}" for number in range(5) for turn in range(12)})
    contexts = [each.request or {} for each in answering.state.received if key in json.dumps(each.request)]
    assert len(contexts) == 60
    for request in contexts:
        texts = [str(message["content"]) for message in request["messages"] if message["role"] != "system"]
        for before, text in itertools.pairwise(["", *texts]):
            if answered := re.match(r"answer <([\w-]+)>", text):
                assert f"question <{answered[1]}>" in before
        assert f"question <{key}-c" in texts[-1], "a context ends with what is asked"
