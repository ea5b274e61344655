"""The traces of chat commands in a client's history: the user's command and Tersely's answer.

The client shows both and resends them with every later request. They are neither stored nor sent to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tersely.domain.chat_commands import is_command
from tersely.domain.messages import Message, Reasoning, Text, with_injected_text

MARK = "[Tersely]"
"""How every answer to a command begins; people see it too."""


def mark_reply(text: str) -> str:
    """Return an answer with the mark by which it is recognised."""
    return f"{MARK}\n{text}"


def command_in(message: Message) -> str:
    """Return the command if a user's ``message`` consists of it, apart from injected blocks; else an empty string."""
    if message.role != "user" or not all(isinstance(part, Text) for part in message.parts):
        return ""
    text = message.text.strip()
    return text if is_command(text) else ""


def is_marked_reply(message: Message) -> bool:
    """Return whether this is an answer of ours to a command."""
    return (
        message.role == "assistant"
        and all(isinstance(part, Text | Reasoning) for part in message.parts)
        and message.text.lstrip().startswith(MARK)
    )


def without_traces(messages: Sequence[Message], rest: Callable[[Message, str], Message]) -> list[Message]:
    """Return ``messages`` without commands that are directly followed by their answer, and without these answers.

    Injected blocks beside a command stay: ``rest`` makes the message that contains only a given text.
    """
    kept: list[Message] = []
    command = ""
    for message in messages:
        if command and is_marked_reply(message):
            question = kept.pop()
            before, _, after = with_injected_text(question).text.rpartition(command)
            if rest_text := (before + after).strip():
                kept.append(rest(question, rest_text))
            command = ""
        else:
            kept.append(message)
            command = command_in(message)
    return kept
