"""Clients that never send a reply back as it was: they go on in their session where their own words say so."""

from __future__ import annotations

from typing import Any

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import Answered, body_of, post
from tests.support.responses_talks import TOOL
from tests.support.rows import messages_by_number
from tests.support.services import Service
from tests.support.upstreams import Model

CHAT_TOOL = {"type": "function", "function": {"name": TOOL["name"], "parameters": TOOL["parameters"]}}
# mini-swe-agent
REFUSED = (
    "Tool call error:\n\n<error>\nNo tool calls found in the response. Every response MUST include at least one tool "
    "call.\n</error>\n\nHere is general guidance"
)
# LlamaIndex
INSTRUCTION = (
    "The following is a conversation between the user and assistant. Write a concise summary about the contents of "
    "this conversation."
)


async def ask(service: Service, model: Model, key: str, *messages: Any, reply: Any, tools: bool = True) -> Answered:
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    model.script(key, ScriptedReply(message=message))
    more = {"tools": [CHAT_TOOL]} if tools else {}
    answer = await post(service, body_of(*messages, user=key, **more))
    assert answer.status == 200, answer.body
    return answer


async def test_a_refused_reply_without_calls_keeps_its_session(service: Service, model: Model, key: str) -> None:
    task = f"Solve the issue of {key}"
    first = await ask(service, model, key, task, reply="I would list the files.")
    second = await ask(service, model, key, task, REFUSED, reply="I would really list them.")
    call = {"id": f"call_{key}", "type": "function", "function": {"name": TOOL["name"], "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    third = await ask(service, model, key, task, REFUSED, REFUSED, reply=called)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
    last = await ask(service, model, key, task, REFUSED, REFUSED, called, result, reply="Words again, after a call.")
    end = await ask(service, model, key, task, REFUSED, REFUSED, called, result, REFUSED, reply="Done.")
    assert {each.session for each in (first, second, third, last, end)} == {first.session}
    assert [each.headers["x-tersely-session-source"] for each in (first, second)] == ["new", "lineage"]
    live = [
        each.text for each in await messages_by_number(service, first.session) if each.status == "live" and each.turn
    ]
    assert live == [task, REFUSED, REFUSED, "", "2", REFUSED, "Done."]


async def test_ambiguous_task_is_not_matched_by_guessing(service: Service, model: Model, key: str) -> None:
    task = f"Solve the issue of {key}"
    both = [await ask(service, model, key, task, reply="I would list the files.") for _ in range(2)]
    again = await ask(service, model, key, task, REFUSED, reply="I would really list them.")
    assert len({each.session for each in (*both, again)}) == 3


async def test_other_text_does_not_continue_an_answered_task(service: Service, model: Model, key: str) -> None:
    task = f"Solve the issue of {key}"
    first = await ask(service, model, key, task, reply="I would list the files.")
    for words in ("Go on.", f"What does this mean? {REFUSED}"):
        other = await ask(service, model, key, task, words, reply="Certainly.")
        assert other.session != first.session


async def test_a_reply_to_a_request_without_tools_is_not_refused(service: Service, model: Model, key: str) -> None:
    task = f"Solve the issue of {key}"
    first = await ask(service, model, key, task, reply="I would list the files.", tools=False)
    second = await ask(service, model, key, task, REFUSED, reply="I would really list them.", tools=False)
    assert first.session != second.session


class SummaryMemory:
    """LlamaIndex with a summary memory that keeps nothing but the summary."""

    def __init__(self, service: Service, model: Model, key: str) -> None:
        self.service, self.model, self.key = service, model, key
        self.history: list[Any] = []

    async def turn(self, text: str, reply: str) -> Answered:
        messages = [*self.history, {"role": "user", "content": text}]
        answer = await ask(self.service, self.model, self.key, *messages, reply=reply, tools=False)
        self.history = [*messages, {"role": "assistant", "content": reply}]
        return answer

    async def summarize(self, summary: str) -> None:
        transcript = "".join(f"{each['role']}: {each['content']}\n\n" for each in self.history)
        question = {"role": "user", "content": f'"Transcript so far: {transcript}"\n\n'}
        side = await ask(
            self.service,
            self.model,
            self.key,
            {"role": "system", "content": INSTRUCTION},
            question,
            reply=summary,
            tools=False,
        )
        assert "x-tersely-session" not in side.headers
        self.history = [{"role": "system", "content": summary}]


async def test_history_of_a_summary_alone_continues(service: Service, model: Model, key: str) -> None:
    memory = SummaryMemory(service, model, key)
    answers = []
    for number in range(3):
        answers += [
            await memory.turn(f"Question {number} of {key}", f"The first answer {number} for {key}."),
            await memory.turn("And more:\n\nof this?", f"The second answer {number}.\n\nIt has two parts, {key}."),
        ]
        await memory.summarize(f"The user asked question {number} of {key} and was answered.")
    assert len({each.session for each in answers}) == 1


async def test_a_transcript_of_short_replies_continues_by_its_questions(
    service: Service, model: Model, key: str
) -> None:
    memory = SummaryMemory(service, model, key)
    answers = []
    for number in range(3):
        answers += [await memory.turn(f"Question {number} of {key}", "Red."), await memory.turn("Sure?", "Yes.")]
        await memory.summarize(f"The user asked question {number} of {key} and was answered.")
    assert len({each.session for each in answers}) == 1


@pytest.mark.parametrize("answer", ["A longer answer, which is the same in both.", "Red."])
async def test_a_transcript_of_two_conversations_alike_is_of_neither(
    service: Service, model: Model, key: str, answer: str
) -> None:
    both = [SummaryMemory(service, model, key) for _ in range(2)]
    first = [await memory.turn(f"Question of {key}", answer) for memory in both]
    for memory in both:
        await memory.summarize(f"A summary of the conversation with {key}.")
    second = [await memory.turn("More", f"Something more for {key}.") for memory in both]
    assert len({each.session for each in (*first, *second)}) == 4


async def test_a_streamed_smolagents_conversation_is_one_session(service: Service, model: Model, key: str) -> None:
    """Streamed, its reply has an empty text in front of the calls, which it sends again as text."""
    task = {"role": "user", "content": [{"type": "text", "text": f"New task:\nSolve the issue of {key}"}]}
    history: list[Any] = [task]
    sessions = []
    for number in range(3):
        name = f"call_{number}_{key}"
        function = {"name": TOOL["name"], "arguments": '{"a": 1.0}'}
        called = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": name, "type": "function", "function": function}],
        }
        model.script(key, ScriptedReply(message=called))
        answer = await post(service, body_of(*history, user=key, tools=[CHAT_TOOL], stream=True))
        assert answer.status == 200, answer.body
        sessions.append((answer.session, answer.source))
        written = [{"id": name, "type": "function", "function": {"name": TOOL["name"], "arguments": {"a": 1.0}}}]
        echo = {"type": "text", "text": f"\nCalling tools:\n{written}"}
        seen = {"type": "text", "text": f"Observation:\n{number}"}
        history += [{"role": "assistant", "content": [echo]}, {"role": "user", "content": [seen]}]
    assert len({session for session, _ in sessions}) == 1
    assert [source for _, source in sessions] == ["new", "lineage", "lineage"]
