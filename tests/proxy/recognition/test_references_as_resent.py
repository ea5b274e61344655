"""A conversation by the ids of its replies is the same as one that is sent whole each time: stored, and shown."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import Answered, post
from tests.support.responses_talks import MODEL, TOOL
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

Items = list[dict[str, Any]]
_numbers = itertools.count(1)

RECIPES: dict[str, dict[str, Any]] = {
    "slim": {},
    "full": {"strategy": "full", "instructions": "off"},
    "slim, cut at once": {"strategy": '{"name": "slim", "recent_turns": 1}', "epoch": "every_request"},
    "slim, cut by watermarks": {"epoch": '{"high": 1500, "low": 500}'},
    "window": {"strategy": '{"name": "window", "context_size": 2}', "epoch": "every_request"},
    "compact": {"strategy": "compact", "epoch": '{"high": 1500, "low": 500}'},
    "trim": {"strategy": '{"name": "trim", "max_context_turns": 3}'},
    "tiered": {"strategy": "tiered", "epoch": "every_request"},
}


# What a reply says beside its words, by strategy; the reply's number stands for {}.
TAGS = {"slim": "\n<terse>said {}</terse>", "window": "\n\n### STATE\nGoal: reply {}"}
CALL = "call add"
LONG = "a longer question " * 100


@dataclass(frozen=True, slots=True)
class Step:
    """A client's next step. ``at``: the number of the reply that it continues, from the last one on."""

    kind: Literal["say", "tool", "again", "developer"]
    at: int = 0
    words: str = "more"
    instructions: str | None = None


def steps_of(kinds: list[str], places: list[int]) -> st.SearchStrategy[list[Step]]:
    """Conversations of such steps, each behind one of such replies."""
    step = st.builds(
        Step,
        kind=st.sampled_from(kinds),
        at=st.sampled_from(places),
        words=st.sampled_from(["more", LONG, "something else"]),
        instructions=st.sampled_from([None, "Be kind.", "Be brief."]),
    )
    return st.lists(step, min_size=2, max_size=12)


# Which notes between messages go with a branch is told by their neighbours in both ways, but not by the same.
BRANCHES = steps_of(["say", "say", "tool", "again"], [0, 0, 0, 1, 2, 4])
NOTES = steps_of(["say", "tool", "developer"], [0])


# A reply, the session in Tersely's own header, a conversation of the host's, or nothing: the whole history is sent.
Reference = Literal["reply", "session", "conversation", "history"]


@dataclass(slots=True)
class Client:
    """One that names what leads to a reply, or sends it.

    A session's name brings new messages alone behind the last reply, and the history for a branch. A conversation grows
    at its end until the first branch; then replies are named.
    """

    services: Sequence[Service]
    model: Model
    key: str
    tag: str
    by: Reference
    streams: bool = False
    replies: list[tuple[str, Items]] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    session: str = ""
    last: tuple[int, Items, str | None] | None = None
    last_in_conversation: int = 0
    calls: dict[str, str] = field(default_factory=dict)

    def do(self, step: Step) -> None:
        if step.kind == "again" and self.last is not None and self.last[0]:
            self.ask(*self.last)
            return
        answered = [number for number, (_, items) in enumerate(self.replies, 1) if items[-1]["type"] == "message"]
        at = answered[-1 - min(step.at, len(answered) - 1)] if answered else 0
        text = f'{CALL} {{"a": 1}}' if step.kind == "tool" else step.words
        items: Items = [{"type": "message", "role": "user", "content": f"{text}" if at else f"{self.key} {text}"}]
        if step.kind == "developer":
            items.insert(0, {"type": "message", "role": "developer", "content": f"Note: {step.words[:20]}"})
        output = self.ask(at, items, step.instructions)
        while called := [item for item in output if item["type"] == "function_call"]:
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "done"} for item in called
            ]
            output = self.ask(len(self.replies), results, step.instructions)

    def ask(self, at: int, items: Items, instructions: str | None) -> Items:
        self.last = (at, items, instructions)
        name, before = self.replies[at - 1] if at else ("", [])
        request: dict[str, Any] = {"model": MODEL, "user": self.key, "tools": [TOOL]}
        if instructions is not None:
            request["instructions"] = instructions
        request["input"] = [*before, *items]
        in_conversation = self.by == "conversation" and at == self.last_in_conversation == len(self.replies)
        if in_conversation:
            request |= {"conversation": f"conv_{self.key}", "input": items}
        elif self.by in {"reply", "conversation"} and name:
            request |= {"previous_response_id": name, "input": items}
        elif self.by == "session" and at == len(self.replies):
            request["input"] = items
        if not str(items[-1].get("content")).startswith((CALL, f"{self.key} {CALL}")):
            self.model.script(self.key, self._next_reply())
        answer, response = self._post(request)
        assert response["previous_response_id"] == request.get("previous_response_id")
        self.session = self.session or answer.session
        assert answer.session == self.session
        self.shown.append(self._shown())
        output: Items = response["output"]
        self.replies.append((response["id"], [*before, *items, *output]))
        if in_conversation:
            self.last_in_conversation = len(self.replies)
        return output

    def _post(self, request: dict[str, Any]) -> tuple[Answered, dict[str, Any]]:
        """Ask the replicas in turn; return the answer and the response object in it."""
        service = self.services[len(self.replies) % len(self.services)]
        body = json.dumps(request | ({"stream": True} if self.streams else {})).encode()
        named = {"X_Tersely_Session": f"s-{self.key}"} if self.by == "session" else {}
        answer = asyncio.run(post(service, body, path="/v1/responses", **named))
        assert answer.status == 200, answer.body
        if not self.streams:
            return answer, answer.json
        *_, last = (json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {"))
        assert last["type"] == "response.completed"
        return answer, last["response"]

    def _next_reply(self) -> ScriptedReply:
        """A reply with words of its own: a history that is sent whole cannot say which of equal replies it means."""
        number = len(self.replies) + 1
        words = f"Reply {number}.{self.tag.format(number)}"
        return ScriptedReply(message={"role": "assistant", "content": words})

    def _shown(self) -> Any:
        sent = json.loads(self.model.requests(self.key)[-1].body)
        named = sent.get("previous_response_id")
        before = self.model.state.kept.replies[named].items if named else []
        items = [_plain(item) for item in [*before, *sent["input"]]]
        notes = sorted((item for item in items if item.get("role") == "developer"), key=repr)
        rest = [item for item in items if item.get("role") != "developer"]
        return json.loads(self._named(json.dumps([sent.get("instructions"), notes, rest])))

    def _named(self, text: str) -> str:
        """With names that are the same for both clients: keys, and calls in the order in which they were made."""
        named = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d", "NOW", text.replace(self.key, "KEY"))
        return re.sub(r"call_[0-9a-f]{24}", lambda call: self.calls.setdefault(call[0], f"c{len(self.calls)}"), named)

    def stored(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The current history in its order, all that was ever said, and the instructions that hold now."""
        sql = "SELECT turn, role, status, raw FROM messages WHERE session_id = $1 ORDER BY place, seq"
        rows = asyncio.run(query(self.services[0], sql, self.session))
        messages = [(row["turn"], row["role"], row["status"], _said(self._named(row["raw"].decode()))) for row in rows]
        instructions = [each for each in messages if not each[0] and each[2] == "live"]
        links = [each for each in messages if each[0]]
        current = [each for each in links if each[2] == "live"]
        return (
            current,
            sorted((turn, role, repr(words)) for turn, role, _, words in links),
            sorted(instructions, key=repr),
        )


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """Without what a host makes up anew each time."""
    return {name: value for name, value in item.items() if name not in {"id", "status"}}


def _said(raw: str) -> Any:
    message = json.loads(raw)
    items = message["output"] if "output" in message and "type" not in message else [message]
    return [_plain(item) for item in items]


TalkedWith = tuple[Sequence[Service], Model, str]


@pytest.fixture(scope="module", params=RECIPES)
def talked_with(request: pytest.FixtureRequest, store: Database, model: Model) -> Iterator[TalkedWith]:
    """Start two replicas in front of one model. Return them with the tags that the model adds to its replies."""
    settings = RECIPES[request.param]
    with serve(store, model.url, **settings) as one, serve(store, model.url, **settings) as other:
        yield (one, other), model, TAGS.get(request.param.partition(",")[0], "")


def two_ways(
    talked_with: TalkedWith, steps: list[Step], *, by: Reference = "reply", streams: bool = False
) -> tuple[Client, Client]:
    """Have a client that names something and one that sends everything take the same steps."""
    key = f"k{secrets.token_hex(4)}{next(_numbers):04}"
    services, model, tag = talked_with
    named = Client(services, model, key=f"{key}n", tag=tag, by=by, streams=streams)
    resent = Client(services, model, key=f"{key}r", tag=tag, by="history", streams=streams)
    if by == "session":  # a session keeps the instructions of a call that brings none
        steps = [replace(step, instructions=step.instructions or "Be kind.") for step in steps]
    for step in steps:
        named.do(step)
        resent.do(step)
        assert named.shown == resent.shown
    return named, resent


as_property = settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def say(words: str, at: int = 0) -> Step:
    """A question behind the reply that is ``at`` replies before the last one."""
    return Step(kind="say", at=at, words=words)


@as_property
@example([say("more"), say("same"), say("else"), say("same"), say("same", 2), say("more", 1), say("more")], "reply")
@example([say("more"), say("else"), say("same"), say("same", 2), say("on", 1), say("more", 1)], "session")
@example([say("more"), say("else", 1), *(say("on") for _ in range(5)), say("back", 2), say("more", 1)], "session")
@example(
    [say(LONG) for _ in range(6)] + [say("back", 4), say("more"), say("again", 2), say("on", 1), say("more")], "reply"
)
@given(steps=BRANCHES, by=st.sampled_from(["reply", "session"]))
def test_branches_by_ids_as_resent(talked_with: TalkedWith, steps: list[Step], by: Reference) -> None:
    named, resent = two_ways(talked_with, steps, by=by)
    assert named.stored() == resent.stored()


@as_property
@given(steps=NOTES)
def test_notes_by_ids_as_resent(talked_with: TalkedWith, steps: list[Step]) -> None:
    named, resent = two_ways(talked_with, steps)
    assert named.stored() == resent.stored()


@pytest.mark.parametrize("by", ["reply", "session"])
@pytest.mark.parametrize(
    "steps",
    [
        [say("more"), say("else"), say("same"), say("same", 2), say("on", 1), say("more", 1)],
        [say(LONG) for _ in range(6)] + [say("back", 4), say("more"), say("again", 2), say("on", 1), say("more")],
        [say("größer 🙂"), Step("tool"), say(LONG), Step("tool", 1), say("zurück", 2), Step("again"), say("weiter")],
    ],
    ids=["short", "long", "tools"],
)
def test_streamed_branches_by_ids_as_resent(talked_with: TalkedWith, steps: list[Step], by: Reference) -> None:
    named, resent = two_ways(talked_with, steps, by=by, streams=True)
    assert named.stored() == resent.stored()


def names_reply(service: Service, key: str, words: str, reply: str = "") -> Answered:
    """Ask behind the reply of this id (empty: at the beginning)."""
    request = {"model": MODEL, "user": key, "input": words} | ({"previous_response_id": reply} if reply else {})
    answer = asyncio.run(post(service, json.dumps(request).encode(), path="/v1/responses"))
    assert answer.status == 200, answer.body
    return answer


def test_id_names_one_of_two_replies_with_equal_words(store: Database, model: Model) -> None:
    key = f"k{secrets.token_hex(4)}"
    for tag in ("beginning", "first", "second"):
        message = {"role": "assistant", "content": f"Same.\n<terse>{tag}</terse>"}
        model.script(key, ScriptedReply(message=message))
    with serve(store, model.url) as service:
        beginning = names_reply(service, key, f"{key} question").json["id"]
        replies = [names_reply(service, key, "another question", beginning).json["id"] for _ in range(2)]
        for reply, tag, other in zip(replies, ("first", "second"), ("second", "first"), strict=True):
            names_reply(service, key, "go on", reply)
            sent = model.requests(key)[-1].body.decode()
            assert f"<terse>{tag}</terse>" in sent
            assert f"<terse>{other}</terse>" not in sent


@pytest.mark.parametrize("by", ["reply", "session", "history"])
def test_branch_behind_the_cut_shows_the_turns_of_the_strategy(store: Database, model: Model, by: Reference) -> None:
    key = f"k{secrets.token_hex(4)}"
    with serve(store, model.url, **RECIPES["window"]) as service:
        client = Client([service], model, key=key, tag="", by=by)
        for number in range(1, 6):
            client.do(say(f"question {number}"))
        client.do(say("another way", at=2))
        sent = model.requests(key)[-1].body.decode()
    assert "question 3" in sent
    assert "question 4" not in sent


@pytest.mark.parametrize("by", ["reply", "session", "history"])
def test_log_has_the_line_of_the_reply_that_the_client_returns_to(store: Database, model: Model, by: Reference) -> None:
    key = f"k{secrets.token_hex(4)}"
    with serve(store, model.url, **RECIPES["slim, cut at once"]) as service:
        client = Client([service], model, key=key, tag=TAGS["slim"], by=by)
        for step in [say("more"), say("else"), say("else", 1)]:
            client.do(step)
        for step, line, other in [(say("on", 1), "said 2", "said 3"), (say("further", 1), "said 3", "said 2")]:
            client.do(step)
            sent = model.requests(key)[-1].body.decode()
            assert f"assistant: {line}" in sent
            assert other not in sent
            assert "Reply" not in sent


# Each number says behind which reply a question comes, counted from the last one. The twelve turns of the trunk are
# too many for every strategy but one.
BEHIND = [*[0] * 12, 5, 0, 0, 3, 0, 14, 0, 0, 5, 0]
SMALL = '{"high": 1500, "low": 500, "instructions_at": 0}'


@pytest.mark.parametrize(
    ("by", "streams"), [("reply", False), ("reply", True), ("session", True), ("conversation", False)]
)
@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "slim"},
        {"name": "window"},
        {"name": "trim", "max_context_turns": 4},
        {"name": "compact", "reserve_tokens": 398_000, "keep_recent_tokens": 500},  # of a window of 400,000
        {"name": "tiered", "total_budget": 2_000, "working_budget": 1_000, "session_budget": 300},
        {"name": "full"},
    ],
    ids=lambda strategy: strategy["name"],
)
def test_branches_over_cuts_by_ids_as_resent(
    store: Database, forgetful: Model, strategy: dict[str, Any], by: Reference, *, streams: bool
) -> None:
    """The model sees its own branch alone, and the same whether the client names ids or resends the history."""
    model = forgetful
    key, tag = f"k{secrets.token_hex(4)}", TAGS.get(strategy["name"], "")
    shows_all = strategy["name"] == "full"
    with serve(store, model.url, strategy=json.dumps(strategy), epoch=SMALL) as service:
        named = Client([service], model, key=f"{key}n", tag=tag, by=by, streams=streams)
        resent = Client([service], model, key=f"{key}r", tag=tag, by="history", streams=streams)
        for number, at in enumerate(BEHIND, 1):
            for client in (named, resent):
                client.do(say(f"question {number}: {LONG}", at))
            assert named.shown[-1] == resent.shown[-1], number
            shown, branch = json.dumps(named.shown[-1]), json.dumps(named.replies[-1][1])
            assert f"question {number}:" in shown
            earlier = [words for each in range(1, number) for words in (f"question {each}:", f"Reply {each}.")]
            assert [words for words in earlier if words in shown and words not in branch] == []
            if shows_all:
                assert [words for words in earlier if words in branch and words not in shown] == []
        assert named.stored() == resent.stored()
    assert (f"question 1: {LONG}" in json.dumps(named.shown[11])) == shows_all
