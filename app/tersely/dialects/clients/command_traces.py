"""The traces that chat commands leave in a client's history: what its user typed, and what was answered.

The client shows both and sends them again with every later request. No model sees them and nothing of them is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tersely.domain.chat_commands import is_command
from tersely.domain.messages import Message, Reasoning, Text, with_injected_text

MARK = "[Tersely]"
"""How every answer to a command begins; people see it too."""


def mark_reply(text: str) -> str:
    """Return an answer with the mark by which it is known again."""
    return f"{MARK}\n{text}"


def command_in(message: Message) -> str:
    """Return the command that is all that a user says in ``message``.

    Beside what the client put into it; else nothing.
    """
    if message.role != "user" or not all(isinstance(part, Text) for part in message.parts):
        return ""
    said = message.text.strip()
    return said if is_command(said) else ""


def is_marked_reply(message: Message) -> bool:
    """Return whether this is an answer of ours to a command."""
    return (
        message.role == "assistant"
        and all(isinstance(part, Text | Reasoning) for part in message.parts)
        and message.text.lstrip().startswith(MARK)
    )


def without_traces(messages: Sequence[Message], rest: Callable[[Message, str], Message]) -> list[Message]:
    """Return ``messages`` without commands that are directly followed by their answer, and without these answers.

    What a client put beside a command stays: ``rest`` makes the message that has nothing but a given text.
    """
    kept: list[Message] = []
    command = ""
    for message in messages:
        if command and is_marked_reply(message):
            asked = kept.pop()
            before, _, after = with_injected_text(asked).text.rpartition(command)
            if beside := (before + after).strip():
                kept.append(rest(asked, beside))
            command = ""
        else:
            kept.append(message)
            command = command_in(message)
    return kept
