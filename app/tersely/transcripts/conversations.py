"""The conversations of a replay: series of calls, each with its request and recorded reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tersely.domain.errors import TerselyError
from tersely.domain.messages import Dialect as DialectName

TIME = "x_ts"
"""The annotation of a message with the time when it ended, in ISO 8601 with a time zone."""


class BadTranscript(TerselyError):
    """A file that is not a transcript."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyForm:
    """The form of the reply that a client wants. ``has_option``: with usage (chat completions), or as a JSON array
    (Gemini).
    """

    model: str
    is_streamed: bool = False
    has_option: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """A call to be made: ``target`` is path and query. ``asks_usage``: None if the format has no such option."""

    dialect: DialectName
    target: str
    body: bytes
    headers: Mapping[str, str]
    is_streamed: bool = False
    asks_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One recorded call.

    ``index`` is the number of the reply among a transcript's messages, or of the recorded request. ``reply`` is the
    model's reply in the wire form of ``dialect``; None: unknown. ``follows`` is the index of the step whose reply the
    request references. ``at``: when the call was made; None: unknown.
    """

    index: int
    dialect: DialectName
    reply: Mapping[str, Any] | None
    source: ReplayRequest | Callable[[ReplyForm], ReplayRequest]
    follows: int | None = None
    at: datetime | None = None

    def request(self, form: ReplyForm) -> ReplayRequest:
        """Return the recorded request, or else one made of the messages in the given form."""
        return self.source if isinstance(self.source, ReplayRequest) else self.source(form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A series of calls; ``number`` is its line in the file, from 1. ``model`` is empty where the file names none.

    ``is_recording``: the requests are a client's own, so that they may belong to several sessions, or to none.
    """

    id: str
    number: int
    steps: Sequence[RecordedCall]
    is_recording: bool = False
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The conversations of one file."""

    name: str
    conversations: Sequence[Conversation]
