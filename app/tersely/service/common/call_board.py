"""The present model calls of this worker, for the live view and the operator.

Nothing here is stored: what another worker does is known from the database alone, without its state.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from typing import Literal

import msgspec

CallState = Literal["waiting", "first byte", "streaming"]
NoteKind = Literal["refused", "fail-open", "repaired"]
MAX_NOTES = 50
"""Notes that are kept for a tenant."""
MAX_TENANTS = 1_000
MAX_EXAMPLES = 5
"""Examples that are kept of each kind of side call."""
MAX_TEXT = 200


class CallNote(msgspec.Struct, frozen=True, kw_only=True):
    """Something out of the ordinary about a call: it was refused, went through unchanged, or was repaired."""

    kind: NoteKind
    at: datetime
    text: str
    session_id: str = ""


class SideCallExample(msgspec.Struct, frozen=True, kw_only=True):
    """A call beside a conversation: who made it, and the beginning of its last message."""

    kind: str
    at: datetime
    tenant: str
    client: str
    text: str


class RunningCall(msgspec.Struct, kw_only=True, eq=False):
    """A call under way. ``session_id`` is empty until the session is known."""

    tenant: str
    client: str
    dialect: str
    began: datetime
    state: CallState = "waiting"
    session_id: str = ""
    board: CallBoard | None = None


_current: ContextVar[RunningCall | None] = ContextVar("running_call", default=None)


class CallBoard:
    """The calls of this worker, and what was noted of them lately."""

    def __init__(self, *, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._running: dict[RunningCall, None] = {}
        self._notes: dict[str, deque[CallNote]] = {}
        self._examples: defaultdict[str, deque[SideCallExample]] = defaultdict(lambda: deque(maxlen=MAX_EXAMPLES))

    def begin(self, tenant: str, *, client: str, dialect: str) -> RunningCall:
        """Put up a call; what is noted in this context from now on is of this call."""
        call = RunningCall(tenant=tenant, client=client, dialect=dialect, began=self._clock(), board=self)
        self._running[call] = None
        _current.set(call)
        return call

    def end(self, call: RunningCall) -> None:
        """Take a call down."""
        self._running.pop(call, None)
        _current.set(None)

    def running(self, tenant: str) -> list[RunningCall]:
        """Return a tenant's calls, the oldest first."""
        return [call for call in self._running if call.tenant == tenant]

    def count(self) -> int:
        """Return how many calls are under way in this worker."""
        return len(self._running)

    def note(self, tenant: str, kind: NoteKind, text: str, session_id: str = "") -> None:
        """Keep a note for the tenant's live view."""
        notes = self._notes.pop(tenant, None) or deque(maxlen=MAX_NOTES)
        self._notes[tenant] = notes
        notes.append(CallNote(kind=kind, at=self._clock(), text=text[:MAX_TEXT], session_id=session_id))
        while len(self._notes) > MAX_TENANTS:
            del self._notes[next(iter(self._notes))]

    def notes(self, tenant: str) -> list[CallNote]:
        """Return the notes of a tenant, the newest first."""
        return list(reversed(self._notes.get(tenant, ())))

    def add_example(self, call: RunningCall, kind: str, text: str) -> None:
        """Keep an example of a side call."""
        example = SideCallExample(
            kind=kind, at=self._clock(), tenant=call.tenant, client=call.client, text=text[:MAX_TEXT]
        )
        self._examples[kind].append(example)

    def examples(self, kind: str) -> list[SideCallExample]:
        """Return the examples of a kind of side call, the newest first."""
        return list(reversed(self._examples.get(kind, ())))


def identify_call(session_id: str) -> None:
    """Say of which session the call of this context is."""
    if (call := _current.get()) is not None:
        call.session_id = session_id


def note_repairs(count: int) -> None:
    """Note that the call of this context was repaired before it was sent."""
    call = _current.get()
    if call is not None and call.board is not None and count:
        text = f"{count} message{'' if count == 1 else 's'} mended so that the provider accepts the request"
        call.board.note(call.tenant, "repaired", text, call.session_id)


def note_side_call(kind: str, text: str) -> None:
    """Note that the call of this context is a side call."""
    call = _current.get()
    if call is not None and call.board is not None:
        call.board.add_example(call, kind, text)
