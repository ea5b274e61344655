"""Look up past upstream calls: the exact context of each, and whether each stored message was kept in it."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.history.context import TurnReport
from tersely.domain.history.history import Epoch
from tersely.service.common import tokens
from tersely.service.context.sent_contexts import REPEATS
from tersely.service.sessions.call_infos import ALTERED, DELETED, CallInfo, CallTools, divided_infos, info, tools_of
from tersely.service.sessions.messages import dialect_of
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages, sent_contexts, sessions
from tersely.store.history.messages import StoredMessage
from tersely.store.history.patches import apply_patch
from tersely.store.history.sent_contexts import (
    MAX_ELEMENTS,
    SHORTENED,
    SentContext,
    SentMessage,
    checksum,
    decode,
    split_group,
    unpack,
)
from tersely.store.ops import calls, stats
from tersely.store.ops.calls import CallRow, MessageRow
from tersely.store.ops.stats import EpochRow
from tersely.strategies.planning import report_cut_turns

# No model takes so much: it is no call's description, but an imported one of few bytes that stands for very many.
MAX_BYTES = 256 * 1024 * 1024
# Seconds; the lines of a long session are many.
LIMIT = 10.0
COUNTED_BYTES = 1024 * 1024
"""Most bytes of counted tool definitions that a process remembers."""
LineKind = Literal["full", "truncated", "terse", "summary", "left_out", "added"]

NOT_KEPT = "what this call sent was not recorded: it was made by an earlier version, or failed before it left"
_HIDDEN = {
    "superseded": "the client replaced it",
    "dropped": "dropped from every context",
    "undone": "taken back",
    "removed": "removed for good",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLine:
    """One message and its form in a context.

    ``seq`` is the stored message (None: Tersely added this one), ``index`` its position in the message list that was
    sent (None: it was not sent). ``layer`` names what Tersely added.
    """

    seq: int | None
    turn: int | None
    role: str
    kept: LineKind
    reason: str
    tokens: int
    index: int | None = None
    layer: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RebuiltContext:
    """The context of a call: its elements, the bytes of each (None: they are not available, ``reason`` says why)."""

    dialect: str = ""
    elements: Sequence[SentMessage] = ()
    instructions: bytes | None = None
    raws: Sequence[bytes] | None = None
    reason: str | None = None
    rounds: tuple[int, ...] = ()


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
            order = _Order(rebuilt.elements, [stored.seq for stored in rows])
            beside = await _sent_beside(connection, tenant, session_id, rebuilt, order, rows)
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
            lines=_lines(order, order.keys, rows, rebuilt, row, epoch, beside),
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
            order = _Order(rebuilt.elements, await calls.seqs_up_to(connection, tenant, session_id, row.last_seq))
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
            lines = _lines(order, sent_keys, sent_rows, rebuilt, row, epoch, beside)
            earlier = await _kept_earlier(connection, tenant, session_id, number, sent_rows)
            call = (await divided_infos(connection, tenant, [row], self._counter))[0]
        return ContextWindow(
            call=call,
            dialect=rebuilt.dialect,
            messages=None if rebuilt.raws is None else tuple(rebuilt.raws),
            instructions=rebuilt.instructions,
            reason=rebuilt.reason,
            lines=(*lines, *(_reply(stored) for stored in rows if stored.seq > row.last_seq)),
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
    rebuilt = _RebuiltContext(elements=elements, instructions=instructions)
    order = _Order(elements, [stored.seq for stored in known])
    epoch = await _epoch_of(connection, tenant, row)
    beside = await _sent_beside(connection, tenant, session_id, rebuilt, order, known)
    lines = _lines(order, [stored.seq for stored in known], known, rebuilt, row, epoch, beside)
    return {line.seq: line.kept for line in lines if line.seq is not None}


async def _sent_beside(
    connection: Connection,
    tenant: str,
    session_id: str,
    rebuilt: _RebuiltContext,
    order: _Order,
    rows: Sequence[MessageRow],
) -> set[int]:
    """Return which stored instructions are in those that the call sent beside its list of messages."""
    missing = [stored.seq for stored in rows if stored.turn == 0 and stored.seq not in order.sent]
    if not missing or rebuilt.instructions is None:
        return set()
    sent = text_of_instructions(rebuilt.instructions)
    stored = await messages.content(connection, tenant, session_id, missing)
    found = set()
    for each in stored:
        text = dialect_of(each.dialect).read_message(each.raw).text if each.raw else ""
        if text and text in sent:
            found.add(each.seq)
    return found


def text_of_instructions(raw: bytes) -> str:
    """Return the text of instructions beside a list of messages, whatever their dialect; empty if unreadable."""
    try:
        return "\n\n".join(_texts(raw_json.load(raw)))
    except ValueError:
        return ""


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts(each)
        case dict():
            yield from _texts(value.get("text", value.get("parts")))
        case _:
            pass


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
    elements: list[SentMessage] = []
    for packed in (*(found[block] for block in (*grouped, *sent.blocks)), sent.rest):
        elements += unpack(packed, MAX_ELEMENTS - len(elements), version=sent.version)
    return elements, found


async def _rebuild(connection: Connection, tenant: str, row: CallRow) -> _RebuiltContext:
    """Rebuild what a call sent, from what is stored."""
    sent = decode(row.sent) if row.sent is not None else None
    if sent is None:
        return _RebuiltContext(reason=NOT_KEPT)
    session_id = row.session_id
    try:
        read = await _elements(connection, tenant, session_id, sent)
    except msgspec.DecodeError:
        return _RebuiltContext(dialect=sent.dialect, reason=ALTERED, rounds=sent.rounds)
    if read is None:
        return _RebuiltContext(dialect=sent.dialect, reason=DELETED, rounds=sent.rounds)
    elements, found = read
    found |= await sent_contexts.literals(
        connection, tenant, session_id, (each.literal for each in elements if each.literal)
    )
    seqs = list(dict.fromkeys(each.seq for each in elements if each.seq and not each.literal))
    stored = {each.seq: each for each in await messages.content(connection, tenant, session_id, seqs)}
    raws, reason = _bytes_of_all(elements, stored, found)
    if reason is None and (checksum(raws) != sent.checksum or len(raws) != sent.count):
        reason = ALTERED
    return _RebuiltContext(
        dialect=sent.dialect,
        elements=elements,
        instructions=found.get(sent.instructions) if sent.instructions and reason is None else None,
        raws=raws if reason is None else None,
        reason=reason,
        rounds=sent.rounds,
    )


def _bytes_of_all(
    elements: Sequence[SentMessage], stored: Mapping[int, StoredMessage], literals: Mapping[bytes, bytes]
) -> tuple[list[bytes], str | None]:
    """Return the bytes of the elements, and why there are no more of them; None if these are all."""
    raws: list[bytes] = []
    size = 0
    for element in elements:
        try:
            raw = _bytes_of(element, stored, literals)
        except ValueError:
            return raws, ALTERED
        if raw is None:
            return raws, DELETED
        size += len(raw)
        if size > MAX_BYTES:
            return raws, ALTERED
        raws.append(raw)
    return raws, None


def _bytes_of(
    element: SentMessage, stored: Mapping[int, StoredMessage], literals: Mapping[bytes, bytes]
) -> bytes | None:
    if element.literal:
        return literals.get(element.literal)
    message = stored.get(element.seq)
    if message is None or message.status == "removed":
        return None
    if not element.patch:
        return message.raw
    # A message that was edited may have no model's view any more: then the checksum tells.
    raw = message.model_raw if element.is_of_model and message.model_raw is not None else message.raw
    return apply_patch(raw, element.patch)


class _Order:
    """The lines of a context by their keys, in order: of a stored message its sequence number, of an added one
    -1 - its index.

    An added message stands in front of the first stored one that was sent behind it.
    """

    def __init__(self, elements: Sequence[SentMessage], seqs: Sequence[int]) -> None:
        """``seqs``: the stored messages in the order of the history."""
        known = set(seqs)
        self.sent: dict[int, tuple[int, SentMessage]] = {}
        added: deque[int] = deque()
        for index, element in enumerate(elements):
            is_known = False
            for seq in (element.seq, *element.also) if element.also else (element.seq,):
                if seq in known:
                    is_known = True
                    self.sent.setdefault(seq, (index, element))
            if not is_known:
                added.append(index)
        self.keys: list[int] = []
        for seq in seqs:
            if added and seq in self.sent:
                while added and added[0] < self.sent[seq][0]:
                    self.keys.append(-1 - added.popleft())
            self.keys.append(seq)
        self.keys += [-1 - index for index in added]


def _lines(
    order: _Order,
    keys: Sequence[int],
    rows: Sequence[MessageRow],
    rebuilt: _RebuiltContext,
    row: CallRow,
    epoch: Epoch | None,
    beside: Collection[int],
) -> tuple[ContextLine, ...]:
    """Return the lines of ``keys``. ``rows`` has the stored messages among them; ``beside`` are those that were sent
    beside the list.
    """
    known = {stored.seq: stored for stored in rows}
    # The same for every turn before the cut, and asked for once: a session may have thousands.
    cut = report_cut_turns(epoch, [0])[0] if epoch is not None and epoch.number == row.epoch else None
    lines: list[ContextLine] = []
    for key in keys:
        if key < 0:
            lines.append(_added(-1 - key, rebuilt.elements[-1 - key], rebuilt.raws or ()))
        elif key in beside:
            lines.append(_beside(known[key]))
        elif key in known:
            at = order.sent.get(key)
            lines.append(_sent(known[key], *at, row) if at is not None else _not_sent(known[key], row, cut))
    return tuple(lines)


def _added(index: int, element: SentMessage, raws: Sequence[bytes]) -> ContextLine:
    layer = element.layer or "added"
    count = tokens.count_short(raws[index].decode("utf-8", "replace")[:20_000]) if index < len(raws) else 0
    reason = {
        "tool_round": "said in an earlier round of this call",
        "instructions": "instructions",
        "added": "needed by the provider's format",
    }.get(layer, f"added by Tersely: {layer.replace('_', ' ')}")
    return ContextLine(
        seq=None, turn=None, role="", kept="added", reason=reason, tokens=count, index=index, layer=layer
    )


def _beside(stored: MessageRow) -> ContextLine:
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept="full", reason="instructions, beside the messages",
        tokens=stored.tokens,
    )  # fmt: skip


def _sent(stored: MessageRow, index: int, element: SentMessage, row: CallRow) -> ContextLine:
    kept: LineKind = "truncated" if element.shows == SHORTENED else "full"
    if stored.turn == 0:
        reason = "instructions"
    elif kept == "truncated":
        reason = "shortened: text that stands above" if element.layer == REPEATS else "shortened"
    elif stored.seq < row.cut:
        reason = "kept before the cut"
    else:
        reason = "recent"
    if element.layer == "memos":
        reason += ", with text of Tersely's in front"
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept=kept, reason=reason, tokens=stored.tokens, index=index
    )


def _not_sent(stored: MessageRow, row: CallRow, cut: TurnReport | None) -> ContextLine:
    """``cut``: the report on turns before the cut; None where their epoch is not known."""
    kept: LineKind = "left_out"
    if stored.status in _HIDDEN:
        reason = _HIDDEN[stored.status]
    elif not stored.model_visible:
        reason = "hidden from the model"
    elif stored.turn == 0:
        reason = "not part of this request"
    elif stored.seq < row.cut and cut is not None:
        kept, reason = cut.kept, cut.reason
    elif stored.seq < row.cut:
        reason = "before the cut"
    else:
        reason = "not part of this request"
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept=kept, reason=reason, tokens=stored.tokens
    )


def _reply(stored: MessageRow) -> ContextLine:
    reason = _HIDDEN.get(stored.status, "the model's reply")
    return ContextLine(
        seq=stored.seq, turn=stored.turn, role=stored.role, kept="full", reason=reason, tokens=stored.tokens
    )


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
