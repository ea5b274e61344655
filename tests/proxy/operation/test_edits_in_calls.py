"""Edits of a session while the reply of its call streams: live sessions change nothing about what they find."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Server
from tests.support.dialect_wires import WIRES, Spoken
from tests.support.live_sides import Clock, Side, sides, stored

TURN, SEQ = 3, 5
"""The turn of the call that streams, and its question."""

EVENTS = 6
"""So many events of a reply come before the edit: before the first words some dialects' streams are not relayed."""

# Method, path under the session, body.
EDITS: dict[str, tuple[str, str, Any]] = {
    "undo": ("POST", "/undo", None),
    "undo as a command": ("POST", "/commands", {"text": "/undo"}),
    "drop the turn": ("POST", f"/turns/t{TURN}/drop", None),
    "drop a turn before": ("POST", f"/turns/t{TURN - 1}/drop", None),
    "remove the turn": ("DELETE", f"/turns/t{TURN}", None),
    "remove a turn before": ("DELETE", f"/turns/t{TURN - 1}", None),
    "clear": ("POST", "/clear", {}),
    "compact": ("POST", "/compact", {}),
    "pin": ("POST", f"/messages/{SEQ}/pin", None),
    "priority": ("PUT", f"/messages/{SEQ}/priority", {"priority": 80}),
    "hide": ("PATCH", f"/messages/{SEQ}", {"model_visible": False}),
    "append": ("POST", "/messages", {"dialect": "openai_chat", "messages": [{"role": "user", "content": "by REST"}]}),
    "state": ("PUT", "/state", {"text": "Goal: the harbour"}),
    "scratchpad": ("PUT", "/scratchpad", {"text": "a note"}),
    "strategy": ("PATCH", "", {"strategy": "trim"}),
    "delete": ("DELETE", "", None),
}
# How calls bring their history: whole in each dialect, by the id of the last reply, or by the name of the session.
FORMS = (*WIRES, "by reply", "by name")


@dataclass
class Chat:
    """A conversation with one side."""

    side: Side
    name: str
    form: str
    history: list[Spoken] = field(default_factory=list)
    session: str = ""
    reply_id: str = ""

    def ask(self, number: int, gate: threading.Event, edit: Sequence[Any] | None = None) -> tuple[int, ...]:
        """Ask a question; the reply ends after ``edit``. Return the statuses of both."""
        question = f"question {number} of {self.name}, about the harbour"
        reply = f"reply {number} of {self.name}: " + "the ships lie at the quay. " * 3
        self.side.model.script(self.name, ScriptedReply(message={"content": reply}, delay=1))
        self.history.append(("user", question))
        wire = WIRES.get(self.form) or WIRES["openai_responses" if self.form == "by reply" else "openai_chat"]
        more = {"previous_response_id": self.reply_id} if self.reply_id else {}
        is_whole = self.form in WIRES
        headers = {"content-type": "application/json", "x-script": self.name}
        headers |= {"x-tersely-session": self.name} if self.form == "by name" else {}
        body = wire.body(self.history if is_whole else question, stream=True, **more)
        statuses: list[int] = []
        if edit is not None:
            gate.clear()
        try:
            url = f"{self.side.services[0].url}{wire.stream_path or wire.path}"
            with self.side.http.stream("POST", url, content=body, headers=headers) as answer:
                self.session = answer.headers.get("x-tersely-session", self.session)
                if edit is not None:
                    method, path, given = edit
                    done = self.side.request(method, f"/api/sessions/{self.session}{path}", json=given)
                    statuses.append(done.status_code)
                gate.set()
                answer.read()
        finally:
            gate.set()
        if self.form == "by reply":
            self.reply_id = re.findall(r'"id": ?"(resp_\w+)"', answer.text)[0]
        self.history.append(("assistant", reply))
        return answer.status_code, *statuses


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the model's replies, after their first events, while this is not set."""
    opened = threading.Event()
    opened.set()
    sent = 0

    async def wait(seconds: float) -> None:
        nonlocal sent
        sent = 0 if opened.is_set() else sent + bool(seconds)
        if sent >= EVENTS:
            await asyncio.to_thread(opened.wait, 30)

    monkeypatch.setattr("tersely.fakellm.scripted.server._sleep", wait)
    return opened


@pytest.mark.parametrize("form", FORMS)
def test_edits_in_live_calls_do_the_same_as_on_the_full_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, form: str
) -> None:
    monkeypatch.setattr("tersely.composition.application.clock", Clock())
    with sides(server, strategy="slim") as both:
        for name, edit in EDITS.items():
            chats = [Chat(side, name, form) for side in both]
            found = []
            for chat in chats:
                statuses = [chat.ask(number, gate, edit if number == TURN else None) for number in range(1, TURN + 2)]
                found.append((statuses, [json.loads(each.body) for each in list(chat.side.model.state.received)[-2:]]))
            assert found[0] == found[1], (name, found)
            assert found[0][0][TURN - 1][1] < 300, (name, found)
            if name == "undo":
                sent = json.dumps(found[0][1][-1])
                assert f"question {TURN - 1} of" in sent
                assert f"question {TURN} of" not in sent
        live, plain = (asyncio.run(stored(side.services[0].database)) for side in both)
        assert live == plain, [pair for pair in zip(live, plain, strict=False) if pair[0] != pair[1]][:3]
        # Each conversation continues a live session when it is edited.
        assert both[0].hits()["hit"] >= len(EDITS)
