"""Entries of a history: from the messages of a request, and from stored messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import MappingProxyType

from tersely.dialects.dialect import Dialect
from tersely.domain.history.history import (
    ClientView,
    Entry,
)
from tersely.domain.history.isolation import StoredInDialect, isolate
from tersely.domain.messages import (
    Message,
)
from tersely.service.common import tokens
from tersely.service.context.hidden_messages import live_hidden
from tersely.service.context.history import epoch_of_history
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

# (the client's echo of a reply, the reply as the model said it, the dialect of that) -> the echo with the model's own
# words.
Restore = Callable[[Message, bytes, str], Message]


# (place, entry)
_Placed = tuple[float, Entry]


def resent_entries(
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    kept_rows: Sequence[TailRow],
    twins: Mapping[int, Entry],
    cut: int,
    now: datetime,
) -> tuple[list[Entry], list[Entry]]:
    """Entries of a history that the client resent whole: its own bytes, with the model's words put back, and at their
    places the messages that it knows nothing of.
    """
    rows = {row.row.seq: row for row in found.rows}
    views = _views_of_rounds(found, arrival, dialect, found.hidden)
    epoch = epoch_of_history(found)
    kept_seqs = set(epoch.kept) if epoch else set()
    entries: list[_Placed] = []
    kept: list[_Placed] = []
    for message, incoming, placed in zip(arrival.messages, arrival.incoming, found.decision.placed, strict=True):
        if not incoming.is_link or placed.seq == 0 or placed.status != "live":
            continue
        if not (message.raw or message.parts):
            continue  # said in another dialect, without words
        row = rows.get(placed.seq)
        if placed.is_new or row is None:
            entries.append((placed.position, new_entry(message, placed.seq, placed.turn, now)))
        elif placed.seq >= cut:
            entries.append((placed.position, known_entry(message, row, restore, dialect, views)))
        elif placed.seq in kept_seqs:
            kept.append((placed.position, known_entry(message, row, restore, dialect, views)))
    for row in live_hidden(found):
        if row.row.seq >= cut:
            entries += _hidden_entry(row, restore, dialect, views)
        elif row.row.seq in kept_seqs:
            kept += _hidden_entry(row, restore, dialect, views)
    return _in_order(entries), _in_order(kept) + _find_resent(found, arrival, dialect, kept_rows, restore, twins)


def _hidden_entry(row: TailRow, restore: Restore, dialect: Dialect, views: Mapping[int, ClientView]) -> list[_Placed]:
    """A hidden message at its place; nothing where it was said in a dialect that does not share its messages."""
    entry = known_entry(NOT_ECHOED, row, restore, dialect, views)
    return [(row.row.position, entry)] if entry.message.parts else []


def _views_of_rounds(
    found: SessionMatch, arrival: IncomingHistory, dialect: Dialect, hidden: Sequence[TailRow]
) -> dict[int, ClientView]:
    """Call -> what the client was shown of it, for the calls that ``hidden`` messages belong to."""
    if not hidden:
        return {}
    calls = {row.row.call for row in hidden}
    views = dict.fromkeys(calls, ClientView(raw=b"", dialect=dialect.name))
    replies = {row.row.seq: row.row.call for row in found.rows if row.row.role == "assistant"}
    for message, placed in zip(arrival.messages, found.decision.placed, strict=True):
        if replies.get(placed.seq) in calls:
            views[replies[placed.seq]] = ClientView(raw=message.raw, dialect=dialect.name)
    return views


def _in_order(entries: list[_Placed]) -> list[Entry]:
    return [entry for _, entry in sorted(entries, key=lambda placed: (placed[0], placed[1].seq))]


async def stored_duplicates(
    connection: Connection,
    tenant: str,
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
) -> dict[int, Entry]:
    """Those of ``rows``, as they were stored, of which the request shows several that say the same before the rows at
    hand: which is which cannot be told there, and the ids in them must not come twice.
    """
    if found.session is None or not rows:
        return {}
    placed = found.decision.placed
    shown = Counter(arrival.incoming[index].digest for index in arrival.links if placed[index].seq == 0)
    seqs = [row.row.seq for row in rows if shown[row.row.digest] > 1]
    stored = await messages.content(connection, tenant, found.session.id, seqs) if seqs else []
    messages_there = ((each, stored_message(each, dialect)) for each in stored)
    return {each.seq: _stored_entry(each, message) for each, message in messages_there if message is not None}


def _find_resent(
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    rows: Sequence[TailRow],
    restore: Restore,
    twins: Mapping[int, Entry],
) -> list[Entry]:
    """Stored messages as the request shows them, in order; what it does not show is left out."""
    placed = found.decision.placed
    known = {placed[index].seq: index for index in arrival.links if placed[index].seq > 0}
    before = {arrival.incoming[index].digest: index for index in arrival.links if placed[index].seq == 0}
    views = _views_of_rounds(found, arrival, dialect, [row for row in (*found.hidden, *rows) if row.is_hidden])
    shown: list[Entry] = []
    for row in sorted(rows, key=lambda each: each.row.position):
        index = None if row.is_hidden else known.get(row.row.seq, before.get(row.row.digest))
        if row.row.status != "live":
            continue
        if row.is_hidden:
            shown += [entry for _, entry in _hidden_entry(row, restore, dialect, views)]
        elif row.row.seq not in known and row.row.seq in twins:
            shown.append(twins[row.row.seq])
        elif index is not None:
            shown.append(known_entry(arrival.messages[index], row, restore, dialect, views))
    return shown


async def entries_of(
    connection: Connection,
    tenant: str,
    found: SessionMatch,
    arrival: IncomingHistory,
    dialect: Dialect,
    restore: Restore,
    seqs: Sequence[int],
) -> list[Entry]:
    """Stored messages from before the tail: the client's own bytes where it resent them, else as they were stored."""
    if found.session is None or not seqs:
        return []
    if found.is_delta or found.start:
        stored = await messages.content(connection, tenant, found.session.id, seqs)
        return stored_entries(stored, dialect)
    rows = await messages.rows_of(connection, tenant, found.session.id, seqs)
    duplicates = await stored_duplicates(connection, tenant, found, arrival, dialect, rows)
    return _find_resent(found, arrival, dialect, rows, restore, duplicates)


def known_entry(
    message: Message,
    row: TailRow,
    restore: Restore,
    dialect: Dialect,
    views: Mapping[int, ClientView] = MappingProxyType({}),
) -> Entry:
    """``message`` is the client's echo. A reply that was said in rounds (calls of ``views``) was told to it as one:
    then nothing of the echo is what the model said last.
    """
    memos, view = "", None
    if row.model_raw is not None and row.row.role == "user" and not row.is_hidden:
        memos = memos_in_message(row.model_raw, row.dialect)
    if row.model_raw is not None and not memos:
        if row.row.role == "assistant":
            view = views.get(row.row.call) or ClientView(raw=message.raw, dialect=dialect.name)
        said = restore(NOT_ECHOED, row.model_raw, row.dialect) if row.row.call in views else NOT_ECHOED
        message = said if said.parts else restore(message, row.model_raw, row.dialect)
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
    """The entry of a message that has just arrived; its tokens are estimated."""
    return Entry(seq=seq, turn=turn, message=message, tokens=tokens.estimate_message(message), created_at=now)


def new_entries(
    found: SessionMatch, arrival: IncomingHistory, now: datetime, counts: Sequence[int] | None = None
) -> list[Entry]:
    entries: list[Entry] = []
    for index, (message, placed) in enumerate(zip(arrival.messages, found.decision.placed, strict=True)):
        if placed.turn > 0 and placed.is_new:
            entry = new_entry(message, placed.seq, placed.turn, now)
            entries.append(entry if counts is None else replace(entry, tokens=counts[index]))
    return entries


def stored_entries(stored: Sequence[StoredMessage], dialect: Dialect, new: Sequence[Entry] = ()) -> list[Entry]:
    """Stored messages as the model saw them, with what crosses of other dialects, and the ``new`` ones behind them."""
    said = [read_stored(each, dialect) for each in stored]
    placed = isolate([*said, *(StoredInDialect(message=entry.message) for entry in new)])
    entries: list[Entry] = []
    hidden = {each.call for each in stored if not each.client_visible}
    replies = (each for each in stored if each.client_visible and each.role == "assistant" and each.call in hidden)
    views = {each.call: _view_of(each) for each in replies}
    theirs = (_stored_entry(each, own.message, views) for each, own in zip(stored, said, strict=True))
    for entry, shown in zip([*theirs, *new], placed, strict=True):
        for message in shown:
            same = message is entry.message
            count = entry.tokens if same else tokens.estimate_message(message)
            entries.append(entry if same else replace(entry, message=message, tokens=count))
    return entries


def _view_of(stored: StoredMessage) -> ClientView:
    return ClientView(raw=stored.raw if stored.client_visible else b"", dialect=stored.dialect)


def _stored_entry(stored: StoredMessage, message: Message, views: Mapping[int, ClientView] | None = None) -> Entry:
    """The stored message as ``message`` says it. ``views``: what the client was shown of calls in several rounds."""
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
