"""Live calls that reference their history: by the last reply, or as a conversation.

Each test plays the same calls before two services, of which one has no live sessions: the requests that reach the model
hosts have to be the same, byte for byte, and so has everything that is stored.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.proxy.live_calls import matching, references
from tersely.service.proxy.live_sessions.live_session import LiveSessions
from tersely.store.db.connection import Database as Store
from tests.conftest import Server
from tests.support.http import post
from tests.support.live_sides import UNEQUAL, Clock, Side, sides, stored
from tests.support.rows import query
from tests.support.services import Service
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

MODEL = "gpt-5-mini"
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CUSTOM = {"type": "custom", "name": "patch"}


class Client:
    """A client whose calls go to both sides. Each call names the last reply, unless it says otherwise."""

    def __init__(self, live: Side, plain: Side, key: str = "client", **members: Any) -> None:
        self.sides = live, plain
        self.key = key
        self.members = members
        self.last = ""
        self.sessions = ["", ""]
        self.source = ""

    def ask(
        self,
        content: Any,
        *replies: ScriptedReply,
        after: str | None = None,
        at: int = 0,
        headers: dict[str, str] | None = None,
        status: int = 200,
        **members: Any,
    ) -> list[dict[str, Any]]:
        """Return the items of the reply. ``after``: the id of the reply to continue (empty: of none)."""
        named = self.last if after is None else after
        body = {"model": MODEL, "input": content, **self.members, **members}
        body |= {"previous_response_id": named} if named and "conversation" not in body else {}
        found = []
        for index, side in enumerate(self.sides):
            side.at = at
            side.model.script(self.key, *replies)
            answer = side.post(
                "/v1/responses",
                content=written(body),
                headers={"content-type": "application/json", "x-script": self.key, **(headers or {})},
            )
            side.model.replies.pop(self.key, None)
            assert answer.status_code == status, answer.text
            self.sessions[index] = answer.headers.get("x-tersely-session", self.sessions[index])
            self.source = answer.headers.get("x-tersely-session-source", "")
            shown = {name: value for name, value in answer.headers.items() if name.startswith("x-tersely")}
            found.append(({name: shown[name] for name in shown.keys() - UNEQUAL}, _reply(answer.text)))
        assert found[0] == found[1]
        ours, theirs = (list(side.model.state.received) for side in self.sides)
        assert [each.body for each in ours] == [each.body for each in theirs]
        reply = found[0][1]
        self.last = reply.get("id", self.last)
        return list(reply.get("output", ()))

    def rest(self, method: str, path: str, **more: Any) -> None:
        """Call the REST API of both sides for this session."""
        for side, session in zip(self.sides, self.sessions, strict=True):
            assert side.request(method, f"/api/sessions/{session}{path}", **more).status_code < 300

    @property
    def sent(self) -> dict[str, Any]:
        """The newest request upstream."""
        return dict(json.loads(self.sides[0].model.state.received[-1].body))

    @property
    def hits(self) -> int:
        return self.sides[0].hits()["hit"]

    def check(self) -> None:
        """Compare what both sides have stored."""
        ours, theirs = (asyncio.run(stored(side.services[0].database)) for side in self.sides)
        assert ours == theirs


def written(body: dict[str, Any]) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(body).encode()


def _reply(text: str) -> dict[str, Any]:
    if not text.startswith("event:"):
        return dict(json.loads(text))
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return dict(events[-1].get("response", {}))


def says(words: str, **more: Any) -> ScriptedReply:
    return ScriptedReply(message={"content": words}, **more)


def calls(name: str = "add", *, is_custom: bool = False, number: int = 1) -> ScriptedReply:
    called = {"id": f"fc_{number}", "status": "completed", "call_id": f"call_{number}", "name": name}
    if is_custom:
        item = {**called, "id": f"ctc_{number}", "type": "custom_tool_call", "input": "words"}
    else:
        item = {**called, "type": "function_call", "arguments": "{}"}
    return ScriptedReply(message={"output": [item]})


def result(output: str = "done", *, number: int = 1, kind: str = "function_call_output") -> list[dict[str, Any]]:
    return [{"type": kind, "call_id": f"call_{number}", "output": output}]


def with_id(reply_id: str, words: str) -> ScriptedReply:
    """A reply under an id that the host has chosen."""
    content = [{"type": "output_text", "text": words, "annotations": []}]
    item = {
        "id": f"msg_{len(words)}_{words[-1]}",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": content,
    }
    reply = {
        "id": reply_id,
        "object": "response",
        "status": "completed",
        "model": MODEL,
        "output": [{**item, "content": content}],
    }
    return ScriptedReply(body=json.dumps(reply).encode())


@contextmanager
def both(
    server: Server, monkeypatch: pytest.MonkeyPatch, *, replicas: int = 1, is_forgetful: bool = True, **settings: Any
) -> Iterator[tuple[Side, Side]]:
    """Both sides, with one clock. Their hosts forget what they have answered: so Tersely has every history."""
    monkeypatch.setattr("tersely.composition.application.clock", Clock())
    with sides(server, replicas=replicas, is_forgetful=is_forgetful, **settings) as (live, plain):
        yield live, plain


def begun(live: Side, plain: Side, **members: Any) -> Client:
    """A client whose next call is live."""
    client = Client(live, plain, **members)
    for number in range(3):
        client.ask(f"question {number}")
    assert client.hits >= 1 or members.get("conversation")
    return client


@pytest.mark.parametrize(
    "body",
    [
        '{"previous_response_id":"resp_1","input":"hi","model":"m"}',
        '{"model":"m", "input" : [ {"role":"user","content":"hi"} ] ,"previous_response_id": "resp_1" }',
    ],
)
def test_body_around_a_history_takes_another_id(body: str) -> None:
    newest = b'{"role":"user","content":"hi"}'
    found = references.body_around(body.encode(), newest, OPENAI_RESPONSES.history, reply_id="resp_1")
    assert found is not None
    renamed = found.with_id("resp_a_longer_one")
    assert renamed.before + renamed.after == (found.before + found.after).replace(b"resp_1", b"resp_a_longer_one")
    again = renamed.with_id("resp_1")
    assert (again.before, again.after) == (found.before, found.after)
    assert body.encode().startswith(found.before)
    assert body.encode().endswith(found.after)


@pytest.mark.parametrize(
    "body",
    [
        '{"previous_response_id":"resp_2","input":"hi"}',
        '{"previous_response_id":"resp\\u005f1","input":"hi"}',
        '{"previous_response_id":"resp_1","input":"hi","input":"hi"}',
        '{"previous_response_id":"resp_1","previous_response_id":"resp_1","input":"hi"}',
        '{"previous_response_id":"resp_1","input":"other"}',
        '{"previous_response_id":"resp_1","input":["hi"],"x":[]}',
        '{"previous_response_id":"resp_1","input":[]}',
        '{"previous_response_id":"resp_1"}',
        '{"previous_response_id":"resp_1","input":"hi"',
    ],
)
def test_body_of_another_form_is_not_taken_apart(body: str) -> None:
    newest = b'{"role":"user","content":"hi"}'
    assert references.body_around(body.encode(), newest, OPENAI_RESPONSES.history, reply_id="resp_1") is None


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"previous_response_id" : "resp_1"}', ("resp_1", "")),
        (b'{"conversation":"conv_1"}', ("", "conv_1")),
        (b'{"conversation": {"id": "conv_1"}}', ("", "conv_1")),
        (b'{"previous_response_id":null,"conversation":"conv_1"}', ("", "conv_1")),
        (b'{"previous_response_id":null}', None),
        (b'{"input":"\\"previous_response_id\\":\\"resp_1\\""}', None),
        (b'{"previous_response_id":"resp\\u005f1"}', None),
    ],
)
def test_references_of_a_body(body: bytes, found: tuple[str, str] | None) -> None:
    assert references.References(OPENAI_RESPONSES.history).find(body) == found
    assert references.References(OPENAI_CHAT.history).find(body) is None


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("strategy", ["slim", "full"])
@pytest.mark.parametrize("as_text", [False, True])
def test_calls_by_the_last_replys_id_are_live(
    server: Server, monkeypatch: pytest.MonkeyPatch, strategy: str, streams: bool, as_text: bool
) -> None:
    with both(server, monkeypatch, strategy=strategy) as (live, plain):
        client = Client(live, plain, stream=streams, instructions="Be kind.", store=False)
        for number in range(6):
            content = f"question {number}" if as_text else [{"role": "user", "content": f"question {number}"}]
            client.ask(content, says(f"answer {number}\n<terse>about {number}</terse>"))
            assert "previous_response_id" not in client.sent
        assert len(client.sent["input"]) == 11
        assert client.hits == 4
        assert client.source == "body"
        client.check()


def test_history_in_front_of_the_id_is_matched_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The id may stand in front of the new messages or behind them."""
    with both(server, monkeypatch) as (live, plain):
        client = Client(live, plain)
        for number in range(6):
            named = {"previous_response_id": client.last} if client.last else {}
            client.members = {**named, "model": MODEL, "user": "u"}
            client.ask(f"question {number}", after="")
        assert client.hits == 4
        client.check()


def test_live_call_by_id_reads_nothing_and_commits_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        for name in ("reading", "statements", "group_commit", "transaction"):
            original = getattr(Store, name)

            def count(self: Store, *args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
                used.append(name)
                return original(self, *args, **more)

            monkeypatch.setattr(Store, name, count)
        before = client.hits
        body = written({"model": MODEL, "input": "and now?", "previous_response_id": client.last})
        for expected in (["statements"], ["reading", "reading"]):  # the second call is a branch
            used.clear()
            answer = live.post("/v1/responses", content=body, headers={"x-script": client.key})
            assert answer.status_code == 200
            assert used[: len(expected)] == expected
            assert (len(used) == 1) == (expected == ["statements"])
        assert client.hits == before + 1


def test_host_that_has_the_history_is_sent_the_call_unchanged(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"strategy": "full", "instructions": "off"}
    with both(server, monkeypatch, is_forgetful=False, **settings) as (live, plain):
        client = Client(live, plain)
        for number in range(4):
            client.ask(f"question {number}")
            assert ("previous_response_id" in client.sent) == (number > 0)
        client.ask("unstored", store=False)
        client.ask("and on")
        assert client.hits == 0
        assert len(live.hits()) > 0
        client.check()


def test_branch_from_an_earlier_reply_takes_the_full_path(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        first = client.last
        client.ask("left")
        left = client.last
        hits = client.hits
        client.ask("right", after=first)
        client.ask("right again")
        client.ask("left again", after=left)
        assert client.hits == hits
        client.ask("left, once more")
        client.ask("left, and on")
        client.ask("unknown", after="resp_000000000000000000000000", status=400)
        assert client.hits == hits + 1
        client.check()


async def test_another_tenants_id_is_unknown(
    locked: Service, model: Model, ours: Tenant, theirs: Tenant, key: str
) -> None:
    last = ""
    for number in range(4):
        body = {"model": MODEL, "input": f"secret {number}", "user": key}
        body |= {"previous_response_id": last} if last else {}
        answer = await post(locked, json.dumps(body).encode(), path="/v1/responses", X_Tersely_Key=ours.key)
        assert answer.status == 200
        last = answer.json["id"]
    for who, is_own in ((theirs, False), (ours, True)):
        body = {"model": MODEL, "input": "what was it?", "user": key, "previous_response_id": last}
        await post(locked, json.dumps(body).encode(), path="/v1/responses", X_Tersely_Key=who.key)
        sent = model.requests(key)[-1].body
        assert (b"secret 0" in sent, b"previous_response_id" in sent) == (is_own, not is_own)


@pytest.mark.parametrize(
    "change",
    [
        {"instructions": "Be brief."},
        {"tools": [FUNCTION]},
        {"store": False},
        {"include": ["reasoning.encrypted_content"]},
        {"temperature": 0.5},
        {"background": True},
        {"headers": {"x-tersely-strategy": "full"}},
        {"headers": {"x-tersely-epoch": '{"stride": 1}'}},
        {"headers": {"x-session-affinity": "somebody"}},
        {"headers": {"x-stainless-retry-count": "1"}},
        {"headers": {"idempotency-key": "once"}},
        {"headers": {"x-tersely-session": "another"}},
    ],
)
def test_what_differs_takes_the_full_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, instructions="Be kind.")
        hits = client.hits
        client.ask("differs", status=400 if "background" in change else 200, **change)
        assert client.hits == hits
        for number in range(3):
            client.ask(f"as before {number}")
        assert client.hits > hits
        client.check()


@pytest.mark.parametrize(
    ("method", "path", "more"),
    [
        ("POST", "/turns/t1/drop", {}),
        ("POST", "/messages/1/pin", {}),
        ("POST", "/undo", {}),
        ("POST", "/clear", {}),
        ("POST", "/compact", {}),
        ("PATCH", "", {"json": {"strategy": {"name": "window", "context_size": 2}}}),
        ("PUT", "/scratchpad", {"json": {"text": "a note"}}),
        (
            "POST",
            "/messages",
            {"json": {"dialect": "openai_chat", "messages": [{"role": "user", "content": "beside"}]}},
        ),
    ],
)
@pytest.mark.parametrize("members", [{}, {"conversation": "conv_1"}])
def test_changes_over_rest_are_seen_at_once(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    more: dict[str, Any],
    members: dict[str, Any],
) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, **members)
        client.rest(method, path, **more)
        for number in range(3):
            client.ask(f"after {number}")
        client.check()


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
@pytest.mark.parametrize("is_custom", [False, True])
def test_results_have_the_form_of_their_calls(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_custom: bool, kind: str, named: bool
) -> None:
    """``named``: the calls bring their new messages under Tersely's own header."""
    with both(server, monkeypatch) as (live, plain):
        client = Client(live, plain, tools=[FUNCTION, CUSTOM])
        more: dict[str, Any] = {"after": "", "headers": {"x-tersely-session": "talk"}} if named else {}
        for number in range(3):
            client.ask([{"role": "user", "content": f"question {number}"}], **more)
        hits = client.hits
        client.ask(
            [{"role": "user", "content": "go"}], calls("patch" if is_custom else "add", is_custom=is_custom), **more
        )
        assert client.hits == hits + 1
        status = 400 if not is_custom and kind != "function_call_output" else 200
        client.ask(result(kind=kind), says("thanks"), status=status, **more)
        assert client.hits == hits + (1 if is_custom and kind == "function_call_output" else 2)
        if status == 200:
            form = "custom_tool_call_output" if is_custom else "function_call_output"
            assert client.sent["input"][-1]["type"] == form
            client.ask([{"role": "user", "content": "and on"}], **more)
        client.check()


def test_parallel_calls_and_a_result_without_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch, strategy="slim") as (live, plain):
        client = begun(live, plain, tools=[FUNCTION])
        two = [calls(number=number).message["output"][0] for number in (1, 2)]
        client.ask("go", ScriptedReply(message={"output": two}))
        hits = client.hits
        client.ask([*result(number=2), *result(number=1), {"role": "user", "content": "well?"}])
        assert client.hits == hits + 1
        client.ask("a reference", calls(number=3))
        client.ask([{"type": "item_reference", "id": "fc_3"}, *result(number=3)], status=400)
        assert client.hits == hits + 2
        client.ask(result(number=3))
        client.ask("on")
        client.check()


@pytest.mark.parametrize("named_by", ["id", "conversation", "header"])
@pytest.mark.parametrize(
    "first",
    [
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"},
        {"type": "reasoning", "id": "rs_9", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": " "}]},
    ],
)
def test_item_that_is_read_as_a_part_of_the_reply_is_not_lost(
    server: Server, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], named_by: str
) -> None:
    with both(server, monkeypatch) as (live, plain):
        more: dict[str, Any] = {"headers": {"x-tersely-session": "talk"}, "after": ""} if named_by == "header" else {}
        client = Client(live, plain, **({"conversation": "conv_1"} if named_by == "conversation" else {}))
        for number in range(3):
            client.ask([{"role": "user", "content": f"question {number}"}], **more)
        client.ask([{"role": "user", "content": "go"}], calls(), **more)
        assert client.hits
        # A history of thoughts or blanks alone is none: the host refuses what is left of it.
        is_empty = named_by == "header" and first["type"] != "function_call"
        client.ask([first, *result()], says("thanks"), status=400 if is_empty else 200, **more)
        client.ask([{"role": "user", "content": "and on"}], **more)
        client.check()


def test_call_without_result_and_result_without_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, tools=[FUNCTION])
        client.ask("go", calls(number=1))
        client.ask("never mind", says("well"))
        for number in range(3):
            client.ask(f"on {number}")
        hits = client.hits
        assert hits >= 3
        client.ask([*result("late", number=1), {"role": "user", "content": "it came"}])
        client.ask([*result("stray", number=7), {"role": "user", "content": "whose?"}])
        for number in range(3):
            client.ask(f"and on {number}")
        client.check()


def test_tool_of_ours_is_answered_in_a_live_call(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        hits = client.hits
        arguments = json.dumps({"mode": "search", "query": "question"})
        called = {"id": "fc_9", "type": "function_call", "status": "completed", "call_id": "call_9"}
        call = ScriptedReply(message={"output": [{**called, "name": "context_search", "arguments": arguments}]})
        client.ask("search", call, says("found it"))
        assert client.hits == hits + 1
        for number in range(3):
            client.ask(f"on {number}")
        client.check()


def test_two_calls_at_once_by_one_id_are_two_branches(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        hits = client.hits
        bodies = [
            {"model": MODEL, "input": words, "previous_response_id": client.last} for words in ("slowly", "quickly")
        ]
        live.model.script("at once", says("one", first_delay=1.0), says("other", first_delay=0.2))
        with ThreadPoolExecutor(2) as pool:
            asking = []
            for body in bodies:
                sent_as = {"x-script": "at once"}
                asking.append(pool.submit(live.post, "/v1/responses", content=written(body), headers=sent_as))
                time.sleep(0.3)
            answers = [each.result() for each in asking]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert client.hits == hits + 2
        sent = [json.loads(each.body)["input"] for each in list(live.model.state.received)[-2:]]
        assert sent[0][:-1] == sent[1][:-1]
        assert [items[-1]["content"] for items in sent] == ["slowly", "quickly"]
        for body, answer in zip(bodies, answers, strict=True):
            following = {"model": MODEL, "input": "and on", "previous_response_id": answer.json()["id"]}
            assert live.post("/v1/responses", content=written(following)).status_code == 200
            items = json.loads(live.model.state.received[-1].body)["input"]
            assert items[-3]["content"] == body["input"]
            assert len(items) == len(sent[0]) + 2


@pytest.mark.parametrize("members", [{}, {"conversation": "conv_1"}])
def test_call_that_is_sent_again_in_flight_is_one_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any]
) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, **members)
        hits = client.hits
        body = {"model": MODEL, "input": "the same question", **members}
        body |= {} if members else {"previous_response_id": client.last}
        for side in (live, plain):
            side.model.script("again", says("one", first_delay=1.0), says("other", first_delay=1.0))
            with ThreadPoolExecutor(2) as pool:
                asking = []
                for _ in range(2):
                    sent_as = {"x-script": "again"}
                    asking.append(pool.submit(side.post, "/v1/responses", content=written(body), headers=sent_as))
                    time.sleep(0.3)
                assert [each.result().status_code for each in asking] == [200, 200]
            asked = "SELECT count(*) AS n FROM messages WHERE position('the same question'::bytea IN raw) > 0"
            (row,) = asyncio.run(query(side.services[0].database, asked))
            assert row["n"] == 1
        assert client.hits > hits


@pytest.mark.parametrize("members", [{}, {"conversation": "conv_1"}])
def test_question_of_a_slow_call_is_stored_before_its_reply(
    server: Server, monkeypatch: pytest.MonkeyPatch, members: dict[str, Any]
) -> None:
    monkeypatch.setattr("tersely.service.proxy.recording.recorder.HOLD", 0.2)
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, instructions="Be kind.", **members)
        hits = client.hits
        for number in range(3):
            client.ask(f"slowly {number}", says(f"at last {number}", first_delay=0.6))
        assert client.hits == hits + 3
        client.check()


def test_evicted_session_takes_the_full_path(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted: list[LiveSessions] = []
    find = LiveSessions.find

    def find_after_eviction(self: LiveSessions, call: Any) -> Any:
        if evicted:
            self.clear()
        return find(self, call)

    monkeypatch.setattr(LiveSessions, "find", find_after_eviction)
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        hits = client.hits
        evicted.append(LiveSessions(0))
        client.ask("evicted")
        assert client.hits == hits
        evicted.clear()
        client.ask("again")
        assert client.hits == hits + 1
        client.check()


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_a_conversation_that_the_host_lacks_are_live(
    server: Server, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = Client(live, plain, conversation={"id": "conv_1"} if streams else "conv_1", stream=streams)
        for number in range(6):
            client.ask(f"question {number}")
        assert client.hits == 4
        assert "conversation" not in client.sent
        reply = client.last
        client.ask("a branch", conversation=None, after=reply)
        client.ask("and on")
        client.check()


def test_calls_of_a_conversation_at_once_are_stored_as_they_came(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain, conversation="conv_1")
        hits = client.hits
        for side in (live, plain):
            side.model.script("beside", says("at last", first_delay=1.5), says("soon"))
            with ThreadPoolExecutor(2) as pool:
                asking = []
                for words in ("a slow question", "a quick question"):
                    body = written({"model": MODEL, "input": words, "conversation": "conv_1"})
                    asking.append(pool.submit(side.post, "/v1/responses", content=body, headers={"x-script": "beside"}))
                    time.sleep(0.5)
                assert [each.result().status_code for each in asking] == [200, 200]
        assert client.hits > hits
        client.ask("and on")
        assert [item["content"] for item in client.sent["input"][-5::2]] == [
            "a slow question",
            "a quick question",
            "and on",
        ]
        client.check()


@pytest.mark.parametrize("conversation", ["", "conv_1"])
def test_reply_of_another_replica_is_continued(
    server: Server, monkeypatch: pytest.MonkeyPatch, conversation: str
) -> None:
    with both(server, monkeypatch, replicas=2) as (live, plain):
        client = begun(live, plain, **({"conversation": conversation} if conversation else {}))
        client.ask("elsewhere", at=1)
        client.ask("here", at=0)
        client.ask("here again", at=0)
        client.ask("there", at=1)
        assert len(client.sent["input"]) == 13
        client.check()


def test_branch_of_another_replica_is_seen_when_the_trust_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "TRUSTED", 0.0)
    with both(server, monkeypatch, replicas=2) as (live, plain):
        client = begun(live, plain)
        last, hits = client.last, client.hits
        client.ask("unchanged, so it is live")
        assert client.hits == hits + 1
        last = client.last
        client.ask("elsewhere", at=1)
        client.ask("here", at=0, after=last)
        assert client.hits == hits + 1
        client.check()


def test_session_that_another_replica_drops_from_is_asked_for_after_the_trust(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "TRUSTED", 0.0)
    with both(server, monkeypatch, replicas=2) as (live, plain):
        client = begun(live, plain)
        for side in (live, plain):
            side.at = 1
        client.rest("POST", "/turns/t1/drop")
        client.ask("after")
        assert "question 0" not in json.dumps(client.sent)
        client.check()


@pytest.mark.parametrize("reply_id", ["resp_1", "resp_" + "0123456789" * 3])
def test_id_of_two_sessions_names_neither(server: Server, monkeypatch: pytest.MonkeyPatch, reply_id: str) -> None:
    """A host that answers twice under one id, as a cache does."""
    with both(server, monkeypatch) as (live, plain):
        one, other = Client(live, plain, "one"), Client(live, plain, "other")
        for number in range(3):
            one.ask(f"question {number}", with_id(f"{reply_id}{number}", f"answer {number}"))
        hits = one.hits
        assert hits >= 1
        other.ask("another question", with_id(f"{reply_id}2", "the same"))
        one.ask("whose?", status=400)
        assert one.hits == hits
        assert "previous_response_id" in one.sent
        one.check()


def test_short_ids_are_looked_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that counts gives an id again after its restart."""
    with both(server, monkeypatch) as (live, plain):
        first = Client(live, plain, "first")
        first.ask("long ago", with_id("resp_3", "an old answer"))
        monkeypatch.setattr(LiveSessions, "is_reply_of", lambda *_: True)
        client = Client(live, plain)
        for number in range(4):
            client.ask(f"question {number}", with_id(f"resp_{number}", f"answer {number}"))
        hits = client.hits
        assert hits == 2
        client.ask("whose?", status=400)
        assert client.hits == hits
        client.check()


def test_epoch_starts_and_overflow(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    error = {"message": "This model's maximum context length", "code": "context_length_exceeded"}
    refusal = ScriptedReply(status=400, body=json.dumps({"error": error}).encode())
    with both(server, monkeypatch, epoch='{"high": 1500, "low": 600}') as (live, plain):
        client = begun(live, plain, instructions="Be kind.")
        for number in range(12):
            client.ask(f"{number} " + "words " * 80, says("more words " * 20))
        assert live.hits()["epoch"] >= 1
        assert len(client.sent["input"]) < 20
        client.ask("too long", refusal, says("now it fits"))
        for number in range(3):
            client.ask(f"on {number}")
        client.check()


@pytest.mark.parametrize(
    "words", ["Grüße 🙂 \u2028 \u0000 end", '"quoted" \\ back', "\ud83d alone", "  ", "日本" * 300]
)
def test_any_text_is_sent_and_stored_the_same(server: Server, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = Client(live, plain)
        for number in range(5):
            client.ask([{"role": "user", "content": f"{number} {words}"}], says(f"{words} {number}"))
        client.check()


def test_body_that_mentions_other_ids_is_compared_as_a_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch) as (live, plain):
        client = begun(live, plain)
        other = client.last
        client.ask("on")
        words = json.dumps({"previous_response_id": other})
        client.ask(f"What is {words}?")
        client.ask([{"role": "user", "content": [{"type": "input_text", "text": words}]}])
        client.check()


def test_long_contexts_are_read_from_the_store(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MOST_ROWS", 1)
    with both(server, monkeypatch) as (live, plain):
        client = Client(live, plain)
        for number in range(5):
            client.ask(f"question {number}")
        assert client.hits == 0
        client.check()


def test_conversation_that_the_host_keeps_is_never_held(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(server, monkeypatch, is_forgetful=False) as (live, plain):
        for side in (live, plain):
            side.model.state.kept.open([])
        client = Client(live, plain, conversation="conv_1")
        for number in range(4):
            client.ask(f"question {number}")
            assert client.sent["conversation"] == "conv_1"
        metrics = live.http.get(f"{live.services[0].url}/metrics").text
        assert 'tersely_live_sessions{state="held"} 0.0' in metrics
        assert client.hits == 0
        client.check()
