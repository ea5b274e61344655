"""Compare a session with a call: the client's messages beside those that were sent to the model, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tersely.dialects.registry import dialect_named
from tersely.domain.errors import NotFound, TerselyError
from tersely.domain.history.history import DEFAULT_PRIORITY
from tersely.domain.messages import Media, Message, Part, Reasoning, Text, ToolCall, ToolResult
from tersely.domain.text.encodable import encodable
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.sessions.calls import Calls, ContextWindow
from tersely.service.sessions.sent_lines import ContextLine
from tersely.store.db.connection import Database
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage

PartKind = Literal["text", "reasoning", "call", "result", "media", "injected"]
PartChange = Literal["", "new", "changed"]
MAX_CHARS = 6_000
"""Characters of one part; a page shows more on demand."""
MAX_WHOLE = 2_000_000
"""Characters of a part that is shown whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadablePart:
    """A readable part of a message. ``omitted``: number of characters that were cut from the text."""

    kind: PartKind
    text: str
    name: str = ""
    omitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """A message on both sides. ``sent`` is None where both sides are the same. ``change``: against the call before.

    Of the call's reply, ``sent`` is what the model wrote, and ``client_blocks`` what the client received.
    """

    line: ContextLine
    client_blocks: tuple[ReadablePart, ...]
    sent: tuple[ReadablePart, ...] | None
    change: PartChange = ""
    is_hidden: bool = False
    pinned: bool = False
    priority: int = DEFAULT_PRIORITY
    is_reply: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Rows from ``start`` on, of ``total``, of a session beside a call and its reply."""

    context: ContextWindow
    rows: tuple[ComparisonRow, ...]
    start: int
    total: int


class Comparisons:
    """Compares sessions with their calls."""

    def __init__(self, database: Database, calls: Calls) -> None:
        self._database = database
        self._calls = calls

    async def rows(
        self, tenant: str, session_id: str, number: int, *, start: int, limit: int, seq: int | None = None
    ) -> Comparison:
        """Rows of a session beside call ``number``: from ``start``, or around message ``seq``.

        Raises `NotFound`.
        """
        context = await self._calls.window(tenant, session_id, number, start=start, limit=limit, seq=seq)
        seqs = [line.seq for line in context.lines if line.seq is not None]
        async with self._database.reading(tenant) as connection:
            stored = {each.seq: each for each in await messages.content(connection, tenant, session_id, seqs)}
        size = sum(len(each.raw) for each in stored.values())
        rows = await run_in_thread_if_large(size, _rows, context, stored)
        return Comparison(context=context, rows=tuple(rows), start=context.start, total=context.total)

    async def whole_text(
        self, tenant: str, session_id: str, number: int, *, seq: int | None, index: int | None, part: int
    ) -> str:
        """Return the text of a part, of message ``seq`` as the client sent it, or of message ``index`` as it was sent
        at call ``number``.

        Raises `NotFound`.
        """
        if index is not None:
            raw, dialect, role = await self._calls.sent_message(tenant, session_id, number, index)
        else:
            async with self._database.reading(tenant) as connection:
                found = await messages.content(connection, tenant, session_id, [seq or 0])
            if not found:
                raise NotFound("there is no such message")
            raw, dialect, role = found[0].raw, found[0].dialect, found[0].role
        blocks = await run_in_thread_if_large(len(raw), blocks_of, raw, dialect, role, MAX_WHOLE)
        if not 0 <= part < len(blocks):
            raise NotFound("there is no such part")
        return blocks[part].text


def _rows(context: ContextWindow, stored: Mapping[int, StoredMessage]) -> list[ComparisonRow]:
    has_before = context.call.row.number > 1
    replies = set(context.replies)
    found = []
    for line in context.lines:
        message = stored.get(line.seq) if line.seq is not None else None
        client_blocks = blocks_of(message.raw, message.dialect, message.role) if message is not None else ()
        is_reply = line.seq in replies
        sent: tuple[ReadablePart, ...] | None = None
        if is_reply and message is not None and message.model_raw is not None:
            sent = blocks_of(message.model_raw, message.dialect, message.role)
        elif line.index is not None and context.messages is not None:
            raw = context.messages[line.index]
            if message is None or raw != message.raw:
                sent = blocks_of(raw, context.dialect, message.role if message is not None else "")
        change: PartChange = ""
        if has_before and line.seq is not None and not is_reply:
            known = context.earlier.get(line.seq)
            change = "new" if known is None else "changed" if known != line.kept else ""
        found.append(
            ComparisonRow(
                line=line,
                client_blocks=client_blocks,
                sent=None if sent == client_blocks else sent,
                change=change,
                is_hidden=message is not None and not message.client_visible,
                pinned=message is not None and message.pinned,
                priority=message.priority if message is not None else DEFAULT_PRIORITY,
                is_reply=is_reply,
            )
        )
    return found


def blocks_of(raw: bytes, dialect: str, role: str, most: int = MAX_CHARS) -> tuple[ReadablePart, ...]:
    """Return the parts of a message in wire form, of each at most ``most`` characters; its bytes if unreadable."""
    if not raw:
        return ()
    try:
        form = dialect_named(dialect)
        message = form.read_reply(raw) if role == "assistant" else form.read_message(raw)
    except (TerselyError, ValueError, KeyError):
        return (_block("text", raw.decode("utf-8", "replace"), most=most),)
    return message_blocks(message, most)


def message_blocks(message: Message, most: int = MAX_CHARS) -> tuple[ReadablePart, ...]:
    """The parts of a message, of each at most so many characters."""
    injected = [_block("injected", block.text, block.key, most=most) for block in message.injected]
    return (*injected, *(_part(part, most) for part in message.parts))


def _part(part: Part, most: int) -> ReadablePart:
    match part:
        case Text(text=text):
            return _block("text", text, most=most)
        case Reasoning(text=text):
            return _block("reasoning", text, most=most)
        case ToolCall(name=name, arguments=arguments):
            return _block("call", arguments, name, most=most)
        case ToolResult(text=text, call_id=call_id):
            return _block("result", text, call_id, most=most)
        case Media(kind=kind, detail=detail):
            return _block("media", detail, kind, most=most)


def _block(kind: PartKind, text: str, name: str = "", *, most: int) -> ReadablePart:
    shown = readable(text)
    return ReadablePart(kind=kind, text=shown[:most], name=readable(name), omitted=max(0, len(shown) - most))


_PICTURES = {code: 0x2400 + code for code in range(32) if code not in {9, 10}} | {0x7F: 0x2421}
# Characters that would reverse the direction of the text around them.
_PICTURES |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)


def readable(text: str) -> str:
    """Text with a picture for each control character, fit for a page."""
    return encodable(text.replace("\r\n", "\n").translate(_PICTURES))
