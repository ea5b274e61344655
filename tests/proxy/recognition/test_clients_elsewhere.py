"""Recorded clients that speak other dialects than chat completions, replayed through the running service.

The recordings are not part of the project; without them these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest

from tersely.dialects.registry import DIALECTS
from tersely.domain.history.chain import canonical
from tersely.domain.messages import Dialect
from tersely.fakellm.scripted import run_scripted
from tests.conftest import Database
from tests.support.recorded_clients import RecordedUpstream, end_to_end, read_lines
from tests.support.rows import StoredMessage, query, stored_messages
from tests.support.services import Worker, run_worker

# The main turns of each client, session by session, by their numbers in the recording.
SESSIONS: Mapping[tuple[str, Dialect], Sequence[Sequence[int]]] = {
    ("claude-code", "anthropic"): (
        (3, 5, 6, 8, 12),
        (15, 16, 17, 18),
        (21, 23),
        (22,),
        (26, 28),
        (27,),
        (31, 32, 33, 34, 36, 37, 38),
        (41, 42, 43),
        (46, 48, 50),
    ),
    ("copilot-cli", "anthropic"): ((10, 11, 12),),
    ("langchain", "anthropic"): ((21, 22, 23, 24),),
    ("pi", "anthropic"): ((8, 9, 10, 11),),
    ("pydantic-ai", "anthropic"): ((9, 10, 11, 12),),
    ("vercel-ai-sdk", "anthropic"): ((17, 18, 19, 20),),
    ("gemini-cli", "gemini"): ((2, 4, 5, 7, 10), (13, 15, 19), (21, 23, 25)),
    ("codex", "openai_responses"): ((1, 2, 3, 4), (5, 7, 8, 10, 11, 13), (17, 21), (22, 23, 24)),
    ("copilot-cli", "openai_responses"): ((7, 8, 9),),
    ("langchain", "openai_responses"): ((9, 10, 11, 12),),
    ("llamaindex", "openai_responses"): ((5, 6, 7, 8),),
    ("llm", "openai_responses"): ((11,),),
    ("openai-agents", "openai_responses"): ((1, 2, 3, 4), (5,), (9, 10)),
    ("pi", "openai_responses"): ((12, 13, 14, 15),),
    ("pydantic-ai", "openai_responses"): ((5, 6, 7, 8),),
    ("vercel-ai-sdk", "openai_responses"): ((13, 14, 15, 16),),
}
# Sessions of an agent that another session's agent calls: first call -> the session's first call.
CHILDREN: Mapping[tuple[str, Dialect], Mapping[int, int]] = {("claude-code", "anthropic"): {22: 21, 27: 26}}
# On each resume the client says the same result once more in one message, which no provider is bound to bear.
MENDED: Mapping[str, frozenset[int]] = {"gemini-cli": frozenset({7, 10})}
PATHS: Mapping[Dialect, str] = {"anthropic": "/v1/messages", "openai_responses": "/v1/responses", "gemini": "/v1beta/"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded call with the reply that it got, which is a message in its dialect."""

    number: int
    target: str
    headers: Mapping[str, str]
    request: Mapping[str, Any]
    reply: Mapping[str, Any]
    is_main: bool

    @property
    def body(self) -> bytes:
        return json.dumps(self.request).encode()


def read_recording(directory: Path, client: str, dialect: Dialect) -> list[Recorded]:
    replies = {each["n"]: each["reply"] for each in read_lines(directory / client / "responses.jsonl")}
    main = {number for turns in SESSIONS[client, dialect] for number in turns}
    return [
        Recorded(
            number=each["n"],
            target=each["path"] + (f"?{urlencode(each['query'])}" if each.get("query") else ""),
            headers=end_to_end(each["headers"]),
            request=each["body"],
            reply=_reply(dialect, replies[each["n"]]),
            is_main=each["n"] in main,
        )
        for each in read_lines(directory / client / "requests.jsonl")
        if each["path"].startswith(PATHS[dialect])
        and each["method"] == "POST"
        # What a recorded id names no host here has kept: `test_referenced_histories` is about those.
        and not each["body"].get("previous_response_id")
    ]


def _reply(dialect: Dialect, parts: list[Any]) -> dict[str, Any]:
    if dialect == "anthropic":
        return {"content": parts}
    if dialect == "openai_responses":
        return {"output": parts}
    candidates = [candidate for chunk in parts for candidate in chunk.get("candidates", ())]
    return {"parts": [part for each in candidates for part in each.get("content", {}).get("parts", ())]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The session headers that the client got."""

    session: str
    source: str


async def replay(worker: Worker, upstream: RecordedUpstream, call: Recorded) -> Answered:
    upstream.reply = call.reply
    root = worker.base_url
    async with worker.http.post(root + call.target, data=call.body, headers=dict(call.headers)) as response:
        body = await response.read()
        assert response.status == 200, (call.number, body)
        headers = response.headers
        return Answered(
            session=headers.get("x-tersely-session", ""), source=headers.get("x-tersely-session-source", "")
        )


def view(dialect: Dialect, raws: Sequence[bytes]) -> list[bytes]:
    return [each for raw in raws if (each := canonical(DIALECTS[dialect].read_message(raw)))]


def whole(dialect: Dialect, call: Recorded) -> list[bytes]:
    """Return the client's whole history once it has its reply."""
    reply = {"role": "assistant" if dialect == "anthropic" else "model", **call.reply}
    if dialect == "openai_responses":
        reply = dict(call.reply)
    read = [message.raw for message in DIALECTS[dialect].read_request(call.body).messages]
    return view(dialect, [*read, json.dumps(reply).encode()])


def live(stored: Sequence[StoredMessage]) -> list[bytes]:
    return [message.raw for message in stored if message.status == "live" and message.turn > 0]


@pytest.mark.parametrize(("client", "dialect"), SESSIONS)
async def test_every_main_turn_finds_its_session(
    client: str, dialect: Dialect, recordings: Path, database: Database
) -> None:
    upstream = RecordedUpstream()
    sessions: dict[int, str] = {}
    last: dict[str, Recorded] = {}
    async with run_scripted(model=upstream.model) as server, serving(database, server.root) as worker:
        for call in read_recording(recordings, client, dialect):
            before = await query(database, "SELECT count(*) FROM messages")
            answered = await replay(worker, upstream, call)
            is_same = json.loads(upstream.model.received[-1].body) == call.request
            assert is_same is (call.number not in MENDED.get(client, ())), call.number
            if not call.is_main:
                assert not answered.session, call.number
                assert await query(database, "SELECT count(*) FROM messages") == before
                continue
            turns = next(turns for turns in SESSIONS[client, dialect] if call.number in turns)
            if call.number == turns[0]:
                assert answered.source == "new", call.number
                assert answered.session not in sessions.values()
            else:
                assert answered.session == sessions[turns[0]], call.number
            sessions[call.number], last[answered.session] = answered.session, call
        for session, call in last.items():
            assert view(dialect, live(await stored_messages(database, session))) == whole(dialect, call), call.number
    parents = {row["id"]: row["parent"] for row in await query(database, "SELECT id, parent FROM sessions")}
    children = CHILDREN.get((client, dialect), {})
    for turns in SESSIONS[client, dialect]:
        parent = children.get(turns[0])
        assert parents[sessions[turns[0]]] == (sessions[parent] if parent else None)


@pytest.mark.parametrize(("client", "dialect"), SESSIONS)
async def test_contexts_are_valid_with_everything_on(
    client: str, dialect: Dialect, recordings: Path, database: Database
) -> None:
    """The upstream is strict: a context that its provider would refuse is an error here."""
    upstream = RecordedUpstream()
    async with (
        run_scripted(model=upstream.model) as server,
        serving(
            database, server.root, strategy="slim", instructions="on", epoch='{"high": 2000, "low": 500}'
        ) as worker,
    ):
        calls = list(read_recording(recordings, client, dialect))
        sessions = [(await replay(worker, upstream, call)).session for call in calls]
    assert len(sessions) == len(calls) > 0, "each call was answered with 200"
    assert any(sessions)


def serving(database: Database, root: str, **settings: Any) -> Any:
    others = dict.fromkeys(("anthropic_base_url", "gemini_base_url", "gemini_gca_base_url"), root)
    return run_worker(database, f"{root}/v1", **others, **settings)


async def test_somebody_answers_the_probe(database: Database) -> None:
    upstream = RecordedUpstream()
    async with (
        run_scripted(model=upstream.model) as server,
        serving(database, server.root) as worker,
        aiohttp.ClientSession() as http,
        http.head(worker.base_url + "/") as response,
    ):
        assert response.status == 200
