"""Recorded clients, replayed through the running service: every main turn finds its session, no side call is a turn.

The recordings are not part of the project; without them these tests are skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.openai_chat.read import read_message
from tersely.dialects.wire import raw_json
from tersely.domain.history.chain import canonical
from tersely.fakellm.scripted import run_scripted
from tests.conftest import Database
from tests.support.http import Answered
from tests.support.recorded_clients import RecordedUpstream, end_to_end, read_lines
from tests.support.rows import StoredMessage, query, stored_messages
from tests.support.services import Worker, run_worker

# The main turns of each client, session by session, by their numbers in the recording.
SESSIONS: Mapping[str, Sequence[Sequence[int]]] = {
    "aider": ((1, 2, 3, 4), (5, 6, 7, 8), (12, 13)),
    "autogen": ((1, 2, 3, 4), (5,)),
    "cline": ((1, 2, 3, 4, 6, 7, 8),),
    "continue-cli": ((1, 2, 3, 4),),
    "copilot-cli": ((1, 2, 3, 4, 6),),
    "crewai": ((1,), (2, 3), (4,), (5, 6)),
    "langchain": ((1, 2, 3, 4), (5, 6, 7, 8), (13, 14, 15, 17, 18, 20)),
    "llamaindex": ((1, 2, 3, 4), (9, 10, 12, 14)),
    "llm": ((1, 2, 3, 4), (5, 6, 7, 8), (9,), (10,)),
    "mini-swe-agent": ((1, 2, 3, 4),),
    "openai-agents": ((11, 12, 13, 14), (15, 16)),
    "opencode": ((2, 3, 4, 5, 6, 8, 9), (11, 12), (14, 16), (15,), (18, 19, 20)),
    "pi": ((1, 2, 3, 4, 5, 7), (16, 17, 18, 20)),
    "pydantic-ai": ((1, 2, 3, 4), (13,), (14, 15)),
    "qwen-code": ((1, 3, 4, 5, 8), (9, 11, 14), (16, 18, 20)),
    "smolagents": ((2, 4, 6), (7, 8)),
    "vercel-ai-sdk": ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12), (21,)),
}

# Turns that nothing ties to the session which they go on from: they begin a new one, and nothing worse.
IMPOSSIBLE: Mapping[str, Mapping[int, str]] = {}

# Messages that are stored twice because the client moved them behind others, or said them again later.
MOVED: Mapping[str, int] = {"aider": 4}

# Recorded as beside the main conversation, but a conversation of its own, which goes on.
SUBAGENTS: Mapping[str, frozenset[int]] = {"opencode": frozenset({15})}

CLIENT_IDS: Mapping[str, str] = {"opencode": "x-session-id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded call with the reply that it got."""

    number: int
    headers: Mapping[str, str]
    request: Mapping[str, Any]
    reply: Mapping[str, Any]
    is_main: bool

    @property
    def body(self) -> bytes:
        return json.dumps(self.request).encode()


def read_recording(directory: Path, client: str) -> list[Recorded]:
    replies = {each["n"]: each["reply"] for each in read_lines(directory / client / "responses.jsonl")}
    return [
        Recorded(
            number=each["n"],
            headers=end_to_end(each["headers"]),
            request=each["body"],
            reply=replies[each["n"]],
            is_main=each["note"].endswith("main turn") or each["n"] in SUBAGENTS.get(client, ()),
        )
        for each in read_lines(directory / client / "requests.jsonl")
        if each["path"].endswith("/chat/completions")
    ]


async def replay(worker: Worker, upstream: RecordedUpstream, call: Recorded, **headers: str) -> Answered:
    upstream.reply = call.reply
    more = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = {name: value for name, value in call.headers.items() if name.lower() not in more}
    answered = await worker.send(call.body, {**sent, **more})
    assert answered.status == 200, answered.body
    return answered


def view(messages: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """A history as identities; instructions and injected context are no part of it."""
    return [each for message in messages if (each := canonical(read_message(json.dumps(message).encode())))]


def whole(call: Recorded) -> list[bytes]:
    """Return the client's whole history once it has its reply."""
    return view([*call.request["messages"], call.reply])


def live(stored: Sequence[StoredMessage]) -> list[StoredMessage]:
    return [message for message in stored if message.status == "live" and message.turn > 0]


def check_turns(call: Recorded, before: Sequence[StoredMessage], stored: Sequence[StoredMessage]) -> None:
    """A question opens a turn, a tool result stays in the one of its call, the reply is in the turn it answers."""
    history = live(stored)
    question = [message for message in history if message.role == "user"][-1]
    assert history[-1].relayed
    assert history[-1].turn == question.turn
    if call.request["messages"][-1]["role"] == "user":
        assert question.turn not in {message.turn for message in before}
    else:
        assert question.turn in {message.turn for message in before}


def check_upstream(call: Recorded, received: bytes) -> None:
    """The request as the client sent it; only the usage of a stream is asked for where the client does not."""
    options = call.request.get("stream_options") or {}
    if not call.request.get("stream") or options.get("include_usage") or not call.is_main:
        assert received == call.body
        return
    sent, got = raw_json.split_object(call.body), raw_json.split_object(received)
    assert json.loads(got.pop("stream_options")) == {**options, "include_usage": True}
    sent.pop("stream_options", None)
    assert raw_json.split_array(got.pop("messages")) == raw_json.split_array(sent.pop("messages"))
    assert got == sent


def expected_session(client: str, number: int) -> int | None:
    """The main turn before this one in its session; None: it is the first one that can be told to be of it."""
    turns = next(turns for turns in SESSIONS[client] if number in turns)
    if number == turns[0] or number in IMPOSSIBLE.get(client, {}):
        return None
    return turns[turns.index(number) - 1]


@pytest.mark.parametrize("client", SESSIONS)
async def test_every_main_turn_finds_its_session(client: str, recordings: Path, database: Database) -> None:
    upstream = RecordedUpstream()
    calls = read_recording(recordings, client)
    main = {call.number: call for call in calls if call.is_main}
    assert sorted(main) == sorted(number for turns in SESSIONS[client] for number in turns)
    sessions: dict[int, str] = {}
    last: dict[str, Recorded] = {}
    async with run_scripted(model=upstream.model) as server, run_worker(database, server.base_url) as worker:
        for call in calls:
            before = await stored_messages(database)
            answered = await replay(worker, upstream, call)
            check_upstream(call, upstream.received)
            if not call.is_main:
                assert not answered.session
                assert await stored_messages(database) == before, "a side call is stored nowhere"
                continue
            previous = expected_session(client, call.number)
            if previous is None:
                assert answered.source == "new"
                assert answered.session not in sessions.values()
            else:
                assert answered.session == sessions[previous]
                assert answered.source == ("header" if client in CLIENT_IDS else "lineage")
            if client in CLIENT_IDS:
                assert answered.session == call.headers[CLIENT_IDS[client]]
            sessions[call.number], last[answered.session] = answered.session, call
            stored = await stored_messages(database, answered.session)
            check_turns(call, [each for each in before if each.session == answered.session], stored)
            assert [each for each in before if each.session != answered.session] == [
                each for each in await stored_messages(database) if each.session != answered.session
            ], "other sessions are left alone"
        for session, call in last.items():
            stored = await stored_messages(database, session)
            assert view([message.message for message in live(stored)]) == whole(call)
            assert [message.seq for message in sorted(stored, key=lambda each: each.seq)] == [
                *range(1, len(stored) + 1)
            ]
        await check_nothing_twice(database, sessions, main, moved=MOVED.get(client, 0))


async def check_nothing_twice(
    database: Database, sessions: Mapping[int, str], main: Mapping[int, Recorded], *, moved: int
) -> None:
    """A session holds a message as often as one history of the client did, however often it was resent."""
    for session in set(sessions.values()):
        most: Counter[bytes] = Counter()
        for number, call in main.items():
            if sessions[number] == session:
                most |= Counter(whole(call))
        stored = [message for message in await stored_messages(database, session) if message.turn > 0]
        again = Counter(view([message.message for message in stored])) - most
        assert again.total() <= moved, again


@pytest.mark.parametrize("client", SESSIONS)
async def test_a_retry_is_the_same_turn(client: str, recordings: Path, database: Database) -> None:
    """The same body once more: the reply that the client did not get is replaced.

    Of a first request that was answered nothing but its words could tell whose it is: that is not tried here.
    """
    upstream = RecordedUpstream()
    retried = {turns[-1] for turns in SESSIONS[client] if len(turns) > 1}
    async with run_scripted(model=upstream.model) as server, run_worker(database, server.base_url) as worker:
        for call in read_recording(recordings, client):
            answered = await replay(worker, upstream, call)
            if call.number not in retried or call.number in IMPOSSIBLE.get(client, {}):
                continue
            before = await stored_messages(database, answered.session)
            again = await replay(worker, upstream, call, x_stainless_retry_count="1")
            assert again.session == answered.session
            after = await stored_messages(database, answered.session)
            assert len(after) == len(before) + 1
            assert {message.turn for message in after} == {message.turn for message in before}
            assert view([each.message for each in live(after)]) == whole(call)


async def test_subagents_of_opencode_are_children_of_their_session(recordings: Path, database: Database) -> None:
    upstream = RecordedUpstream()
    async with run_scripted(model=upstream.model) as server, run_worker(database, server.base_url) as worker:
        ids = {
            call.number: (await replay(worker, upstream, call)).session
            for call in read_recording(recordings, "opencode")
            if call.number in {14, 15}
        }
    rows = await query(database, "SELECT id, parent FROM sessions")
    assert {row["id"]: row["parent"] for row in rows} == {ids[14]: None, ids[15]: ids[14]}


@pytest.mark.parametrize("client", SESSIONS)
async def test_contexts_keep_the_clients_order(client: str, recordings: Path, database: Database) -> None:
    """With everything on, a short conversation goes up whole, in the client's order, compaction or not."""
    upstream = RecordedUpstream()
    async with (
        run_scripted(model=upstream.model) as server,
        run_worker(database, server.base_url, strategy="slim", instructions="on") as worker,
    ):
        for call in read_recording(recordings, client):
            await replay(worker, upstream, call)
            sent = call.request["messages"]
            got = json.loads(upstream.received)["messages"]
            assert [each for each in got if each["role"] != "system"] == [
                each for each in sent if each["role"] != "system"
            ], call.number
