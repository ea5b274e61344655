"""Two workers on one database: who asks first, who asks at once, and who asks elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import body_of, post
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, many, serve
from tests.support.upstreams import Model


@pytest.fixture(scope="module")
def workers(store: Database, model: Model) -> Iterator[tuple[Service, Service]]:
    """Two services that know of each other only through the database."""
    with many(serve(store, model.url), serve(store, model.url)) as (one, other):
        yield one, other


async def say(service: Service, session: str, history: list[dict], text: str, *, streams: bool = False) -> str:
    """Add a turn to ``history`` by way of ``service``."""
    history.append({"role": "user", "content": text})
    answer = await post(service, body_of(*history, stream=streams), X_Tersely_Session=session)
    assert answer.status == 200
    stored = await messages_by_number(service, session)
    history.append({"role": "assistant", "content": stored[-1].text})
    return answer.session


@pytest.mark.parametrize("streams", [False, True])
async def test_the_other_worker_sees_the_turn_at_once(workers: tuple[Service, Service], key: str, streams: bool):
    history: list[dict] = []
    for number in range(12):
        await say(workers[number % 2], key, history, f"turn {number} of a longer conversation", streams=streams)

    stored = await messages_by_number(workers[0], key)
    assert [each.role for each in stored] == ["user", "assistant"] * 12
    assert [each.turn for each in stored] == [turn for turn in range(1, 13) for _ in range(2)]
    assert {each.status for each in stored} == {"live"}


async def test_lineage_is_found_by_the_other_worker(workers: tuple[Service, Service], key: str):
    one, other = workers
    question = {"role": "user", "content": f"a question about {key} that nobody else asks"}
    first = await post(one, body_of(question))
    spoken = {"role": "assistant", "content": first.json["choices"][0]["message"]["content"]}

    second = await post(other, body_of(question, spoken, "and then"))

    assert second.session == first.session
    assert second.headers["x-tersely-session-source"] == "lineage"


async def test_deltas_from_both_workers_carry_the_whole_history(
    workers: tuple[Service, Service], model: Model, key: str
):
    for number in range(6):
        user = f"{key}-{number}"
        answer = await post(workers[number % 2], body_of(f"delta {number}", user=user), X_Tersely_Session=key)
        assert answer.status == 200
        sent = model.requests(user)[-1].body.decode()
        assert [f"delta {n}" in sent for n in range(number + 1)] == [True] * (number + 1)


async def test_simultaneous_requests_in_one_session(workers: tuple[Service, Service], key: str):
    await post(workers[0], body_of("the beginning"), X_Tersely_Session=key)

    answers = await asyncio.gather(
        *(post(workers[n % 2], body_of(f"at once {n}"), X_Tersely_Session=key) for n in range(16))
    )

    assert [answer.status for answer in answers] == [200] * 16
    stored = await messages_by_number(workers[0], key)
    texts = [each.text for each in stored if each.role == "user"]
    assert sorted(texts) == sorted(["the beginning", *(f"at once {n}" for n in range(16))])
    assert len([each for each in stored if each.role == "assistant"]) == 17
    calls = await query(workers[0], "SELECT number FROM calls WHERE session_id = $1 ORDER BY number", key)
    assert [row["number"] for row in calls] == list(range(1, 18))


async def test_the_same_new_session_on_both_workers_at_once(workers: tuple[Service, Service], key: str):
    body = body_of("the very same words, at the very same time")

    answers = await asyncio.gather(
        *(post(workers[n % 2], body, X_Tersely_Session=key, X_Stainless_Retry_Count=str(n)) for n in range(8))
    )

    assert {answer.status for answer in answers} == {200}
    stored = await messages_by_number(workers[0], key)
    assert [each.text for each in stored if each.role == "user" and each.status == "live"].count(
        "the very same words, at the very same time"
    ) >= 1


async def test_sixty_four_clients(workers: tuple[Service, Service], key: str):
    async def talk(number: int) -> None:
        history: list[dict] = []
        for turn in range(3):
            service = workers[(number + turn) % 2]
            await say(service, f"{key}-{number}", history, f"client {number}, turn {turn}", streams=bool(turn % 2))

    await asyncio.gather(*map(talk, range(64)))

    for number in range(64):
        stored = await messages_by_number(workers[0], f"{key}-{number}")
        assert [(each.role, each.status) for each in stored] == [("user", "live"), ("assistant", "live")] * 3


async def test_a_reply_that_is_overtaken_stays_with_its_question(
    workers: tuple[Service, Service], model: Model, key: str
):
    slow = model.script(f"{key}-slow", ScriptedReply(message={"content": "the slow answer"}, first_delay=0.6))
    quick = model.script(f"{key}-quick", ScriptedReply(message={"content": "the quick answer"}))
    first = asyncio.create_task(post(workers[0], body_of("slow question", user=slow), X_Tersely_Session=key))
    while not model.requests(slow):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    await post(workers[1], body_of("quick question", user=quick), X_Tersely_Session=key)
    await first

    rows = await query(
        workers[0], "SELECT convert_from(raw, 'UTF8') AS raw FROM messages WHERE session_id = $1 ORDER BY place", key
    )
    order = [row["raw"] for row in rows]
    words = ["slow question", "the slow answer", "quick question", "the quick answer"]
    assert [next(word for word in words if word in raw) for raw in order] == words


async def test_deltas_that_race_into_an_empty_session_are_all_kept(workers: tuple[Service, Service], key: str):
    await post(workers[0], json.dumps({"id": key}).encode(), path="/api/sessions")

    async def client(number: int) -> None:
        for turn in range(3):
            words = f"client {number} turn {turn}"
            assert (await post(workers[number % 2], body_of(words), X_Tersely_Session=key)).status == 200

    await asyncio.gather(*(client(number) for number in range(8)))

    stored = await messages_by_number(workers[0], key)
    assert {each.status for each in stored} == {"live"}
    assert len(stored) == 8 * 3 * 2


@pytest.mark.parametrize("epoch", ["auto", "every_request"])
async def test_retried_delta_keeps_the_messages_before_it(
    workers: tuple[Service, Service], model: Model, key: str, epoch: str
):
    shape = {"X_Tersely_Session": key, "X_Tersely_Strategy": '{"name": "slim", "recent_turns": 1}'}
    for text in ("one", "two", "three"):
        await post(workers[0], body_of(text), X_Tersely_Epoch=epoch, **shape)
    for number in (1, 2):
        body = body_of("three", user=f"{key}-{number}")
        await post(workers[1], body, X_Tersely_Epoch=epoch, x_stainless_retry_count=str(number), **shape)

    stored = await messages_by_number(workers[0], key)
    assert [each.text for each in stored if each.role == "user"] == ["one", "two", "three"]
    assert [each.status for each in stored] == ["live"] * 5 + ["superseded"] * 2 + ["live"]
    first, second = (json.loads(model.requests(f"{key}-{number}")[-1].body)["messages"] for number in (1, 2))
    assert first == second
    assert first[-1]["content"] == "three"
    assert "two" in json.dumps(first[:-1])
    assert sum(each["content"] == "three" for each in first) == 1


async def test_failed_delta_is_stored_once(workers: tuple[Service, Service], model: Model, key: str):
    await post(workers[0], body_of("one"), X_Tersely_Session=key)
    failing = model.script(key, ScriptedReply(status=500, body=b'{"error": {"message": "no"}}'))
    assert (await post(workers[0], body_of("two", user=failing), X_Tersely_Session=key)).status == 500
    assert (await post(workers[1], body_of("two", user=failing), X_Tersely_Session=key)).status == 200

    stored = await messages_by_number(workers[0], key)
    assert [(each.role, each.status) for each in stored] == [("user", "live"), ("assistant", "live")] * 2
    assert "one" in model.requests(failing)[-1].body.decode()


async def test_a_delta_that_is_tried_again_after_another_stays_in_its_place(workers: tuple[Service, Service], key: str):
    for text in ("one", "two"):
        await post(workers[0], body_of(text), X_Tersely_Session=key)
    await post(workers[1], body_of("one"), X_Tersely_Session=key, x_stainless_retry_count="1")

    stored = await messages_by_number(workers[0], key)
    assert [each.text for each in stored if each.role == "user"] == ["one", "two"]
    assert [each.status for each in stored] == ["live", "superseded", "live", "live", "live"]
    page = (await post(workers[0], b"", method="GET", path=f"/api/sessions/{key}/messages?view=client")).json
    assert [item["seq"] for item in page["items"]] == [1, 5, 3, 4]
