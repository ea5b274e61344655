"""Requests that branch out of a conversation by `previous_response_id`: the conversation goes on where it ended."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence

import openai
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply
from tests.conftest import Database
from tests.support.http import post
from tests.support.loops import until
from tests.support.rows import query
from tests.support.services import Service, many, serve
from tests.support.upstreams import Model, scripted

NAME = re.compile(r"(?:question|answer) <([\w-]+)>")


def _answer(received: ReceivedRequest) -> ScriptedReply:
    """Answer the newest question by its name."""
    name = NAME.findall(json.dumps(received.request))[-1]
    return ScriptedReply(message={"content": f"answer <{name}>"}, first_delay=0.4 if name.endswith("-slow") else 0)


@pytest.fixture(scope="module", params=["keeps", "forgets"])
def host(request: pytest.FixtureRequest) -> Iterator[Model]:
    with scripted(is_forgetful=request.param == "forgets") as running:
        running.state.script = _answer
        yield running


@pytest.fixture(params=["live", "not live", "two replicas"])
def services(request: pytest.FixtureRequest, store: Database, host: Model) -> Iterator[list[Service]]:
    count = 2 if request.param == "two replicas" else 1
    more = {"live_sessions": "off"} if request.param == "not live" else {}
    with many(*(serve(store, host.url, instructions="off", **more) for _ in range(count))) as running:
        yield running


class Client:
    """A client of one conversation, with its own record of every history."""

    def __init__(self, services: Sequence[Service], host: Model, key: str) -> None:
        self.services, self.host, self.key = services, host, key
        self.conversation = f"conv_{key}"
        if not host.state.kept.is_forgetful:
            with openai.OpenAI(base_url=host.url, api_key="x", max_retries=0) as direct:
                self.conversation = direct.conversations.create().id
        self.in_conversation: list[str] = []  # names, in order
        self.histories: dict[str, list[str]] = {}  # by the id of the reply
        self.count = 0

    async def ask(self, *, by: str | None = None, streams: bool = False, is_slow: bool = False) -> str:
        """Ask in the conversation, or branch behind the reply ``by``; return the reply's id."""
        self.count += 1
        name = f"{self.key}-{self.count}" + "-slow" * is_slow
        before = self.in_conversation if by is None else self.histories[by]
        named = {"conversation": self.conversation} if by is None else {"previous_response_id": by}
        body = {"model": "gpt-5-mini", "input": f"question <{name}>", "user": self.key, "stream": streams, **named}
        service = self.services[self.count % len(self.services)]
        answered = await post(service, json.dumps(body).encode(), path="/v1/responses")
        assert (answered.status, answered.session) == (200, self.conversation), answered.body
        found = re.search(rb'"id": ?"(resp_[^"]+)"', answered.body)
        assert found
        reply = found[1].decode()
        self.histories[reply] = [*before, name]
        if by is None:
            self.in_conversation = self.histories[reply]
        return reply

    async def check(self, reply: str) -> None:
        """Compare the stored messages and the newest upstream request with the client's record."""
        expected = [name for name in self.histories[reply] for _ in ("question", "answer")]
        rows = await query(
            self.services[0],
            "SELECT raw FROM messages WHERE session_id = $1 AND status = 'live' ORDER BY place, seq",
            self.conversation,
        )
        assert [NAME.findall(row["raw"].decode())[0] for row in rows] == expected
        if self.host.state.kept.is_forgetful:
            assert NAME.findall(self.host.requests(self.key)[-1].body.decode()) == expected[:-1]
        else:
            there = NAME.findall(json.dumps(self.host.state.kept.conversations[self.conversation]))
            assert there[::2] == self.in_conversation


@pytest.mark.parametrize("streams", [False, True])
async def test_conversation_goes_on_where_it_ended_after_a_branch(
    services: list[Service], host: Model, key: str, streams: bool
) -> None:
    client = Client(services, host, key)
    first = await client.ask(streams=streams)
    last = await client.ask(streams=streams)
    branch = await client.ask(by=first, streams=streams)
    await client.check(branch)
    await client.check(await client.ask(streams=streams))
    behind = await client.ask(by=last, streams=streams)
    await client.check(await client.ask(by=behind, streams=streams))
    await client.check(await client.ask(streams=streams))


@pytest.mark.parametrize("seed", range(6))
async def test_random_branches_of_a_conversation(services: list[Service], host: Model, key: str, seed: int) -> None:
    chance = random.Random(seed)
    client = Client(services, host, key)
    await client.ask()
    for _ in range(14):
        by = None if chance.random() < 0.5 else chance.choice(list(client.histories))
        await client.check(await client.ask(by=by, streams=chance.random() < 0.5))


async def test_conversation_from_before_its_replies_were_noted(services: list[Service], host: Model, key: str) -> None:
    """Older versions noted no conversation: the newest reply is taken for its end."""
    client = Client(services, host, key)
    await client.ask()
    await client.ask()
    await query(
        services[0], "UPDATE reply_ids SET conversation = NULL WHERE session_id = $1 RETURNING seq", client.conversation
    )
    await client.check(await client.ask())
    branch = await client.ask(by=next(iter(client.histories)))
    await client.check(branch)
    await client.check(await client.ask())


@pytest.mark.parametrize("streams", [False, True])
async def test_conversation_has_the_call_that_a_branch_overtook(
    services: list[Service], host: Model, key: str, streams: bool
) -> None:
    client = Client(services, host, key)
    first = await client.ask()
    slow = asyncio.create_task(client.ask(is_slow=True, streams=streams))
    await until(lambda: b"-slow>" in host.requests(key)[-1].body)
    await client.ask(by=first, streams=streams)
    assert not slow.done()
    await slow
    await client.check(await client.ask(streams=streams))
