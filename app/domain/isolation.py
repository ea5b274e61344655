"""What crosses from one dialect to another within a session: words. Tool traffic stays with the dialect it was said in.

A provider understands calls and results in its own form alone, and a chain of them that was translated misleads its
model. Calls and their results stay behind together, since both are the dialect's.
"""

from __future__ import annotations

from app.domain.messages import Media, Message, Text

_FAMILIES = {"gemini_gca": "gemini"}


def share_messages(one: str, other: str) -> bool:
    """Whether the messages of two dialects have one form: Code Assist wraps Gemini's."""
    return _FAMILIES.get(one, one) == _FAMILIES.get(other, other)


def words_of(message: Message) -> Message | None:
    """The message as every dialect may have it, to be written anew; None where it says nothing but tool traffic."""
    parts = tuple(part for part in message.parts if isinstance(part, Text | Media))
    has_words = any(isinstance(part, Media) or part.text.strip() for part in parts)
    if message.role == "tool" or not has_words:
        return None
    return Message(role=message.role, parts=parts, raw=b"")
