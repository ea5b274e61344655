"""A plain question to a model in a dialect: instructions and one user message, no tools, one reply at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRequest:
    """``path`` follows the upstream's base URL."""

    path: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReply:
    """What was said. ``finish`` as the provider names it; tokens as it reports them, None where it does not say."""

    text: str
    finish: str
    has_calls: bool
    input_tokens: int | None = None
    output_tokens: int | None = None


class QuestionWriter(Protocol):
    """Writes a plain question."""

    def __call__(self, *, model: str, instructions: str, message: str, max_tokens: int) -> PlainRequest:
        """``max_tokens`` bounds the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How plain questions are asked in a dialect. ``read`` raises `ValueError` for what is no reply.

    ``authorize`` gives the headers for a key of the operator's.
    """

    write: QuestionWriter
    read: Callable[[bytes], PlainReply]
    authorize: Callable[[str], list[tuple[str, str]]]
