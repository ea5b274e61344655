"""What is to be summarised, and the messages and the earlier summary that it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.dialects.registry import DIALECTS
from app.domain.errors import NotFound
from app.domain.history import Entry, Summary
from app.domain.messages import Dialect as DialectName
from app.store import sessions, summaries
from app.store.connection import Connection
from app.store.messages import StoredMessage
from app.strategies.summary_prompts import Purpose

# Headers by which callers name themselves to a model host, whatever its dialect.
CREDENTIALS = frozenset(
    {
        "authorization",
        "x-api-key",
        "api-key",
        "x-goog-api-key",
        "openai-organization",
        "openai-project",
        "anthropic-beta",
        "anthropic-version",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be summarised, and with what.

    ``entries`` are the range's messages, as they were when the session counted ``edits`` edits; without them, which
    costs less memory while the job waits, they are loaded. ``model`` is the session's, ``credentials`` are the caller's
    headers for it, kept for as long as the job is. ``given``: for a tool result its call, for a state the state so far.
    ``again``: also where that was done, or tried in vain, before. ``is_beside``: the summary does not stand in for what
    it is made of, so that it need not be shorter. ``strategy`` is a strategy's name, for the metrics.
    """

    tenant: str
    session_id: str
    purpose: Purpose
    first_seq: int
    last_seq: int
    strategy: str
    dialect: DialectName = "openai_chat"
    model: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    edits: int | None = None
    given: str = field(default="", repr=False)
    again: bool = False
    is_beside: bool = False

    @property
    def place(self) -> tuple[str, str]:
        """Whose it is."""
        return self.tenant, self.session_id

    @property
    def key(self) -> tuple[Purpose, int, int]:
        """What no two jobs of a session have in common."""
        return self.purpose, self.first_seq, self.last_seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a summary is made of. ``basis`` is that of the whole range; ``earlier`` covers its beginning, if anything
    does, and ``stored`` or ``entries`` are the rest.
    """

    basis: bytes
    earlier: Summary | None
    entries: tuple[Entry, ...] = ()
    stored: tuple[StoredMessage, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of what the summary will stand in for."""
        earlier = self.earlier.tokens if self.earlier else 0
        return earlier + sum(entry.tokens for entry in self.entries) + sum(row.tokens for row in self.stored)

    @property
    def count(self) -> int:
        """How many messages there are."""
        return len(self.entries) + len(self.stored)

    def read(self) -> tuple[Entry, ...]:
        """The messages; what was loaded is read now, which takes time where it is much."""
        return self.entries or tuple(map(_entry, self.stored))


def credentials_of(
    headers: list[tuple[str, str]], *, drop: frozenset[str] = frozenset()
) -> tuple[tuple[str, str], ...]:
    """The headers (names in lower case) that a model host knows its caller by; ``drop`` carried Tersely's own key."""
    return tuple((name, value) for name, value in headers if name in CREDENTIALS and name not in drop)


async def load(connection: Connection, job: Job) -> Source | None:
    """What ``job`` is made of; None where it was done or tried before. Raises `NotFound` without a session."""
    first, last = job.first_seq, job.last_seq
    # The basis first: whatever changes after it makes the summary stale when it is stored.
    basis = await summaries.basis(connection, *job.place, first, last)
    session = await sessions.get(connection, *job.place)
    if session is None:
        raise NotFound("there is no such session")
    is_done = not job.again and await summaries.is_done(
        connection, *job.place, job.purpose, first, last, basis, in_vain=not job.is_beside
    )
    if is_done:
        return None
    earlier = await _earlier(connection, job)
    if earlier is not None:
        first = earlier.last_seq + 1
    if job.entries and job.edits in (None, session.edits):
        entries = tuple(entry for entry in job.entries if first <= entry.seq <= last and not entry.is_ours)
        return Source(basis=basis, earlier=earlier, entries=entries)
    stored = await summaries.covered(connection, *job.place, first, last)
    return Source(basis=basis, earlier=earlier, stored=tuple(stored))


async def _earlier(connection: Connection, job: Job) -> Summary | None:
    """The checkpoint that this one takes up."""
    if job.purpose != "checkpoint":
        return None
    found = await summaries.newest(connection, *job.place, ["checkpoint"], up_to=job.last_seq - 1)
    return next((summary for summary in found if summary.first_seq <= job.first_seq <= summary.last_seq), None)


def _entry(stored: StoredMessage) -> Entry:
    dialect = DIALECTS[stored.dialect]  # type: ignore[index]
    # What stands in front of a user's words are memos: nothing that was said here.
    raw = stored.raw if stored.model_raw is None or stored.role == "user" else stored.model_raw
    if stored.role == "assistant":
        raw = dialect.as_input(raw)
    return Entry(
        seq=stored.seq,
        turn=stored.turn,
        message=dialect.read_message(raw),
        tokens=stored.tokens,
        created_at=stored.created_at,
    )
