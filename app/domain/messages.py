"""Messages and their parts: the canonical form that every dialect is read into.

A message keeps ``raw``, the wire form exactly as received; the parts are what the core reasons about.
Values are equal when their content is equal; where a message stands in a session is `app.domain.history`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, assert_never

Dialect = Literal["openai_chat", "openai_responses", "anthropic", "gemini", "gemini_gca"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
MediaKind = Literal["image", "audio", "file", "video", "other"]

INSTRUCTION_ROLES: frozenset[Role] = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Words said by whoever the message's role names. ``is_refusal``: a model's, in place of an answer."""

    text: str
    is_refusal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """A provider's thinking. Never part of a session's identity, never shortened.

    ``hidden``: characters of what it says encrypted, of which ``text`` may be a summary.
    """

    text: str
    hidden: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A request by the model. ``arguments`` is the JSON text as said, which may be malformed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The answer to the call ``call_id``. Media in a result are counted in ``text`` as placeholders."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """An image, sound or file, or what only the provider understands. ``digest`` identifies its bytes or address;
    ``detail`` is the provider's hint. ``size``: bytes of what a model reads of it as text; 0: not known.
    """

    kind: MediaKind
    digest: str
    detail: str = ""
    width: int = 0
    height: int = 0
    size: int = 0


Part = Text | Reasoning | ToolCall | ToolResult | Media


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: role, ordered parts, and the wire form it came from (UTF-8 JSON, one object)."""

    role: Role
    parts: tuple[Part, ...]
    raw: bytes

    @property
    def text(self) -> str:
        """The words of the message, text parts joined by newlines; reasoning and tool traffic left out."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def answer(self) -> str:
        """The words but for a refusal, which some dialects keep elsewhere than words."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Text) and not part.is_refusal)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that this message makes."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def results(self) -> tuple[ToolResult, ...]:
        """The tool results that this message carries."""
        return tuple(part for part in self.parts if isinstance(part, ToolResult))

    @property
    def is_instruction(self) -> bool:
        """System and developer text: an attribute of a request, never a link of its history."""
        return self.role in INSTRUCTION_ROLES

    @property
    def starts_turn(self) -> bool:
        """A user message starts a turn unless all that it carries is tool results."""
        return self.role == "user" and not (self.parts and all(isinstance(part, ToolResult) for part in self.parts))


def with_all_calls(shown: Message, said: Message) -> Message:
    """A reply as the client was ``shown`` it, with all calls that the model ``said``, those to our own tools too."""
    if shown.calls == said.calls:
        return shown
    words = (part for part in shown.parts if not isinstance(part, ToolCall))
    return replace(shown, parts=(*words, *said.calls))


def searchable_text(message: Message) -> str:
    """Everything in a message that a search looks at: text, tool names, inputs and results."""
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
