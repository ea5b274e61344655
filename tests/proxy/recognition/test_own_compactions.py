"""A client that compacts its history by itself, as Codex does, and goes on: nothing is stored twice."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import Answered, post
from tests.support.rows import StoredMessage, messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model

ASKED_FOR = "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary for another LLM."
GOES_ON = (
    "Another language model started to solve this problem and produced a summary of its thinking process. "
    "Here is the summary produced by the other language model, "
    "use the information in this summary to assist with your own analysis:"
)
RULES = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Answer in English."}]}


def question_item(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


class Codex:
    """Codex 0.169.0: it sends its whole history, and behind a compaction all questions without their replies."""

    def __init__(self, service: Service, model: Model, key: str, *, streams: bool) -> None:
        self.service, self.model, self.key, self.streams = service, model, key, streams
        self.history: list[Any] = []
        self.questions: list[str] = []

    async def _send(self, history: list[Any], *output: dict[str, Any], kind: str) -> Answered:
        self.model.script(self.key, ScriptedReply(message={"output": list(output)}))
        body = {"model": "gpt-5-codex", "stream": self.streams, "store": False, "user": self.key}
        answer = await post(
            self.service,
            json.dumps({**body, "input": [RULES, *history]}).encode(),
            path="/v1/responses",
            session_id=self.key,
            x_codex_turn_metadata=json.dumps({"session_id": self.key, "request_kind": kind}),
        )
        assert answer.status == 200, answer.body
        return answer

    def _message(self, text: str) -> dict[str, Any]:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        ident = f"msg_{self.key}_{len(self.model.requests(self.key))}"
        return {"type": "message", "id": ident, "role": "assistant", "status": "completed", "content": content}

    async def ask(self, text: str, *, uses_tool: bool = False) -> Answered:
        self.questions.append(text)
        self.history = [*self.history, question_item(text)]
        if uses_tool:
            call_id = f"call_{self.key}_{len(self.history)}"
            call = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": "ls", "arguments": "{}"}
            await self._send(self.history, call, kind="turn")
            result = {"type": "function_call_output", "call_id": call_id, "output": "README.md"}
            self.history = [*self.history, call, result]
        reply = self._message(f"Reply {len(self.model.requests(self.key))} of {self.key}")
        answer = await self._send(self.history, reply, kind="turn")
        self.history = [*self.history, reply]
        return answer

    async def compact(self) -> None:
        summary = f"Summary {len(self.questions)} of {self.key}"
        side = await self._send([*self.history, question_item(ASKED_FOR)], self._message(summary), kind="compaction")
        assert not side.session
        self.history = [*map(question_item, self.questions), question_item(f"{GOES_ON}\n{summary}")]


def texts(stored: list[StoredMessage]) -> list[str]:
    return [part["text"] for each in stored if each.role == "user" for part in each.message["content"]]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_codex_session_keeps_its_turns_behind_its_own_compactions(
    service: Service, model: Model, key: str, streams: bool
) -> None:
    codex = Codex(service, model, key, streams=streams)
    first = await codex.ask(f"What is {key}?")
    for number in range(2, 7):
        await codex.ask("Go on." if number in (3, 6) else f"Question {number} of {key}", uses_tool=number == 2)
    before = [each for each in await messages_by_number(service, first.session) if each.role == "user" and each.turn]
    assert [each.turn for each in before] == [1, 2, 3, 4, 5, 6]

    for number in range(2):
        await codex.compact()
        assert (await codex.ask("Go on.")).session == first.session
        assert (await codex.ask(f"Another question, {number}")).session == first.session

    stored = [each for each in await messages_by_number(service, first.session) if each.turn]
    summaries = [text for text in texts(stored) if text.startswith(GOES_ON)]
    assert [text for text in texts(stored) if text not in summaries] == codex.questions, "each question once"
    assert len(summaries) == 2, "each summary once"
    assert [(each.seq, each.turn, each.status) for each in stored if each.seq in {row.seq for row in before}] == [
        (row.seq, row.turn, "live") for row in before
    ]
    live = [each for each in stored if each.status == "live"]
    assert texts(live) == [*codex.questions[:8], summaries[1], *codex.questions[8:]]
    assert max(each.turn for each in stored) == len(codex.questions) + len(summaries)
