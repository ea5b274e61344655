"""The traces that chat commands leave in a client's history: what its user typed, and what was answered.

The client shows both and sends them again with every later request. No model sees them and nothing of them is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.domain.chain import without_injected
from app.domain.chat_commands import is_command
from app.domain.messages import Message, Reasoning, Text

MARK = "[Tersely]"
"""How every answer to a command begins; people see it too."""


def mark_answer(text: str) -> str:
    """An answer with the mark by which it is known again."""
    return f"{MARK}\n{text}"


def command_in(message: Message) -> str:
    """The command that is all that a user says in ``message``, beside what the client put into it; else nothing."""
    if message.role != "user" or not all(isinstance(part, Text) for part in message.parts):
        return ""
    said = without_injected(message.text).strip()
    return said if is_command(said) else ""


def is_answer(message: Message) -> bool:
    """Whether this is an answer of ours to a command."""
    return (
        message.role == "assistant"
        and all(isinstance(part, Text | Reasoning) for part in message.parts)
        and message.text.lstrip().startswith(MARK)
    )


def without_traces(messages: Sequence[Message], rest: Callable[[Message, str], Message]) -> list[Message]:
    """``messages`` without commands that are directly followed by their answer, and without these answers.

    What a client put beside a command stays: ``rest`` makes the message that has nothing but a given text.
    """
    kept: list[Message] = []
    command = ""
    for message in messages:
        if command and is_answer(message):
            asked = kept.pop()
            before, _, after = asked.text.rpartition(command)
            if beside := (before + after).strip():
                kept.append(rest(asked, beside))
            command = ""
        else:
            kept.append(message)
            command = command_in(message)
    return kept
