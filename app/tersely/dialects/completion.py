"""A plain question to a model in a dialect: instructions and one user message, no tools, one reply at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from tersely.dialects.dialect import UNCHANGED, Dialect

Finish = Literal["stop", "length", "other", ""]
"""Said to its end; cut off at the limit; ended for another reason; the provider does not say."""

_FINISHES: dict[str, Finish] = {
    "": "",
    "stop": "stop",
    "completed": "stop",
    "end_turn": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "max_output_tokens": "length",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """``path`` follows the upstream's base URL."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReply:
    """The reply to a plain question. Tokens are None where the provider does not report them."""

    text: str
    finish: Finish
    has_calls: bool
    input_tokens: int | None = None
    output_tokens: int | None = None


class CompletionWriter(Protocol):
    """Writes a plain question."""

    def __call__(self, *, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
        """``max_tokens`` bounds the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """The form of plain questions in a dialect. ``authorize`` gives the headers for a key of the operator's."""

    write: CompletionWriter
    authorize: Callable[[str], list[tuple[str, str]]]


def read_completion(dialect: Dialect, body: bytes) -> PlainReply:
    """Return the first choice of a reply. Raises `ValueError` if it has none."""
    _, reply = dialect.split_reply(body, UNCHANGED)
    if not reply.choices:
        raise ValueError("not a reply")
    choice = reply.choices[0]
    message = dialect.read_reply(choice.model_message)
    if message.is_malformed:
        raise ValueError("not a reply")
    usage = dialect.read_usage(reply.usage)
    return PlainReply(
        text=message.text,
        finish=_FINISHES.get(choice.finish_reason.lower(), "other"),
        has_calls=bool(message.calls),
        input_tokens=usage.input,
        output_tokens=usage.output,
    )
