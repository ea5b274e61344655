"""`query_db`: SQL of the agent over the messages of its session.

It runs in SQLite in a child process (`tersely.sandbox`) that holds only this session's rows. Rows are sent in portions,
so that neither the event loop nor the database is blocked; a child that is used again gets only the new rows.

In the table ``messages``, ``id`` is the sequence number, ``turn`` the number of the turn (0: the session's current
instructions), ``status`` is ``live``, or ``dropped`` for dropped, undone and superseded messages. Removed messages and
earlier instructions are not in it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tersely.dialects.registry import dialect_named
from tersely.domain.errors import Busy, InvalidRequest, NotFound, StoreUnavailable
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Media, Message, searchable_text, with_all_calls
from tersely.sandbox.child import CELL, DEFAULT_LIMITS, ROWS, QueryLimits
from tersely.sandbox.explain import TOO_LARGE, complaint, explain, kind_of, too_long
from tersely.sandbox.pool import ChildPool, ChildSlot
from tersely.sandbox.process import ChildDied, ChildReply, TookTooLong, frame
from tersely.service.common.metrics import Metrics
from tersely.store.db.connection import Database
from tersely.store.history import numbering, sessions
from tersely.store.search import query_rows
from tersely.store.search.query_rows import Portions, QueryRow

# The newest rows that a child of default size holds of a session, and the rows sent at once. Sizes as stored.
MOST = Portions(size=64 * 1024 * 1024, rows=250_000, portion_size=1024 * 1024, portion_rows=2_000)
# Bytes of one message's text, and characters of the names of the tools that it calls: less than the limit of a value.
MAX_CONTENT = 4 * 1024 * 1024
MAX_NAMES = 1_000
# Seconds for reading one portion.
LIMIT = 10.0
# So many messages that a query names by their id are found however old they are.
MAX_NAMED = 100

Cell = str | int | float | None

_NAMED = re.compile(r"\bid\s*(?:={1,2}|\bin\s*\()\s*(\d[\d\s,]*)", re.IGNORECASE)
# SQLite's functions stop at U+0000, and UTF-8 has no place for lone surrogates.
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryResult:
    """A query's result. ``truncated``: something was left out; ``notes`` say what, and how to get it.

    A blob is shown as in SQLite (``x'00ff'``), an infinite number as ``Infinity``.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    truncated: bool
    notes: tuple[str, ...]


@dataclass(slots=True)
class LoadedContent:
    """The content of a child process: messages ``first`` to ``last``, ``size`` bytes, at the session's ``version``."""

    version: int = -1
    first: int = 1
    last: int = 0
    size: int = 0


class Queries:
    """Queries within a tenant."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        children: int = 4,
        limits: QueryLimits = DEFAULT_LIMITS,
        most: Portions | None = None,
    ) -> None:
        """At most ``children`` processes at once; the first one starts at the first query. ``most``: the limits of one
        child.
        """
        self._database = database
        self._metrics = metrics
        self._limits = limits
        self._pool = ChildPool(LoadedContent, width=children, limits=limits)
        self._most = most or replace(MOST, size=MOST.size * limits.memory // DEFAULT_LIMITS.memory)

    async def close(self) -> None:
        """End all child processes."""
        await self._pool.close()

    async def run(self, tenant: str, session_id: str, sql: str) -> QueryResult:
        """Return the answer to one SELECT.

        Raises `NotFound`, `InvalidRequest` with an explanation of the SQL error, and `Busy`.
        """
        session = await self._session(tenant, session_id)
        result = "error"
        with self._metrics.query_seconds.time():
            try:
                if fault := complaint(sql):
                    raise InvalidRequest(fault, field="sql")
                reply, known = await self._ask(tenant, session, sql)
                result = kind_of(reply)
            except TookTooLong as error:
                result = "too_long"
                raise InvalidRequest(too_long(self._limits.seconds), field="sql") from error
            except ChildDied as error:
                result = "too_large"
                raise InvalidRequest(TOO_LARGE, field="sql") from error
            except (Busy, StoreUnavailable):
                result = "busy"
                raise
            finally:
                self._metrics.queries.labels(result).inc()
        if result != "ok":
            raise InvalidRequest(explain(reply, sql, self._limits), field="sql")
        return _result(reply, known)

    async def _ask(self, tenant: str, session: Session, sql: str) -> tuple[ChildReply, LoadedContent]:
        async with self._pool.slot(tenant, (tenant, session.id, session.created_at)) as slot:
            await self._bring_up(tenant, session.id, slot)
            await self._add_named(tenant, session.id, slot, sql)
            reply = await slot.child.run(sql)
            if kind_of(reply) == "too_large":
                slot.child.kill()  # which leaves no room for the next query
            return reply, slot.known

    async def _session(self, tenant: str, session_id: str) -> Session:
        async with self._database.reading(tenant) as connection:
            session = await sessions.get(connection, tenant, session_id)
        if session is None:
            raise NotFound("there is no such session")
        return session

    async def _bring_up(self, tenant: str, session_id: str, slot: ChildSlot[LoadedContent]) -> None:
        """Bring the child process up to the session's current state."""
        session = await self._session(tenant, session_id)
        if slot.known.version == session.version:
            return
        try:
            await self._add_new(tenant, session, slot)
            await self._mark(tenant, session, slot)
            await slot.child.ready()  # the time of a query begins when all rows are there
        except (ChildDied, TookTooLong) as error:
            raise Busy("the session could not be made ready for a query") from error
        slot.known.version = session.version

    async def _add_new(self, tenant: str, session: Session, slot: ChildSlot[LoadedContent]) -> None:
        spans = await self._spans(tenant, session, slot.known.last)
        if slot.known.last and not self._fits(spans, slot.known):
            await slot.child.feed(frame({"clear": True}))
            slot.known = LoadedContent()
            spans = await self._spans(tenant, session, 0)
        for span in spans:
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                rows = await query_rows.rows(connection, tenant, session.id, span)
            await slot.child.feed(await asyncio.to_thread(_frame, rows))
        if spans:
            if not slot.known.last:
                slot.known.first = spans[0].first
            slot.known.last = spans[-1].last
            slot.known.size += sum(span.size for span in spans)

    async def _spans(self, tenant: str, session: Session, after: int) -> list[query_rows.Span]:
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            return await query_rows.spans(
                connection, tenant, session.id, after=after, last=session.last_seq, most=self._most
            )

    def _fits(self, spans: Sequence[query_rows.Span], known: LoadedContent) -> bool:
        """Return whether the new messages follow those that a child holds, and fit within its limits."""
        if not spans:
            return True
        size = known.size + sum(span.size for span in spans)
        count = spans[-1].last - known.first + 1
        return spans[0].first == known.last + 1 and size <= self._most.size and count <= self._most.rows

    async def _mark(self, tenant: str, session: Session, slot: ChildSlot[LoadedContent]) -> None:
        """Update the status of stored messages, and which instructions are current."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            exceptional = await numbering.exceptions(connection, tenant, session.id)
            instructions = await query_rows.instructions(connection, tenant, session.id)
        hidden = [row for row in exceptional if row.status != "live"]
        marks = {
            "dropped": [row.seq for row in hidden if row.status != "removed"],
            "removed": [row.seq for row in hidden if row.status == "removed"],
        }
        await slot.child.feed(frame({"mark": marks}))
        await slot.child.feed(await asyncio.to_thread(_frame, instructions))

    async def _add_named(self, tenant: str, session_id: str, slot: ChildSlot[LoadedContent], sql: str) -> None:
        """Add messages that a query selects by number, if they are older than those that the child holds."""
        named = [seq for seq in _ids_in(sql) if 0 < seq < slot.known.first][:MAX_NAMED]
        if named:
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                rows = await query_rows.some(connection, tenant, session_id, named)
            await slot.child.feed(await asyncio.to_thread(_frame, rows))


def _ids_in(sql: str) -> list[int]:
    return [int(digits) for found in _NAMED.finditer(sql) for digits in re.findall(r"\d{1,15}", found[1])]


def _frame(rows: Sequence[QueryRow]) -> bytes:
    return frame({"add": [_row(row) for row in rows if row.raw]})


def _row(row: QueryRow) -> list[Any]:
    """Return a message as a child's row: its columns, its calls, and the calls that it answers."""
    dialect = dialect_named(row.dialect)
    message = dialect.read_reply(row.raw)
    if row.model_raw is not None:
        message = with_all_calls(message, dialect.read_reply(row.model_raw))
    calls = [[_clean(call.id), _clean(call.name)[:MAX_NAMES]] for call in message.calls]
    answers = [_clean(result.call_id) for result in message.results]
    text = _content(message)
    return [
        row.seq,
        row.turn,
        row.role,
        "tool_call" if calls else "tool_result" if answers else _kind(message, text),
        "live" if row.status == "live" else "dropped",
        text,
        ", ".join(dict.fromkeys(name for _, name in calls))[:MAX_NAMES] if calls else None,
        row.created_at,
        row.tokens,
        calls,
        answers,
    ]


def _kind(message: Message, text: str) -> str:
    """Return the kind of a message without tool traffic: ``text``, ``media`` or ``reasoning``, the first that fits."""
    if text or not message.parts:
        return "text"
    return "media" if any(isinstance(part, Media) for part in message.parts) else "reasoning"


def _content(message: Message) -> str:
    text = _clean(searchable_text(message))
    if len(text) * 4 <= MAX_CONTENT:
        return text
    return text.encode()[:MAX_CONTENT].decode("utf-8", "ignore")


def _clean(text: str) -> str:
    return _UNSTORABLE.sub("\ufffd", text) if _UNSTORABLE.search(text) else text


def _result(reply: ChildReply, known: LoadedContent) -> QueryResult:
    notes: list[str] = []
    if reply["more"]:
        notes.append(
            f"there are more rows than these {len(reply['rows'])} (at most {ROWS}, 256 KiB): use LIMIT and OFFSET"
        )
    if reply["cut"]:
        notes.append(f"long values were cut, to {CELL} bytes or less: read on with substr(column, start, length)")
    if known.first > 1:
        notes.append(
            f"messages before id {known.first} were not looked at, other than those named as id = ... or id IN (...)"
        )
    return QueryResult(
        columns=tuple(reply["columns"]),
        rows=tuple(tuple(row) for row in reply["rows"]),
        truncated=bool(notes),
        notes=tuple(notes),
    )
