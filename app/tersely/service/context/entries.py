"""Entries of a history: from the messages of a request, and from stored messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from msgspec.structs import replace

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import (
    Entry,
    ShownReply,
)
from tersely.domain.history.isolation import StoredInDialect, isolate
from tersely.domain.messages import (
    Message,
)
from tersely.service.common import tokens
from tersely.service.context.hidden_messages import live_hidden
from tersely.service.context.stored_messages import NOT_ECHOED, read_stored, stored_message
from tersely.service.memos.selection import (
    memos_in_message,
    with_memos_of,
)
from tersely.service.recognition.incoming_history import IncomingHistory
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.db.connection import Connection
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage, TailRow

# (the client's echo of a reply, the reply as the model wrote it, the dialect of that) -> the echo with the model's text
# restored.
Restore = Callable[[Message, bytes, str], Message]


# (position, entry)
_Placed = tuple[float, Entry]


def resent_entries(
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    kept_rows: Sequence[TailRow],
    duplicates: Mapping[int, Entry],
    kept_seqs: Collection[int],
    cut: int,
    now: datetime,
) -> tuple[list[Entry], list[Entry]]:
    """Return the entries and the kept entries of a history that the client resent whole.

    They use the client's bytes with the model's text restored. Messages that the client does not know are added at
    their positions. ``kept_seqs`` are kept from before the ``cut``.
    """
    rows = {row.row.seq: row for row in match.rows}
    # More rows than these may be at hand, or not: a reply must look the same either way.
    rounds = [row for row in match.hidden if row.row.seq >= cut or row.row.seq in kept_seqs]
    views = _views_of_rounds(match, incoming, dialect, rounds)
    entries: list[_Placed] = []
    kept: list[_Placed] = []
    for message, identity, placed in zip(incoming.messages, incoming.identities, match.decision.placed, strict=True):
        if not identity.is_link or placed.seq == 0 or placed.status != "live":
            continue
        if not (message.raw or message.parts):
            continue  # stored in another dialect, without text
        row = rows.get(placed.seq)
        if placed.is_new or row is None:
            entries.append((placed.position, new_entry(message, placed.seq, placed.turn, now)))
        elif placed.seq >= cut:
            entries.append((placed.position, known_entry(message, row, restore, dialect, views)))
        elif placed.seq in kept_seqs:
            kept.append((placed.position, known_entry(message, row, restore, dialect, views)))
    for row in live_hidden(match):
        if row.row.seq >= cut:
            entries += _hidden_entry(row, restore, dialect, views)
        elif row.row.seq in kept_seqs:
            kept += _hidden_entry(row, restore, dialect, views)
    return _in_order(entries), _in_order(kept) + _find_resent(match, incoming, dialect, kept_rows, restore, duplicates)


def _hidden_entry(row: TailRow, restore: Restore, dialect: Dialect, views: Mapping[int, ShownReply]) -> list[_Placed]:
    """Return a hidden message with its position; an empty list if its dialect does not share messages with
    ``dialect``.
    """
    entry = known_entry(NOT_ECHOED, row, restore, dialect, views)
    return [(row.row.position, entry)] if entry.message.parts else []


def _views_of_rounds(
    match: SessionMatch, incoming: IncomingHistory, dialect: Dialect, hidden: Sequence[TailRow]
) -> dict[int, ShownReply]:
    """Map each call that ``hidden`` messages belong to, to the client's view of its reply."""
    if not hidden:
        return {}
    calls = {row.row.call for row in hidden}
    views = dict.fromkeys(calls, ShownReply(raw=b"", dialect=dialect.name))
    replies = {row.row.seq: row.row.call for row in match.rows if row.row.role == "assistant"}
    for message, placed in zip(incoming.messages, match.decision.placed, strict=True):
        if replies.get(placed.seq) in calls:
            views[replies[placed.seq]] = ShownReply(raw=message.raw, dialect=dialect.name)
    return views


def _in_order(entries: list[_Placed]) -> list[Entry]:
    return [entry for _, entry in sorted(entries, key=lambda placed: (placed[0], placed[1].seq))]


async def stored_duplicates(
    connection: Connection,
    tenant: str,
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
) -> dict[int, Entry]:
    """Return the stored form of those ``rows`` whose text the request contains more than once before the loaded rows.

    The request does not show which of the equal messages is which, and their ids must not occur twice.
    """
    if match.session is None or not rows:
        return {}
    placed = match.decision.placed
    shown = Counter(incoming.identities[index].digest for index in incoming.links if placed[index].seq == 0)
    seqs = [row.row.seq for row in rows if shown[row.row.digest] > 1]
    stored = await messages.content(connection, tenant, match.session.id, seqs) if seqs else []
    messages_there = ((each, stored_message(each, dialect)) for each in stored)
    return {each.seq: _stored_entry(each, message) for each, message in messages_there if message is not None}


def _find_resent(
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
    restore: Restore,
    duplicates: Mapping[int, Entry],
) -> list[Entry]:
    """Return stored messages as the request contains them, in order. Messages that it does not contain are left out."""
    placed = match.decision.placed
    known = {placed[index].seq: index for index in incoming.links if placed[index].seq > 0}
    before = {incoming.identities[index].digest: index for index in incoming.links if placed[index].seq == 0}
    views = _views_of_rounds(match, incoming, dialect, [row for row in rows if row.is_hidden])
    shown: list[Entry] = []
    for row in sorted(rows, key=lambda each: each.row.position):
        index = None if row.is_hidden else known.get(row.row.seq, before.get(row.row.digest))
        if row.row.status != "live":
            continue
        if row.is_hidden:
            shown += [entry for _, entry in _hidden_entry(row, restore, dialect, views)]
        elif row.row.seq not in known and row.row.seq in duplicates:
            shown.append(duplicates[row.row.seq])
        elif index is not None:
            shown.append(known_entry(incoming.messages[index], row, restore, dialect, views))
    return shown


async def entries_of(
    connection: Connection,
    tenant: str,
    match: SessionMatch,
    incoming: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    seqs: Sequence[int],
) -> list[Entry]:
    """Return stored messages from before the tail: the client's bytes where it resent them, else the stored ones."""
    if match.session is None or not seqs:
        return []
    if match.is_delta or match.expanded_from:
        stored = await messages.content(connection, tenant, match.session.id, seqs)
        return stored_entries(stored, dialect)
    rows = await messages.rows_of(connection, tenant, match.session.id, seqs)
    duplicates = await stored_duplicates(connection, tenant, match, incoming, dialect, rows)
    return _find_resent(match, incoming, dialect, rows, restore, duplicates)


def known_entry(
    message: Message,
    row: TailRow,
    restore: Restore,
    dialect: Dialect,
    views: Mapping[int, ShownReply] = MappingProxyType({}),
) -> Entry:
    """Return the entry of a message that is stored. ``message`` is the client's echo of it.

    A reply with several rounds (its call is in ``views``) reached the client as one message. Then the model's last
    message is taken from the store, not from the echo.
    """
    memos, view = "", None
    if row.model_raw is not None and row.row.role == "user" and not row.is_hidden:
        memos = memos_in_message(row.model_raw, row.dialect)
    if row.model_raw is not None and not memos:
        if row.row.role == "assistant":
            view = views.get(row.row.call) or ShownReply(raw=message.raw, dialect=dialect.name)
        read = restore(NOT_ECHOED, row.model_raw, row.dialect) if row.row.call in views else NOT_ECHOED
        message = read if read.parts else restore(message, row.model_raw, row.dialect)
    entry = Entry(
        seq=row.row.seq,
        turn=row.row.turn,
        message=message,
        tokens=row.row.tokens,
        created_at=row.created_at,
        pinned=row.pinned,
        priority=row.priority,
        is_ours=row.is_hidden,
        client_view=view,
    )
    return with_memos_of(entry, memos)


def new_entry(message: Message, seq: int, turn: int, now: datetime) -> Entry:
    """Return the entry of a new message. Its tokens are estimated."""
    return Entry(seq=seq, turn=turn, message=message, tokens=tokens.estimate_message(message), created_at=now)


def new_entries(
    match: SessionMatch, incoming: IncomingHistory, now: datetime, counts: Sequence[int] | None = None
) -> list[Entry]:
    entries: list[Entry] = []
    for index, (message, placed) in enumerate(zip(incoming.messages, match.decision.placed, strict=True)):
        if placed.turn > 0 and placed.is_new:
            entry = new_entry(message, placed.seq, placed.turn, now)
            entries.append(entry if counts is None else replace(entry, tokens=counts[index]))
    return entries


def stored_entries(stored: Sequence[StoredMessage], dialect: Dialect, new: Sequence[Entry] = ()) -> list[Entry]:
    """Return stored messages as the model saw them, with the text of other dialects' messages, followed by ``new``."""
    read = [read_stored(each, dialect) for each in stored]
    placed = isolate([*read, *(StoredInDialect(message=entry.message) for entry in new)])
    entries: list[Entry] = []
    hidden = {each.call for each in stored if not each.client_visible}
    replies = (each for each in stored if each.client_visible and each.role == "assistant" and each.call in hidden)
    views = {each.call: _view_of(each) for each in replies}
    own_entries = (_stored_entry(each, own.message, views) for each, own in zip(stored, read, strict=True))
    foreign = [() if each.is_own else each.message.results for each in read]
    answered: tuple[str, ...] = ()
    for entry, shown, results in zip([*own_entries, *new], placed, [*foreign, *[()] * len(new)], strict=True):
        answered += tuple(result.call_id for result in results)
        entries += [entry if message is entry.message else _rewritten(entry, message) for message in shown]
        if answered and shown and not entry.is_ours:
            entries[-1] = replace(entries[-1], answered=answered)
            answered = ()
    if answered and entries:
        entries[-1] = replace(entries[-1], answered=(*entries[-1].answered, *answered))
    return entries


def _rewritten(entry: Entry, message: Message) -> Entry:
    """Return ``entry`` with the text of a message of another dialect, or a result that crosses. Memos stand in front of
    a user's text only.
    """
    memos = entry.prefix if message.role == "user" else ""
    bare = replace(entry, message=message, tokens=tokens.estimate_message(message), prefix="")
    return with_memos_of(bare, memos)


def _view_of(stored: StoredMessage) -> ShownReply:
    return ShownReply(raw=stored.raw if stored.client_visible else b"", dialect=stored.dialect)


def _stored_entry(stored: StoredMessage, message: Message, views: Mapping[int, ShownReply] | None = None) -> Entry:
    """Return the entry of a stored message with the content of ``message``. ``views``: the client's views of calls with
    several rounds.
    """
    view = None
    if stored.model_raw is not None and stored.role == "assistant":
        view = (views or {}).get(stored.call) or _view_of(stored)
    entry = Entry(
        seq=stored.seq,
        turn=stored.turn,
        message=message,
        tokens=stored.tokens,
        created_at=stored.created_at,
        pinned=stored.pinned,
        priority=stored.priority,
        is_ours=not stored.client_visible,
        client_view=view,
    )
    if stored.model_raw is None or stored.role != "user" or not stored.client_visible:
        return entry
    return with_memos_of(entry, memos_in_message(stored.model_raw, stored.dialect))
