"""Write messages as readable text: complete, with every part named."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.domain.history.context import Report
from tersely.domain.messages import Media, Message, Part, Reasoning, Text, ToolCall, ToolResult, with_injected_text


def format_message(message: Message) -> str:
    """Return a message under its role: ``--- user ---``, then its parts, one below the other."""
    parts = with_injected_text(message).parts
    return "\n".join([f"--- {message.role} ---", *(_read_part(part) for part in parts)])


def read_context(messages: Sequence[Message], report: Report, strategy: str) -> str:
    """Return a whole context as text, in the order of the request, after the numbers of its report."""
    layers = ", ".join(f"{layer.name} {layer.tokens:,}" for layer in report.layers)
    title = (
        f"strategy {strategy}, epoch {report.epoch} ({report.reason}), cut before message {report.cut}\n"
        f"{report.tokens_after:,} tokens of {report.tokens_before:,}: {layers or 'nothing'}"
    )
    return "\n\n".join([title, *(format_message(message) for message in messages)]) + "\n"


def _read_part(part: Part) -> str:
    match part:
        case Text(text=text):
            return text
        case Reasoning():
            return "[reasoning]"
        case ToolCall():
            return f"[call {part.id}] {part.name} {part.arguments}"
        case ToolResult():
            return f"[result of {part.call_id}] {part.text}"
        case Media():
            return f"[{part.kind}]"
