"""A conversation by the ids of its replies is the same as one that is sent whole each time: stored, and shown."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Database
from tests.proxy.harness import Model, Service, look, post, serve
from tests.proxy.talks import MODEL, TOOL

Items = list[dict[str, Any]]
_numbers = itertools.count(1)

# Not among them: `trim`, whose summaries are written in the background, so that it is a matter of time what of them a
# context shows.
RECIPES: dict[str, dict[str, Any]] = {
    "slim": {},
    "full": {"strategy": "full", "instructions": "off"},
    "slim, cut at once": {"strategy": '{"name": "slim", "recent_turns": 1}', "epoch": "every_request"},
    "slim, cut by watermarks": {"epoch": '{"high": 1500, "low": 500}'},
    "window": {"strategy": '{"name": "window", "context_size": 2}', "epoch": "every_request"},
    "compact": {"strategy": "compact", "epoch": '{"high": 1500, "low": 500}'},
    "tiered": {"strategy": "tiered", "epoch": "every_request"},
}


@dataclass(frozen=True, slots=True)
class Step:
    """What a client does next. ``at`` says behind which of the replies so far, from the last one on."""

    kind: Literal["say", "tool", "again", "developer"]
    at: int = 0
    words: str = "more"
    instructions: str | None = None


STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from(["say", "say", "tool", "again", "developer"]),
        at=st.sampled_from([0, 0, 0, 0, 1, 2]),
        words=st.sampled_from(["more", "a longer question " * 40, "something else"]),
        instructions=st.sampled_from([None, "Be kind.", "Be brief."]),
    ),
    min_size=2,
    max_size=9,
)


@dataclass(slots=True)
class Client:
    """One that names replies, or one that sends all that led to them."""

    service: Service
    model: Model
    key: str
    names: bool
    replies: list[tuple[str, Items]] = field(default_factory=list)
    shown: list[Any] = field(default_factory=list)
    session: str = ""
    has_branched: bool = False
    last: tuple[int, Items, str | None] | None = None
    calls: dict[str, str] = field(default_factory=dict)

    def do(self, step: Step) -> None:
        if step.kind == "again" and self.last is not None and self.last[0]:
            self.ask(*self.last)
            return
        answered = [number for number, (_, said) in enumerate(self.replies, 1) if said[-1]["type"] == "message"]
        at = answered[-1 - min(step.at, len(answered) - 1)] if answered else 0
        text = 'call add {"a": 1}' if step.kind == "tool" else step.words
        said: Items = [{"type": "message", "role": "user", "content": f"{text}" if at else f"{self.key} {text}"}]
        if step.kind == "developer":
            said.insert(0, {"type": "message", "role": "developer", "content": f"Note: {step.words[:20]}"})
        output = self.ask(at, said, step.instructions)
        while called := [item for item in output if item["type"] == "function_call"]:
            results = [
                {"type": "function_call_output", "call_id": item["call_id"], "output": "done"} for item in called
            ]
            output = self.ask(len(self.replies), results, step.instructions)

    def ask(self, at: int, said: Items, instructions: str | None) -> Items:
        # Which notes between messages go with a branch is told by their neighbours in both ways, but not by the same.
        self.has_branched = self.has_branched or at < len(self.replies)
        self.last = (at, said, instructions)
        name, before = self.replies[at - 1] if at else ("", [])
        asked: dict[str, Any] = {"model": MODEL, "user": self.key, "tools": [TOOL]}
        if instructions is not None:
            asked["instructions"] = instructions
        if self.names and name:
            asked |= {"previous_response_id": name, "input": said}
        else:
            asked["input"] = [*before, *said]
        answer = asyncio.run(post(self.service, json.dumps(asked).encode(), path="/v1/responses"))
        assert answer.status == 200, answer.body
        assert answer.json["previous_response_id"] == asked.get("previous_response_id")
        self.session = self.session or answer.session
        assert answer.session == self.session
        self.shown.append(self._shown())
        output: Items = answer.json["output"]
        self.replies.append((answer.json["id"], [*before, *said, *output]))
        return output

    def _shown(self) -> Any:
        sent = json.loads(self.model.requests(self.key)[-1].body)
        named = sent.get("previous_response_id")
        before = self.model.state.kept.replies[named].items if named else []
        items = [_plain(item) for item in [*before, *sent["input"]]]
        notes = sorted((item for item in items if item.get("role") == "developer"), key=repr)
        notes = [] if self.has_branched else notes
        rest = [item for item in items if item.get("role") != "developer"]
        return json.loads(self._named(json.dumps([sent.get("instructions"), notes, rest])))

    def _named(self, text: str) -> str:
        """With names that are the same for both clients: keys, and calls in the order in which they were made."""
        named = text.replace(self.key, "KEY")
        return re.sub(r"call_[0-9a-f]{24}", lambda call: self.calls.setdefault(call[0], f"c{len(self.calls)}"), named)

    def stored(self) -> tuple[list[Any], list[Any]]:
        """The history proper in its order, and the instructions that hold now."""
        sql = "SELECT turn, role, status, raw FROM messages WHERE session_id = $1 ORDER BY place, seq"
        rows = asyncio.run(look(self.service, sql, self.session))
        told = [(row["turn"], row["role"], row["status"], _said(self._named(row["raw"].decode()))) for row in rows]
        instructions = [each for each in told if not each[0] and each[2] == "live" and not self.has_branched]
        return [each for each in told if each[0]], sorted(instructions, key=repr)


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    """Without what a host makes up anew each time."""
    return {name: value for name, value in item.items() if name not in {"id", "status"}}


def _said(raw: str) -> Any:
    message = json.loads(raw)
    items = message["output"] if "output" in message and "type" not in message else [message]
    return [_plain(item) for item in items]


@pytest.fixture(scope="module", params=RECIPES)
def talked_with(request: pytest.FixtureRequest, store: Database, model: Model) -> Iterator[tuple[Service, Model, bool]]:
    """A service before a model, and whether conversations with it branch: an edit begins an epoch of what was loaded,
    which is less by ids than of a history that was sent whole.
    """
    with serve(store, model.url, **RECIPES[request.param]) as running:
        yield running, model, request.param in {"slim", "full"}


@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS)
def test_by_ids_as_resent(talked_with: tuple[Service, Model, bool], steps: list[Step]) -> None:
    service, model, branches = talked_with
    if not branches:
        steps = [replace(step, at=0, kind="say" if step.kind == "again" else step.kind) for step in steps]
    key = f"k{secrets.token_hex(4)}{next(_numbers):04}"
    named = Client(service, model, key=f"{key}n", names=True)
    resent = Client(service, model, key=f"{key}r", names=False)
    for step in steps:
        named.do(step)
        resent.do(step)
        assert named.shown[-1] == resent.shown[-1]
    assert named.stored() == resent.stored()
