"""Export and import sessions, in the formats of the reference's ``context.json`` and ``context.terse.json``.

``{"context": [...], "terse": [...]}``. A context element is the message in wire form with tags in front: ``{"turnId":
"t7", "ts": "2024-01-15T10:30:00+00:00", ...}``. The message's own bytes follow, so that an export that was not
rewritten is imported verbatim. Instructions have ``"turnId": null``. Replies are in the model's view, terse tags
included; ``"literal": true`` marks one whose tags were never stripped. A terse element is ``{"ts", "turnId", "role",
"summary", "source"}``.

An export contains the live messages of the client's history: none that were superseded, dropped, undone or removed, and
no calls to Tersely's own tools. All other data of the session is beside them (`tersely.service.sessions.snapshots`).
With it an import is the same session; without it (older exports, other programs' files) one with the same history.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tersely.dialects.detection import detect_dialect
from tersely.dialects.dialect import Dialect
from tersely.dialects.registry import DIALECTS, dialect_named
from tersely.dialects.wire import raw_json
from tersely.domain.errors import Conflict, InvalidRequest, NotFound
from tersely.domain.history.history import TerseEntry
from tersely.domain.history.sessions import Session, check_session_id
from tersely.domain.history.turns import read_turn_id, write_turn_id
from tersely.domain.messages import Message
from tersely.domain.text.tags import TagKinds
from tersely.domain.text.terse import OPEN
from tersely.domain.times import to_stored_time
from tersely.service.common import tokens
from tersely.service.recognition.incoming_history import digest
from tersely.service.sessions import snapshots, turn_log
from tersely.service.sessions.messages import Messages, dialect_of, read_messages, split_appended_reply
from tersely.service.sessions.sessions import SessionChange, Sessions
from tersely.store.commit import imports
from tersely.store.commit.imports import ImportedEntry, ImportedMessage, ImportedSession
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.history.artifacts import spilled
from tersely.store.history.messages import StoredMessage
from tersely.store.history.packed_log import LogCursor

BATCH = 500
MAX_MESSAGES = 200_000
MAX_SUMMARY = 4_000
MAX_TURN = 2**31 - 1
IMPORT_LIMIT = 60.0
# Seconds: a page of the log may be made of as many replies.
LOG_LIMIT = 10.0
TERSE = TagKinds(terse=True)
_OWN_MEMBERS = re.compile(
    rb'\{"turnId":(?:"t([1-9][0-9]{0,9})"|null),"ts":"([^"\\]{1,64})"(,"literal":true)?(,|(?=\}))'
)
_MILLISECONDS = 1e11


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionImport:
    """An import: context elements in wire form, terse elements as JSON values, and the session's configuration.

    ``dialect`` None: detected from the messages. ``snapshot`` is the additional data of Tersely's own exports;
    ``configuration`` takes precedence over its settings.
    """

    id: str | None
    parent: str | None
    dialect: str | None
    context: Sequence[bytes]
    terse: Sequence[dict[str, Any]]
    configuration: SessionChange
    snapshot: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ImportedElement:
    raw: bytes
    turn: int | None
    at: datetime | None
    is_literal: bool


class Exports:
    """Exporting and importing, within a tenant."""

    def __init__(
        self,
        database: Database,
        messages: Messages,
        verbs: Sessions,
        *,
        clock: Callable[[], datetime],
        new_id: Callable[[], str],
    ) -> None:
        self._database = database
        self._messages = messages
        self._sessions = verbs
        self._clock = clock
        self._new_id = new_id

    async def export(self, tenant: str, session_id: str) -> AsyncIterator[bytes]:
        """Yield the document in pieces; memory holds one piece. Raises `NotFound` before the first."""
        found, after = await self._messages.page(tenant, session_id, view="client", after=0, limit=BATCH)
        yield b'{"context":['
        is_first = True
        while found:
            yield (b"" if is_first else b",") + b",".join(_write(message) for message in found)
            is_first = False
            if after is None:
                break
            found, after = await self._messages.page(tenant, session_id, view="client", after=after, limit=BATCH)
        yield b'],"terse":['
        cursor: LogCursor | None = (0, 0, 0)
        is_first = True
        while cursor is not None:
            entries, cursor = await self.log(tenant, session_id, after=cursor, limit=BATCH)
            if entries:
                written = b",".join(raw_json.dump(write_entry(entry)) for entry in entries)
                yield (b"" if is_first else b",") + written
                is_first = False
        yield b'],"tersely":'
        async for piece in snapshots.write_snapshot(self._database, tenant, session_id):
            yield piece
        yield b"}"

    async def log(
        self, tenant: str, session_id: str, *, after: LogCursor, limit: int
    ) -> tuple[list[TerseEntry], LogCursor | None]:
        """Return the terse log after that cursor, and the next cursor. Raises `NotFound`."""
        async with self._database.reading(tenant, limit=LOG_LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            return await turn_log.page(
                connection,
                tenant,
                session_id,
                after=after,
                limit=limit,
                derives=self._sessions.keeps_log(session),
            )

    async def import_session(self, tenant: str, given: SessionImport) -> Session:
        """Return a new session from a document.

        Raises `InvalidRequest` naming the element, `Conflict` for a taken id.
        """
        session_id = self._new_id() if given.id is None else check_session_id(given.id, "id")
        named = None if given.dialect is None else dialect_of(given.dialect)
        if len(given.context) > MAX_MESSAGES:
            raise InvalidRequest(f"at most {MAX_MESSAGES} messages, not {len(given.context)}", field="context")
        if given.snapshot is not None:
            return await self._take_copy(tenant, session_id, given, given.snapshot)
        configuration = self._sessions.configure(given.configuration)
        now = self._clock()
        dialect, elements, read = await asyncio.to_thread(_read_context, given.context, named)
        counts = await tokens.count_messages(read, "")
        messages = await asyncio.to_thread(_place, elements, read, counts, dialect, now)
        session = ImportedSession(
            id=session_id,
            parent=given.parent,
            configuration=configuration,
            messages=messages,
            terse=await asyncio.to_thread(_read_entries, given.terse, messages, now),
        )
        async with self._database.transaction(tenant, limit=IMPORT_LIMIT) as connection:
            if given.parent is not None and await sessions.get(connection, tenant, given.parent) is None:
                raise InvalidRequest("parent: there is no such session", field="parent")
            if not await imports.write_import(connection, tenant, session, now):
                raise Conflict("that session id is taken", field="id")
            made = await sessions.get(connection, tenant, session_id)
        if made is None:
            raise NotFound("there is no such session")
        return made

    async def _take_copy(self, tenant: str, session_id: str, given: SessionImport, written: dict[str, Any]) -> Session:
        elements = await asyncio.to_thread(
            lambda: [_read_element(raw, index) for index, raw in enumerate(given.context)]
        )
        raws, turns = [each.raw for each in elements], [each.turn for each in elements]
        snapshot = await asyncio.to_thread(snapshots.read_snapshot, written, raws, turns)
        configuration = self._sessions.configure(_over(snapshot.change, given.configuration))
        self._sessions.check_settings(*snapshot.last_call)
        async with self._database.transaction(tenant, limit=IMPORT_LIMIT) as connection:
            parent = given.parent or snapshot.parent
            if parent is not None and await sessions.get(connection, tenant, parent) is None:
                if given.parent is not None:
                    raise InvalidRequest("parent: there is no such session", field="parent")
                parent = None
            if not await sessions.add(connection, tenant, session_id, parent, configuration, self._clock()):
                raise Conflict("that session id is taken", field="id")
            await snapshots.store_snapshot(connection, tenant, session_id, snapshot)
            made = await sessions.get(connection, tenant, session_id)
        assert made is not None
        return made


def _over(own: SessionChange, given: SessionChange) -> SessionChange:
    """Return ``given``, with values of ``own`` for missing ones."""
    return SessionChange(
        strategy=own.strategy if given.strategy is None else given.strategy,
        epoch=own.epoch if given.epoch is None else given.epoch,
        metadata=own.metadata if given.metadata is None else given.metadata,
    )


def write_entry(entry: TerseEntry) -> dict[str, str]:
    """Return a terse entry as JSON members."""
    return {
        "ts": _write_time(entry.created_at),
        "turnId": write_turn_id(entry.turn),
        "role": entry.role,
        "summary": entry.text,
        "source": entry.source,
    }


def _write_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def _write(stored: StoredMessage) -> bytes:
    raw = _words(stored)
    turn = f'"{write_turn_id(stored.turn)}"' if stored.turn else "null"
    mark = ',"literal":true' if raw is stored.raw and _has_tags(stored) else ""
    tags = f'{{"turnId":{turn},"ts":"{_write_time(stored.created_at)}"{mark}'.encode()
    members = raw.lstrip()[1:]
    return tags + (b"" if members.lstrip().startswith(b"}") else b",") + members


def _words(stored: StoredMessage) -> bytes:
    """Return the model's view of a reply if only tags separate it from the client's view, else the client's view."""
    if stored.model_raw is None or stored.role != "assistant":
        return stored.raw
    if dialect_named(stored.dialect).read_reply(stored.raw).is_malformed:
        return stored.model_raw
    shown = split_appended_reply(stored.model_raw, dialect_of(stored.dialect), TERSE).client_message
    return stored.model_raw if shown == stored.raw else stored.raw


def _has_tags(stored: StoredMessage) -> bool:
    # A quick look first; escapes may hide the bracket, but not the word.
    if stored.role != "assistant" or b"terse" not in stored.raw:
        return False
    return OPEN in dialect_named(stored.dialect).read_reply(stored.raw).text


def _read_element(raw: bytes, index: int) -> _ImportedElement:
    own = _OWN_MEMBERS.match(raw)
    if own is not None:
        return _ImportedElement(
            raw=b"{" + raw[own.end() :],
            turn=int(own[1]) if own[1] else None,
            at=_read_time(own[2].decode(), f"context[{index}].ts"),
            is_literal=own[3] is not None,
        )
    try:
        members = raw_json.split_object(raw)
    except ValueError as error:
        raise InvalidRequest("a message must be an object", field=f"context[{index}]") from error
    tags = {name: raw_json.load(members.pop(name)) for name in ("turnId", "ts", "literal") if name in members}
    return _ImportedElement(
        raw=raw_json.join_object(members) if tags else raw,
        turn=_read_turn(tags.get("turnId"), f"context[{index}].turnId"),
        at=_read_time(tags.get("ts"), f"context[{index}].ts"),
        is_literal=tags.get("literal") is True,
    )


def _read_turn(value: object, field: str) -> int | None:
    if value is None:
        return None
    turn = read_turn_id(value, field=field) if isinstance(value, str) else 0
    if not 1 <= turn <= MAX_TURN:
        raise InvalidRequest(f"{field} must be a turn id such as 't5'", field=field)
    return turn


def _read_time(value: object, field: str) -> datetime | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return to_stored_time(datetime.fromisoformat(value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return to_stored_time(datetime.fromtimestamp(value / 1000 if value > _MILLISECONDS else value, UTC))
    except (ValueError, OverflowError, OSError):
        pass
    raise InvalidRequest(f"{field} must be a time in ISO 8601 or since 1970", field=field)


def _read_context(
    raws: Sequence[bytes], named: Dialect | None
) -> tuple[Dialect, list[_ImportedElement], list[Message]]:
    """Return the dialect, the elements without their tags, and the messages that they are."""
    elements = [_read_element(raw, index) for index, raw in enumerate(raws)]
    dialect = named or DIALECTS[detect_dialect([each.raw for each in elements], field="context")]
    found: list[Message] = []
    for index, each in enumerate(elements):
        try:
            found += read_messages([each.raw], dialect)
        except InvalidRequest as error:
            raise InvalidRequest(error.detail, field=f"context[{index}]") from error
    return dialect, elements, found


def _place(
    elements: Sequence[_ImportedElement],
    read: Sequence[Message],
    counts: Sequence[int],
    dialect: Dialect,
    now: datetime,
) -> list[ImportedMessage]:
    """Messages with their turns: as given, else by the rule for new ones."""
    found: list[ImportedMessage] = []
    turn = last = 0
    for each, message, count in zip(elements, read, counts, strict=True):
        if not message.is_instruction:
            if each.turn is not None:
                turn = each.turn
            elif message.starts_turn or turn == 0:
                turn = last + 1
            last = max(last, turn)
        shown = message.raw
        if message.role == "assistant" and not each.is_literal and OPEN in message.text:
            shown = split_appended_reply(message.raw, dialect, TERSE).client_message
        client = message if shown == message.raw else dialect.read_message(shown)
        found.append(
            ImportedMessage(
                turn=0 if message.is_instruction else turn,
                tokens=count,
                role=message.role,
                dialect=dialect.name,
                digest=digest(client)[0],
                created_at=each.at or now,
                raw=shown,
                model_raw=None if shown == message.raw else message.raw,
                artifacts=spilled([client], 0),
            )
        )
    return found


def _read_entries(
    given: Sequence[dict[str, Any]], messages: Sequence[ImportedMessage], now: datetime
) -> list[ImportedEntry]:
    return _attach([_read_entry(item, index, now) for index, item in enumerate(given)], messages)


def _read_entry(item: dict[str, Any], index: int, now: datetime) -> TerseEntry:
    field = f"terse[{index}]"
    turn = _read_turn(item.get("turnId"), f"{field}.turnId")
    summary = item.get("summary")
    if turn is None:
        raise InvalidRequest(f"{field}.turnId is missing", field=f"{field}.turnId")
    if not isinstance(summary, str) or not summary.strip() or len(summary) > MAX_SUMMARY:
        raise InvalidRequest(f"{field}.summary must be 1 to {MAX_SUMMARY} characters", field=f"{field}.summary")
    role = item.get("role", "assistant")
    if role not in ("assistant", "user"):
        raise InvalidRequest(f"{field}.role must be assistant or user", field=f"{field}.role")
    return TerseEntry(
        turn=turn,
        seq=0,
        role=role,
        text=" ".join(summary.split()),
        source="derived" if item.get("source") == "derived" else "model",
        created_at=_read_time(item.get("ts"), f"{field}.ts") or now,
    )


def _attach(entries: Sequence[TerseEntry], messages: Sequence[ImportedMessage]) -> list[ImportedEntry]:
    """Attach entries to the message of their turn with the same time, or else to the turn's last reply or message."""
    by_time: dict[tuple[int, datetime], int] = {}
    last: dict[int, int] = {}
    last_reply: dict[int, int] = {}
    for seq, message in enumerate(messages, 1):
        last[message.turn] = seq
        if message.role == "assistant":
            last_reply[message.turn] = seq
            by_time[message.turn, message.created_at] = seq
    found: list[ImportedEntry] = []
    for index, entry in enumerate(entries):
        if entry.turn not in last:
            field = f"terse[{index}].turnId"
            raise InvalidRequest(f"{field}: no message of the context is of that turn", field=field)
        at = by_time.get((entry.turn, entry.created_at))
        found.append(
            ImportedEntry(
                turn=entry.turn,
                seq=at or last_reply.get(entry.turn) or last[entry.turn],
                number=index,
                role=entry.role,
                source=entry.source,
                created_at=entry.created_at,
                text=entry.text,
            )
        )
    return found
