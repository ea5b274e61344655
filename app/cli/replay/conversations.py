"""What a replay plays: conversations as series of calls, each with its request and the reply that was recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.domain.errors import TerselyError
from app.domain.messages import Dialect as DialectName


class BadTranscript(TerselyError):
    """A file that is no transcript."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a client asks. ``has_option``: of a stream, the usage (chat completions) or a JSON array (Gemini)."""

    model: str
    is_streamed: bool = False
    has_option: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A call to be made: ``target`` is path and query. ``asks_usage``: None where the format leaves no choice."""

    dialect: DialectName
    target: str
    body: bytes
    headers: Mapping[str, str]
    is_streamed: bool = False
    asks_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call. ``place`` is the number of the reply among a transcript's messages, or of the recorded request.

    ``reply`` is what the model said, in the wire form of ``dialect``; None: nobody knows. ``follows`` is the place of
    the step whose reply the request names as what it goes on from.
    """

    place: int
    dialect: DialectName
    reply: Mapping[str, Any] | None
    request: Callable[[Asking], Request]
    follows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A series of calls; ``number`` is its line in the file, from 1.

    ``is_recording``: the requests are a client's own, so that they may belong to several sessions, or to none.
    """

    id: str
    number: int
    steps: Sequence[Step]
    is_recording: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The conversations of one file."""

    name: str
    conversations: Sequence[Conversation]
