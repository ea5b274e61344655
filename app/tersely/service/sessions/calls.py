"""Look up past upstream calls: the exact context of each, and whether each stored message was kept in it."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import msgspec

from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.history.history import Epoch
from tersely.service.common import tokens
from tersely.service.sessions.call_infos import ALTERED, DELETED, CallInfo, CallTools, divided_infos, info, tools_of
from tersely.service.sessions.messages import dialect_of
from tersely.service.sessions.sent_lines import (
    ContextLine,
    LineKind,
    LineOrder,
    RebuiltContext,
    elements_of,
    lines_of,
    needs_of,
    rebuild,
    reply_line,
    text_of_instructions,
)
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages, sent_contexts, sessions
from tersely.store.history.messages import StoredMessage
from tersely.store.history.sent_contexts import SentContext, SentMessage, decode, split_group
from tersely.store.ops import calls, stats
from tersely.store.ops.calls import CallRow, MessageRow
from tersely.store.ops.stats import EpochRow

# Seconds; the lines of a long session are many.
LIMIT = 10.0
AT_ONCE = 2_000
"""Messages that are read at once."""
COUNTED_BYTES = 1024 * 1024
"""Most bytes of counted tool definitions that a process remembers."""
NOT_KEPT = "what this call sent was not recorded: it was made by an earlier version, or failed before it left"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedContext:
    """The context that a call sent.

    ``messages`` and ``instructions`` are the bytes that went upstream. Both are None if they cannot be rebuilt; then
    ``reason`` says why. ``rounds`` are the lengths of the earlier message lists of a call with several rounds: each is
    a prefix of ``messages``.
    """

    call: CallInfo
    dialect: str
    messages: tuple[bytes, ...] | None
    instructions: bytes | None
    tools: CallTools
    reason: str | None
    rounds: tuple[int, ...]
    lines: tuple[ContextLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextWindow:
    """Some lines of the context that a call sent, with its reply behind them.

    ``lines`` are those from ``start`` on, of ``total``; the last ones are those of ``replies``, the messages that the
    reply was stored as. ``earlier`` says how the call before showed the messages among them (empty for the first call).
    The other members are those of `RecordedContext`.
    """

    call: CallInfo
    dialect: str
    messages: tuple[bytes, ...] | None
    instructions: bytes | None
    reason: str | None
    lines: tuple[ContextLine, ...]
    start: int
    total: int
    earlier: Mapping[int, LineKind]
    replies: tuple[int, ...]


class Calls:
    """The calls of a tenant."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counter = tokens.FixedTokens(COUNTED_BYTES)

    async def page(self, tenant: str, session_id: str, *, after: int, limit: int) -> tuple[list[CallInfo], int | None]:
        """A session's calls after number ``after``, and the number to go on after. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            rows = await calls.of_session(connection, tenant, session_id, after=after, limit=limit + 1)
            infos = await divided_infos(connection, tenant, rows[:limit], self._counter)
        return infos, rows[limit - 1].number if len(rows) > limit else None

    async def last(self, tenant: str, session_id: str, *, limit: int, before: int | None = None) -> list[CallInfo]:
        """A session's last calls, in order. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            rows = await calls.before(
                connection, tenant, session_id, number=2**62 if before is None else before, limit=limit
            )
            return await divided_infos(connection, tenant, rows, self._counter)

    async def first_with(self, tenant: str, pairs: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """Session and message -> the first call that knew the message."""
        found: dict[tuple[str, int], int] = {}
        by_session: dict[str, list[int]] = {}
        for session_id, seq in pairs:
            by_session.setdefault(session_id, []).append(seq)
        async with self._database.reading(tenant) as connection:
            for session_id, seqs in by_session.items():
                numbers = await calls.first_with(connection, tenant, session_id, seqs)
                found |= {(session_id, seq): number for seq, number in numbers.items()}
        return found

    async def get(self, tenant: str, session_id: str, number: int) -> CallInfo:
        """One call. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            row = await _require_call(connection, tenant, session_id, number)
            return (await divided_infos(connection, tenant, [row], self._counter))[0]

    async def latest(self, tenant: str, *, after: str | None, limit: int) -> tuple[list[CallInfo], str | None]:
        """The tenant's calls, the newest first, behind a cursor; and the next cursor."""
        before = None if after is None else _read_cursor(after)
        async with self._database.reading(tenant) as connection:
            rows = await calls.latest(connection, tenant, before=before, limit=limit + 1)
        more = rows[limit - 1] if len(rows) > limit else None
        return [info(row) for row in rows[:limit]], None if more is None else _write_cursor(more)

    async def epochs(
        self, tenant: str, session_id: str, *, after: int, limit: int
    ) -> tuple[list[EpochRow], int | None]:
        """A session's epochs after number ``after``. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            await _require(connection, tenant, session_id)
            rows = await stats.epochs(connection, tenant, session_id, after=after, limit=limit + 1)
        return rows[:limit], rows[limit - 1].number if len(rows) > limit else None

    async def context(self, tenant: str, session_id: str, number: int) -> RecordedContext:
        """Return the context that a call sent. Raises `NotFound`."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            row = await _require_call(connection, tenant, session_id, number)
            epoch = await _epoch_of(connection, tenant, row)
            rows = await calls.messages_up_to(connection, tenant, session_id, row.last_seq)
            rebuilt = await _rebuild(connection, tenant, row)
            order = await asyncio.to_thread(lambda: LineOrder(rebuilt.elements, [stored.seq for stored in rows]))
            beside = await _sent_beside(connection, tenant, session_id, rebuilt, order, rows)
            lines = await asyncio.to_thread(lines_of, order, order.keys, rows, rebuilt, row, epoch, beside)
            call = (await divided_infos(connection, tenant, [row], self._counter))[0]
            tools = await tools_of(connection, tenant, call)
        return RecordedContext(
            call=call,
            dialect=rebuilt.dialect,
            messages=None if rebuilt.raws is None else tuple(rebuilt.raws),
            instructions=rebuilt.instructions,
            tools=tools,
            reason=rebuilt.reason,
            rounds=rebuilt.rounds,
            lines=lines,
        )

    async def tools(self, tenant: str, session_id: str, number: int) -> CallTools:
        """The tools that a call sent. Raises `NotFound`."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            return await tools_of(connection, tenant, info(await _require_call(connection, tenant, session_id, number)))

    async def window(
        self, tenant: str, session_id: str, number: int, *, start: int, limit: int, seq: int | None = None
    ) -> ContextWindow:
        """Return at most ``limit`` lines of a call's context and reply: from ``start`` on, or around message ``seq``.

        Raises `NotFound`. Messages outside of the window are not read, only their order.
        """
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            row = await _require_call(connection, tenant, session_id, number)
            rebuilt = await _rebuild(connection, tenant, row)
            stored_seqs = await calls.seqs_up_to(connection, tenant, session_id, row.last_seq)
            order = await asyncio.to_thread(LineOrder, rebuilt.elements, stored_seqs)
            replies = await calls.replies_of(connection, tenant, session_id, number=number, after=row.last_seq)
            keys = [*order.keys, *replies]
            if seq is not None:
                start = max(0, (keys.index(seq) if seq in keys else len(keys)) - limit // 2)
            shown = keys[start : start + limit]
            rows = await calls.messages_of(connection, tenant, session_id, [key for key in shown if key > 0])
            sent_rows = [stored for stored in rows if stored.seq <= row.last_seq]
            sent_keys = shown[: max(0, len(order.keys) - start)]
            beside = await _sent_beside(connection, tenant, session_id, rebuilt, order, sent_rows)
            epoch = await _epoch_of(connection, tenant, row)
            lines = lines_of(order, sent_keys, sent_rows, rebuilt, row, epoch, beside)
            earlier = await _kept_earlier(connection, tenant, session_id, number, sent_rows)
            call = (await divided_infos(connection, tenant, [row], self._counter))[0]
        return ContextWindow(
            call=call,
            dialect=rebuilt.dialect,
            messages=None if rebuilt.raws is None else tuple(rebuilt.raws),
            instructions=rebuilt.instructions,
            reason=rebuilt.reason,
            lines=(*lines, *(reply_line(stored) for stored in rows if stored.seq > row.last_seq)),
            start=start,
            total=len(keys),
            earlier=earlier,
            replies=tuple(replies),
        )

    async def sent_message(self, tenant: str, session_id: str, number: int, index: int) -> tuple[bytes, str, str]:
        """Return one message that a call sent: its bytes, its dialect and its role (empty: not stored).

        Raises `NotFound`.
        """
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            row = await _require_call(connection, tenant, session_id, number)
            rebuilt = await _rebuild(connection, tenant, row)
            if rebuilt.raws is None or not 0 <= index < len(rebuilt.raws):
                raise NotFound("there is no such message")
            rows = await calls.messages_of(connection, tenant, session_id, [rebuilt.elements[index].seq])
        return rebuilt.raws[index], rebuilt.dialect, rows[0].role if rows else ""


async def _epoch_of(connection: Connection, tenant: str, row: CallRow) -> Epoch | None:
    return await calls.epoch_plan(connection, tenant, row.session_id, row.epoch) if row.epoch else None


async def _kept_earlier(
    connection: Connection, tenant: str, session_id: str, number: int, rows: Sequence[MessageRow]
) -> dict[int, LineKind]:
    """Return the forms of these messages in the call before ``number``; nothing for messages that it did not know."""
    row = await calls.get(connection, tenant, session_id, number - 1) if number > 1 else None
    if row is None:
        return {}
    known = [stored for stored in rows if stored.seq <= row.last_seq]
    sent = decode(row.sent) if row.sent is not None else None
    elements: Sequence[SentMessage] = ()
    instructions: bytes | None = None
    if sent is not None:
        with suppress(msgspec.DecodeError):
            elements, found = await _elements(connection, tenant, session_id, sent) or ((), {})
            instructions = found.get(sent.instructions)
    rebuilt = RebuiltContext(elements=elements, instructions=instructions)
    order = await asyncio.to_thread(LineOrder, elements, [stored.seq for stored in known])
    epoch = await _epoch_of(connection, tenant, row)
    beside = await _sent_beside(connection, tenant, session_id, rebuilt, order, known)
    lines = lines_of(order, [stored.seq for stored in known], known, rebuilt, row, epoch, beside)
    return {line.seq: line.kept for line in lines if line.seq is not None}


async def _sent_beside(
    connection: Connection,
    tenant: str,
    session_id: str,
    rebuilt: RebuiltContext,
    order: LineOrder,
    rows: Sequence[MessageRow],
) -> set[int]:
    """Return which stored instructions are in those that the call sent beside its list of messages."""
    if rebuilt.instructions is None:
        return set()
    missing = await asyncio.to_thread(order.missing_instructions, rows)
    if not missing:
        return set()
    sent = text_of_instructions(rebuilt.instructions)
    stored = await messages.content(connection, tenant, session_id, missing)
    found = set()
    for each in stored:
        text = dialect_of(each.dialect).read_message(each.raw).text if each.raw else ""
        if text and text in sent:
            found.add(each.seq)
    return found


async def _elements(
    connection: Connection, tenant: str, session_id: str, sent: SentContext
) -> tuple[list[SentMessage], dict[bytes, bytes]] | None:
    """The elements of a description and the literals of its blocks; None if these are gone.

    Raises `msgspec.DecodeError` for blocks that are no elements.
    """
    wanted = [*sent.groups, *sent.blocks, *([sent.instructions] if sent.instructions else [])]
    found = await sent_contexts.literals(connection, tenant, session_id, wanted)
    if any(digest not in found for digest in wanted):
        return None
    grouped = [block for group in sent.groups for block in split_group(found[group], sent.version)]
    if grouped:
        found |= await sent_contexts.literals(connection, tenant, session_id, grouped)
        if any(digest not in found for digest in grouped):
            return None
    packed = [found[block] for block in (*grouped, *sent.blocks)]
    return await asyncio.to_thread(elements_of, sent, packed), found


async def _rebuild(connection: Connection, tenant: str, row: CallRow) -> RebuiltContext:
    """Rebuild what a call sent, from what is stored."""
    sent = decode(row.sent) if row.sent is not None else None
    if sent is None:
        return RebuiltContext(reason=NOT_KEPT)
    session_id = row.session_id
    try:
        read = await _elements(connection, tenant, session_id, sent)
    except msgspec.DecodeError:
        return RebuiltContext(dialect=sent.dialect, reason=ALTERED, rounds=sent.rounds)
    if read is None:
        return RebuiltContext(dialect=sent.dialect, reason=DELETED, rounds=sent.rounds)
    elements, found = read
    literals, seqs = await asyncio.to_thread(needs_of, elements)
    found |= await sent_contexts.literals(connection, tenant, session_id, literals)
    stored: list[StoredMessage] = []
    for start in range(0, len(seqs), AT_ONCE):
        wanted = seqs[start : start + AT_ONCE]
        stored += (there := await messages.content(connection, tenant, session_id, wanted))
        if len(there) < len(wanted):
            break  # of a context that lacks a message, no bytes are shown
    return await asyncio.to_thread(rebuild, sent, elements, stored, found)


async def _require(connection: Connection, tenant: str, session_id: str) -> None:
    if await sessions.get(connection, tenant, session_id) is None:
        raise NotFound("there is no such session")


async def _require_call(connection: Connection, tenant: str, session_id: str, number: int) -> CallRow:
    row = await calls.get(connection, tenant, session_id, number) if number < 2**62 else None
    if row is None:
        raise NotFound("there is no such call")
    return row


def _write_cursor(row: CallRow) -> str:
    text = f"{row.created_at.isoformat()} {row.number} {row.session_id}"
    return urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _read_cursor(cursor: str) -> tuple[datetime, str, int]:
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        at, number, session_id = text.split(" ", 2)
        moment = datetime.fromisoformat(at)
        if moment.tzinfo is None or "\x00" in session_id or not 0 <= int(number) < 2**62:
            raise ValueError
    except ValueError:
        raise InvalidRequest("after must be the `next` of an earlier page", field="after") from None
    return moment, session_id, int(number)
