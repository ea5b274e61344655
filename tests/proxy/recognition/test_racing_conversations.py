"""Several calls at once on one conversation of Responses: each is a turn of it, as at the host."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial

import openai
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.http import Answered, post
from tests.support.loops import until
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, many, serve
from tests.support.upstreams import Model, scripted

MODEL_SECONDS = 0.06
NAME = re.compile(r"(question|answer) <([\w-]+)>")
LOCKED = json.dumps(
    {
        "error": {
            "message": "Another process is currently operating on this conversation. Please retry in a few seconds.",
            "type": "invalid_request_error",
            "param": "conversation",
            "code": "conversation_locked",
        }
    }
).encode()

Pairs = list[tuple[str, str]]


def _answer(received: ReceivedRequest) -> ScriptedReply:
    """Answer the newest question by its name, sooner or later."""
    name = NAME.findall(json.dumps(received.request))[-1][1]
    if name.endswith("refused"):
        return ScriptedReply(status=400, body=LOCKED)
    return ScriptedReply(message={"content": f"answer <{name}>"}, first_delay=MODEL_SECONDS * (1 + received.number % 3))


@pytest.fixture(scope="module")
def keeping() -> Iterator[Model]:
    with scripted() as running:
        running.state.script = _answer
        yield running


@pytest.fixture(scope="module")
def losing() -> Iterator[Model]:
    """A host that has no conversations."""
    with scripted(is_forgetful=True) as running:
        running.state.script = _answer
        yield running


@pytest.fixture(params=["keeps", "loses"])
def host(request: pytest.FixtureRequest) -> Model:
    model: Model = request.getfixturevalue("keeping" if request.param == "keeps" else "losing")
    return model


@pytest.fixture(params=["one", "two replicas"])
def services(request: pytest.FixtureRequest, store: Database, host: Model) -> Iterator[list[Service]]:
    count = 1 if request.param == "one" else 2
    with many(*(serve(store, host.url) for _ in range(count))) as running:
        yield running


def open_conversation(model: Model, key: str) -> str:
    if model.state.kept.is_forgetful:
        return f"conv_{key}"
    with openai.OpenAI(base_url=model.url, api_key="x", max_retries=0) as direct:
        return direct.conversations.create().id


async def ask(service: Service, conversation: str, name: str, *, streams: bool = False, delay: float = 0) -> Answered:
    await asyncio.sleep(delay)
    body = {"model": "gpt-5-mini", "input": f"question <{name}>", "conversation": conversation, "user": conversation}
    return await post(service, json.dumps({**body, "stream": streams}).encode(), path="/v1/responses")


async def stored_pairs(service: Service, session: str) -> Pairs:
    """The live messages in their order."""
    rows = await query(
        service,
        "SELECT raw FROM messages WHERE session_id = $1 AND status = 'live' ORDER BY place, seq",
        session,
    )
    return [NAME.findall(row["raw"].decode())[0] for row in rows]


async def statuses(service: Service, session: str) -> set[str]:
    return {each.status for each in await messages_by_number(service, session)}


def host_pairs(model: Model, conversation: str) -> Pairs:
    return NAME.findall(json.dumps(model.state.kept.conversations[conversation]))


def check(found: Pairs, names: list[str]) -> None:
    """Each question is there once, and its answer stands right behind it."""
    questions = [name for _, name in found[::2]]
    assert found == [(kind, name) for name in questions for kind in ("question", "answer")]
    assert sorted(questions) == sorted(names)


def has_got(host: Model, conversation: str, name: str) -> bool:
    return any(f"<{name}>".encode() in each.body for each in host.requests(conversation))


def assert_equal_order(stored: Pairs, at_host: Pairs, *, has_order: bool) -> None:
    """Check that store and host have the same. Calls within a millisecond may reach both in different orders."""
    assert sorted(stored) == sorted(at_host)
    if has_order:
        assert stored == at_host


@pytest.mark.parametrize("in_a_row", [False, True], ids=["at once", "in a row"])
@pytest.mark.parametrize(("count", "streams"), [(2, False), (8, True)])
async def test_calls_at_once_are_turns_of_one_conversation(
    services: list[Service], host: Model, key: str, streams: bool, count: int, in_a_row: bool
) -> None:
    conversation = open_conversation(host, key)
    names = []
    for turn in range(2):  # the first calls find no session
        questions = [f"{turn}-{n}" for n in range(count)]
        names += questions
        calls = []
        for n, name in enumerate(questions):
            calls.append(asyncio.create_task(ask(services[n % len(services)], conversation, name, streams=streams)))
            if in_a_row:
                await until(partial(has_got, host, conversation, name))
        answers = await asyncio.gather(*calls)
        assert [(each.status, each.session) for each in answers] == [(200, conversation)] * count
        for name, answer in zip(questions, answers, strict=True):
            assert f"answer <{name}>" in answer.body.decode()
        found = await stored_pairs(services[0], conversation)
        check(found, names)
        assert await statuses(services[0], conversation) == {"live"}
        if not host.state.kept.is_forgetful:
            assert_equal_order(found, host_pairs(host, conversation), has_order=in_a_row and len(services) == 1)

    assert (await ask(services[-1], conversation, "last")).status == 200
    names.append("last")
    found = await stored_pairs(services[0], conversation)
    check(found, names)
    if host.state.kept.is_forgetful:
        sent = host.requests(conversation)[-1].body.decode()
        assert NAME.findall(json.dumps(json.loads(sent)["input"])) == found[:-1]
    else:
        assert_equal_order(found, host_pairs(host, conversation), has_order=in_a_row and len(services) == 1)


@pytest.mark.parametrize("host", ["keeps"], indirect=True)
async def test_refused_call_is_no_part_of_a_racing_conversation(services: list[Service], host: Model, key: str) -> None:
    """Hosts may take one call at a time: the others get an error."""
    conversation = open_conversation(host, key)
    for turn in range(3):
        running = asyncio.create_task(ask(services[0], conversation, f"{turn}-taken"))
        await asyncio.sleep(MODEL_SECONDS / 3)
        refused = await ask(services[-1], conversation, f"{turn}-refused")
        assert (refused.status, refused.body) == (400, LOCKED)
        assert (await running).status == 200
    assert (await ask(services[0], conversation, "last")).status == 200
    found = await stored_pairs(services[0], conversation)
    check(found, ["0-taken", "1-taken", "2-taken", "last"])
    assert found == host_pairs(host, conversation)
