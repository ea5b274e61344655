"""Messages and their parts: the canonical form that every dialect is read into.

A message keeps ``raw``, the wire form exactly as received. The core works on the parts. Values are equal when their
content is equal; the position of a message in a session is in `tersely.domain.history.history`.
"""

from __future__ import annotations

from typing import Literal, assert_never

import msgspec
from msgspec.structs import replace

Dialect = Literal["openai_chat", "openai_responses", "anthropic", "gemini", "gemini_gca"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "file", "video", "other"]

# The members under which the dialects wrap instructions that are outside of the messages.
_INSTRUCTIONS = (b'{"system"', b'{"systemInstruction"', b'{"system_instruction"', b'{"instructions"')

INSTRUCTION_ROLES: frozenset[Role] = frozenset({"system", "developer"})


class Text(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Text by the message's role. ``is_refusal``: a model's refusal instead of an answer. ``result_of``: the id of the
    call whose result this text is, shown as text because the call is not there.
    """

    text: str
    is_refusal: bool = False
    result_of: str = ""


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A provider's thinking. It is never part of a session's identity and never shortened.

    ``hidden``: characters of encrypted thinking, of which ``text`` may be a summary.
    """

    text: str
    hidden: int = 0


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tool call by the model. ``arguments`` is the JSON text of the model, which may be malformed."""

    id: str
    name: str
    arguments: str


class ToolResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The answer to the call ``call_id``. Media in a result are counted in ``text`` as placeholders."""

    call_id: str
    text: str


class Media(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An image, sound, file or other content that only the provider understands.

    ``digest`` identifies its bytes or address; ``detail`` is the provider's hint. ``size``: bytes that a model reads as
    text; 0: unknown.
    """

    kind: MediaKind
    digest: str
    detail: str = ""
    width: int = 0
    height: int = 0
    size: int = 0


Part = Text | Reasoning | ToolCall | ToolResult | Media


class Injected(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A block that a client injected into a message: project instructions, environment, skills, a reminder.

    Blocks with the same ``key`` are versions of one block. ``text`` is the block word for word, with its marks.
    """

    key: str
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message: role, ordered parts, and its wire form (UTF-8 JSON, one object).

    ``is_malformed``: a reply of a form that no provider documents; ``parts`` are what could be parsed. ``injected`` are
    the blocks that the client put into the message. They count as instructions and are not in ``parts``, so that no
    summary, log line or search index contains them.
    """

    role: Role
    parts: tuple[Part, ...]
    raw: bytes
    is_malformed: bool = False
    injected: tuple[Injected, ...] = ()

    @property
    def text(self) -> str:
        """Return the words of the message, text parts joined by newlines; reasoning and tool traffic left out."""
        return "\n".join([part.text for part in self.parts if type(part) is Text])

    @property
    def text_without_refusal(self) -> str:
        """Return the text without refusals, which some dialects keep in another field."""
        return "\n".join([part.text for part in self.parts if type(part) is Text and not part.is_refusal])

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the tool calls that this message makes."""
        return tuple([part for part in self.parts if type(part) is ToolCall])

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """Return the tool results that this message carries."""
        return tuple([part for part in self.parts if type(part) is ToolResult])

    @property
    def is_instruction(self) -> bool:
        """Return whether the message is system or developer text, which is never a link of the history."""
        return self.role in INSTRUCTION_ROLES

    @property
    def starts_turn(self) -> bool:
        """Return whether the message starts a turn: it is a user message with more than tool results."""
        if self.role != "user":
            return False
        # The first part decides nearly always.
        parts = self.parts
        return not parts or type(parts[0]) is not ToolResult or not all(isinstance(part, ToolResult) for part in parts)


def is_outside_messages(raw: bytes) -> bool:
    """Return whether a raw instruction stands outside the request's messages (``system``)."""
    return raw.startswith(_INSTRUCTIONS)


def with_injected_text(message: Message) -> Message:
    """Return ``message`` with its injected blocks as text parts in front, for writers that look at ``parts`` alone."""
    if not message.injected:
        return message
    return replace(message, parts=(*(Text(text=block.text) for block in message.injected), *message.parts), injected=())


def with_all_calls(message: Message, reply: Message) -> Message:
    """Return a client's view of a reply with all calls of the model's view, those to Tersely's tools included."""
    if message.calls == reply.calls:
        return message
    words = (part for part in message.parts if not isinstance(part, ToolCall))
    return replace(message, parts=(*words, *reply.calls))


def searchable_text(message: Message) -> str:
    """Return the text that a search covers: text, tool names, inputs and results."""
    lines: list[str] = []
    for part in message.parts:
        match part:
            case Text(text=text) | ToolResult(text=text):
                lines.append(text)
            case ToolCall(name=name, arguments=arguments):
                lines.append(f"{name} {arguments}")
            case Reasoning() | Media():
                pass
            case _:
                assert_never(part)
    return "\n".join(lines)
