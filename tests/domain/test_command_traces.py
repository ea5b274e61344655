"""The traces of commands in histories: what is one and what only looks like one."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tersely.dialects.clients.command_traces import MARK, command_in, mark_reply, without_traces
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.messages import Media, Message, Reasoning, Role, Text, ToolCall, ToolResult


def say(role: Role, *parts: str | Reasoning | ToolCall | ToolResult | Media) -> Message:
    read = tuple(Text(text=each) if isinstance(each, str) else each for each in parts)
    own, injected = set_injected_apart(role, read)
    return Message(role=role, parts=own, raw=b"", injected=injected)


def only(message: Message, text: str) -> Message:
    return replace(message, parts=(Text(text=text),))


ANSWER = say("assistant", mark_reply("t2 was taken back."))


@pytest.mark.parametrize("text", ["/undo", " /undo\n", "/context window 3", "/context nonsense"])
def test_commands_are_found_in_a_history(text: str) -> None:
    assert command_in(say("user", text)) == text.strip()
    assert without_traces([say("user", "hello"), say("user", text), ANSWER], only) == [say("user", "hello")]


@pytest.mark.parametrize(
    "message",
    [
        say("user", "/undone"),
        say("user", "/undo\nplease"),
        say("user", "please /undo"),
        say("user"),
        say("assistant", "/undo"),
        say("system", "/undo"),
        say("user", "/undo", Media(kind="image", digest="d")),
        say("user", ToolResult(call_id="c", text="r"), "/undo"),
    ],
)
def test_text_that_is_no_command(message: Message) -> None:
    assert command_in(message) == ""
    assert without_traces([message, ANSWER], only) == [message, ANSWER]


@pytest.mark.parametrize(
    "answer",
    [
        say("assistant", f"It says {MARK}"),
        say("assistant", MARK, ToolCall(id="c", name="f", arguments="{}")),
        say("user", mark_reply("done")),
        say("assistant", "done"),
    ],
)
def test_text_without_a_mark_is_no_command_answer(answer: Message) -> None:
    history = [say("user", "/undo"), answer]
    assert without_traces(history, only) == history


def test_answers_with_thoughts_and_blanks() -> None:
    answer = say("assistant", Reasoning(text="hm"), f"\n{MARK}\ndone")
    assert without_traces([say("user", "/undo"), answer], only) == []


def test_commands_in_a_row() -> None:
    hello, bye = say("user", "hello"), say("user", "bye")
    command = say("user", "/context")
    assert without_traces([hello, command, ANSWER, command, ANSWER, bye], only) == [hello, bye]
    assert without_traces([command, command, ANSWER, ANSWER, bye], only) == [command, ANSWER, bye]


def test_text_beside_a_command_stays() -> None:
    reminder = "<system-reminder>a b</system-reminder>"
    (kept,) = without_traces([say("user", reminder, "/undo"), ANSWER], only)
    assert kept.text == reminder
