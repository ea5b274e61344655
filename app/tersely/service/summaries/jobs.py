"""Summary jobs: the range to summarise, its messages, and the earlier summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tersely.dialects.registry import dialect_named
from tersely.domain.errors import NotFound
from tersely.domain.history.history import Entry, Summary
from tersely.domain.history.runs import Run, runs_of, subtract
from tersely.domain.messages import Dialect as DialectName
from tersely.store.commit import epochs
from tersely.store.db.connection import Connection
from tersely.store.history import sessions
from tersely.store.history.messages import StoredMessage
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import summaries
from tersely.strategies.prefetch import MEMORY_UPDATE
from tersely.strategies.summaries.extractive import FIRST_ENTRIES, NEWEST_ENTRIES
from tersely.strategies.summaries.prompts import Purpose

# Number of newest checkpoints among which a model's is searched for.
CHECKPOINTS_LOOKED_AT = 8
# If more messages leave a context at once, only the newest of them go into the memory.
MOST_REMEMBERED = 4_000
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
    """A summary to be written.

    ``entries`` are the range's messages, as they were when the session counted ``edits`` edits; without them they are
    loaded later, which costs less memory while the job waits. ``model`` is the session's; ``credentials`` are the
    caller's headers for it, kept as long as the job. ``earlier``: for a tool result its call, for a state the state so
    far. ``is_forced``: also if it was written, or tried without success, before. ``strategy`` is a strategy's name, for
    the metrics.

    ``host`` is the name of the session's model host; empty for the default one of the dialect, or if it is not known.

    For the memory: ``epoch`` is the number of the stored epoch that cut the messages, else ``runs`` are the messages.
    Messages that the memory covers already are left out when the job runs.
    """

    tenant: str
    session_id: str
    purpose: Purpose
    first_seq: int
    last_seq: int
    strategy: str
    dialect: DialectName = "openai_chat"
    model: str = ""
    host: str = ""
    credentials: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    entries: tuple[Entry, ...] = field(default=(), repr=False)
    edits: int | None = None
    earlier: str = field(default="", repr=False)
    is_forced: bool = False
    runs: tuple[Run, ...] = ()
    epoch: int | None = None

    @property
    def session_key(self) -> tuple[str, str]:
        """Tenant and session of the job."""
        return self.tenant, self.session_id

    @property
    def key(self) -> tuple[Purpose, int, int]:
        """Return the key that identifies a job within its session."""
        return self.purpose, self.first_seq, self.last_seq


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryInput:
    """The input of a summary. ``basis`` is that of the whole range. ``earlier`` covers its beginning, if there is one;
    ``stored`` or ``entries`` are the rest.

    ``first_seq`` and ``last_seq`` are the range of the summary, ``runs`` its messages if these are not all of it.
    """

    basis: bytes
    earlier: Summary | None
    entries: tuple[Entry, ...] = ()
    stored: tuple[StoredMessage, ...] = ()
    first_seq: int
    last_seq: int
    runs: tuple[Run, ...] = ()
    covered_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """The tokens that the summary replaces."""
        earlier = self.earlier.tokens if self.earlier and not self.runs else 0
        if self.covered_tokens is not None:
            return earlier + self.covered_tokens
        return earlier + sum(entry.tokens for entry in self.entries) + sum(row.tokens for row in self.stored)

    @property
    def count(self) -> int:
        """Return how many messages there are."""
        return len(self.entries) + len(self.stored)

    @property
    def newest_at(self) -> datetime | None:
        """The time of the newest of the messages."""
        times = [entry.created_at for entry in self.entries] + [row.created_at for row in self.stored]
        return max(times, default=None)

    def read(self) -> tuple[Entry, ...]:
        """Return the messages after ``earlier``. Loaded messages are parsed now, which takes time for many."""
        behind = self.earlier.last_seq if self.earlier else 0
        return self.entries or tuple(_entry(row) for row in self.stored if row.seq > behind)


def credentials_of(
    headers: list[tuple[str, str]], *, drop: frozenset[str] = frozenset()
) -> tuple[tuple[str, str], ...]:
    """Return the headers (names in lower case) that a model host knows its caller by; ``drop`` carried Tersely's own
    key.
    """
    return tuple([(name, value) for name, value in headers if name in CREDENTIALS and name not in drop])


async def load_source(connection: Connection, job: Job, *, has_model: bool = True) -> SummaryInput | None:
    """Load the input of ``job``; None if it was written or tried before. Raises `NotFound` without a session.

    Without a model a summary is written from the messages themselves, never from an older summary of that kind. Of very
    many messages the first and the newest are read, as in `tersely.strategies.summaries.extractive`.
    """
    if job.purpose == MEMORY_UPDATE:
        return await _load_memory(connection, job)
    first, last = job.first_seq, job.last_seq
    # Read the basis first: any later change then makes the summary stale when it is stored.
    basis = await summaries.basis(connection, *job.session_key, first, last)
    session = await sessions.get(connection, *job.session_key)
    if session is None:
        raise NotFound("there is no such session")
    is_done = not job.is_forced and await summaries.is_done(
        connection, *job.session_key, job.purpose, first, last, basis
    )
    if is_done:
        return None
    earlier = await earlier_of(connection, job)
    if earlier is not None:
        first = earlier.last_seq + 1
    if job.entries and job.edits in (None, session.edits):
        entries = tuple(entry for entry in job.entries if first <= entry.seq <= last and not entry.is_ours)
        return SummaryInput(basis=basis, earlier=earlier, entries=entries, first_seq=job.first_seq, last_seq=last)
    if has_model:
        stored = await summaries.covered(connection, *job.session_key, first, last)
        return SummaryInput(basis=basis, earlier=earlier, stored=tuple(stored), first_seq=job.first_seq, last_seq=last)
    stored = await summaries.first_and_last(
        connection, *job.session_key, first, last, head=FIRST_ENTRIES, tail=NEWEST_ENTRIES
    )
    return SummaryInput(
        basis=basis,
        earlier=earlier,
        stored=tuple(stored),
        first_seq=job.first_seq,
        last_seq=last,
        covered_tokens=await summaries.covered_tokens(connection, *job.session_key, first, last),
    )


async def _load_memory(connection: Connection, job: Job) -> SummaryInput:
    """Load the messages of ``job`` that the memory does not cover yet."""
    if await sessions.get(connection, *job.session_key) is None:
        raise NotFound("there is no such session")
    left = job.runs or ((job.first_seq, job.last_seq),)
    if job.epoch is not None:
        left = await epochs.messages_left(connection, *job.session_key, job.epoch)
    first, last = (left[0][0], left[-1][1]) if left else (1, 0)
    basis = await summaries.basis(connection, *job.session_key, first, last)
    covered = await memory.covered_runs(connection, *job.session_key, first, last)
    left = subtract(left, covered)
    rows = await summaries.of_runs(connection, *job.session_key, left, limit=MOST_REMEMBERED) if left else []
    if not rows:
        return SummaryInput(basis=basis, earlier=None, first_seq=first, last_seq=last)
    seqs = sorted(row.seq for row in rows)
    earlier = await _made_ahead(connection, job, left, seqs)
    # A message that was kept in front of the cut may be cut long after its neighbours.
    behind = max((end for _, end in covered if end < seqs[-1]), default=0)
    start = next((seq for seq in seqs if seq > behind), seqs[0])
    return SummaryInput(
        basis=await summaries.basis(connection, *job.session_key, start, seqs[-1]),
        earlier=earlier,
        stored=tuple(rows),
        first_seq=start,
        last_seq=seqs[-1],
        runs=runs_of(seqs),
    )


async def _made_ahead(connection: Connection, job: Job, left: Sequence[Run], seqs: Sequence[int]) -> Summary | None:
    """Return a model's summary of the beginning of these messages that was made in advance, if there is one."""
    for each in await summaries.newest(connection, *job.session_key, ["ahead"], up_to=seqs[-1]):
        is_within = any(first <= each.first_seq and each.last_seq <= last for first, last in left)
        if each.source == "model" and is_within and each.first_seq <= seqs[0]:
            return each
    return None


async def earlier_of(connection: Connection, job: Job) -> Summary | None:
    """Return the model's checkpoint that the summary of ``job`` continues."""
    if job.purpose != "checkpoint":
        return None
    found = await summaries.newest(
        connection, *job.session_key, ["checkpoint"], up_to=job.last_seq - 1, limit=CHECKPOINTS_LOOKED_AT
    )
    return next(
        (
            summary
            for summary in reversed(found)
            if summary.source == "model" and summary.first_seq <= job.first_seq <= summary.last_seq
        ),
        None,
    )


def _entry(stored: StoredMessage) -> Entry:
    dialect = dialect_named(stored.dialect)
    # The text in front of a user's text consists of memos, which are no part of the conversation.
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
