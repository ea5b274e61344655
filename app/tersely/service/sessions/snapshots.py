"""The data of a session in an export besides history and log, so that an import is the same session.

``"tersely"``: ``{"version": 1, "session": {...}, "messages": [...], "terse": [...], "states": [...], ...}``. Rows are
those of the store (`tersely.store.commit.transfer`). Messages of the client's history are in ``context`` and have no
``raw`` here. All others have it: messages that the client took back or left behind, and messages that it never knew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.history.history import Epoch, Status
from tersely.domain.messages import Role
from tersely.domain.text.tags import TagKinds
from tersely.service.sessions.messages import dialect_of, split_appended_reply
from tersely.service.sessions.sessions import SessionChange
from tersely.store.commit import transfer
from tersely.store.commit.transfer import BESIDE, TableRow
from tersely.store.db.connection import Connection, Database
from tersely.store.history import sessions
from tersely.store.history.artifacts import Artifact, spilled
from tersely.strategies.reduction.repeats import MAX_REPLACED, are_checksums

VERSION = 1
BATCH = 500
MAX_ROWS = 200_000
FIELD = "tersely"
TERSE = TagKinds(terse=True)
_STATUSES, _ROLES = frozenset(get_args(Status)), frozenset(get_args(Role))
_OWN = ("parent", "strategy", "epoch", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session as it is to be stored again. ``change`` and ``parent`` are its own settings, ``last_call`` the strategy
    and the epoch policy that its last call's headers asked for.
    """

    change: SessionChange
    parent: str | None
    last_call: tuple[str | None, str | None]
    counted: tuple[object, ...]
    stored: Sequence[TableRow]
    tables: Mapping[str, Sequence[TableRow]]
    outputs: Mapping[int, Sequence[Artifact]]


async def write_snapshot(database: Database, tenant: str, session_id: str) -> AsyncIterator[bytes]:
    """Yield the value of ``tersely``, in pieces."""
    async with database.reading(tenant) as connection:
        session = await sessions.get(connection, tenant, session_id)
        counters = await transfer.counters(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    own = {"parent": session.parent, "strategy": session.strategy, "epoch": session.epoch_policy, **counters}
    about = raw_json.join_object({"metadata": session.metadata, **_members(own)})
    yield b'{"version":%d,"session":%b' % (VERSION, about)
    yield b',"messages":['
    after, comma = 0, b""
    while True:
        async with database.reading(tenant) as connection:
            rows = await transfer.messages(connection, tenant, session_id, after, BATCH)
        if not rows:
            break
        yield comma + b",".join(raw_json.dump(_without_nothing(row)) for row in rows)
        after, comma = rows[-1]["seq"], b","
    yield b"]"
    for table in BESIDE:
        yield b',"%b":[' % table.encode()
        cursor: list[object] = []
        comma = b""
        while True:
            async with database.reading(tenant) as connection:
                rows, cursor = await transfer.table_page(connection, tenant, session_id, table, cursor, BATCH)
            if rows:
                yield comma + b",".join(raw_json.dump(_without_nothing(row)) for row in rows)
                comma = b","
            if not cursor:
                break
        yield b"]"
    yield b"}"


def _members(values: Mapping[str, object]) -> dict[str, bytes]:
    return {name: raw_json.dump(value) for name, value in values.items()}


def _without_nothing(row: TableRow) -> TableRow:
    return {name: value for name, value in row.items() if value is not None}


def read_snapshot(given: dict[str, Any], context: Sequence[bytes], turns: Sequence[int | None]) -> SessionSnapshot:
    """Return the session that is described by ``given`` and the elements of ``context`` (without tags, with their
    turns).

    Raises `InvalidRequest` with the error.
    """
    if given.get("version") != VERSION:
        raise InvalidRequest(f"{FIELD}.version must be {VERSION}", field=f"{FIELD}.version")
    unknown = next((name for name in given if name not in {"version", "session", "messages", *BESIDE}), None)
    if unknown is not None:
        raise InvalidRequest(f"there is no {FIELD}.{unknown[:60]}", field=f"{FIELD}.{unknown[:60]}")
    stored = sorted(_rows(given, "messages"), key=lambda row: row["seq"])
    if [row["seq"] for row in stored] != list(range(1, len(stored) + 1)):
        raise InvalidRequest(f"{FIELD}.messages must be numbered from 1 on, without gaps", field=f"{FIELD}.messages")
    for row in stored:
        _check(row)
    _fill(stored, context, turns)
    outputs = {row["seq"]: found for row in stored if (found := _read_content(row))}
    tables = {table: _rows(given, table) for table in BESIDE}
    for index, row in enumerate(tables["epochs"]):
        _read_plan(row["plan"], f"{FIELD}.epochs[{index}].plan", len(stored))
    for index, row in enumerate(tables["events"]):
        _check_json(row["body"], f"{FIELD}.events[{index}].body")
    about = given.get("session")
    if not isinstance(about, dict):
        raise InvalidRequest(f"{FIELD}.session is missing", field=f"{FIELD}.session")
    own = {name: about.get(name) for name in _OWN}
    counters = transfer.read_row(
        {name: value for name, value in about.items() if name not in _OWN}, "session", f"{FIELD}.session"
    )
    plan = None
    if counters["plan"] is not None:
        plan = _read_plan(counters["plan"], f"{FIELD}.session.plan", len(stored))
    parent = own["parent"]
    return SessionSnapshot(
        change=SessionChange(
            strategy=_text(own["strategy"], "strategy"),
            epoch=_text(own["epoch"], "epoch"),
            metadata=own["metadata"] if isinstance(own["metadata"], dict) else None,
        ),
        parent=parent if isinstance(parent, str) else None,
        last_call=(counters["last_strategy"], counters["last_epoch_policy"]),
        counted=(
            len(stored),
            max((row["turn"] for row in stored), default=0),
            sum(row["tokens"] for row in stored),
            counters["edits"],
            counters["edited"],
            counters["calls"],
            plan.number if plan else 0,
            plan.cut if plan else 1,
            counters["plan"],
            counters["last_call_at"],
            counters["last_strategy"],
            counters["last_epoch_policy"],
        ),
        stored=stored,
        tables=tables,
        outputs=outputs,
    )


async def store_snapshot(connection: Connection, tenant: str, session_id: str, snapshot: SessionSnapshot) -> None:
    """Fill the session that was created for it."""
    await transfer.restore(
        connection,
        tenant,
        session_id,
        counted=snapshot.counted,
        stored=snapshot.stored,
        beside=snapshot.tables,
        outputs=snapshot.outputs,
    )


def _rows(given: dict[str, Any], table: str) -> list[TableRow]:
    rows, field = given.get(table, []), f"{FIELD}.{table}"
    if not isinstance(rows, list) or len(rows) > MAX_ROWS:
        raise InvalidRequest(f"{field} must be a list of at most {MAX_ROWS:,}", field=field)
    return [transfer.read_row(row, table, f"{field}[{index}]") for index, row in enumerate(rows)]


def _check(row: TableRow) -> None:
    field = f"{FIELD}.messages[{row['seq'] - 1}]"
    for name, known in (("status", _STATUSES), ("role", _ROLES), ("dialect", DIALECTS)):
        if row[name] not in known:
            raise InvalidRequest(f"{field}.{name} must be one of {', '.join(known)}", field=f"{field}.{name}")
    if len(row["digest"] or b"") > 64:
        raise InvalidRequest(f"{field}.digest is too long", field=f"{field}.digest")


def _fill(stored: Sequence[TableRow], context: Sequence[bytes], turns: Sequence[int | None]) -> None:
    """Put the elements of ``context`` where they belong."""
    shown = sorted((row for row in stored if is_shown(row)), key=lambda row: (row["place"], row["seq"]))
    if len(shown) != len(context) or any((row["turn"] or None) != turn for row, turn in zip(shown, turns, strict=True)):
        raise InvalidRequest(
            f"{FIELD} does not match context: context was changed, or the session was written to during the "
            "export. "
            f"Without {FIELD}, the history alone is imported.",
            field=FIELD,
        )
    for row, raw in zip(shown, context, strict=True):
        row["raw"] = raw
        model = row["model_raw"]
        if model is not None and _is_same(raw, model):
            row["raw"] = split_appended_reply(model, dialect_of(row["dialect"]), TERSE).client_message
    for row in stored:
        if row["raw"] is None:
            field = f"{FIELD}.messages[{row['seq'] - 1}].raw"
            raise InvalidRequest(f"{field} is missing", field=field)


def is_shown(row: TableRow) -> bool:
    """Return whether a message stands in ``context``."""
    is_live = row["status"] == "live" or (row["status"] == "dropped" and not row["model_visible"])
    return bool(is_live and row["client_visible"])


def _is_same(one: bytes, other: bytes) -> bool:
    """Return whether two texts are the same JSON. Invalid JSON is reported later."""
    try:
        return one == other or raw_json.load(one) == raw_json.load(other)
    except ValueError:
        return False


def _read_content(row: TableRow) -> list[Artifact]:
    """Return the oversized outputs in a message. Raises `InvalidRequest` for an unreadable one."""
    if not row["raw"] and row["status"] == "removed":
        return []
    dialect = DIALECTS[row["dialect"]]
    field = f"{FIELD}.messages[{row['seq'] - 1}].raw"
    is_reply = row["role"] == "assistant"
    forms = [raw for raw in (row["raw"], row["model_raw"]) if raw]
    if not forms:
        raise InvalidRequest(f"{field} is missing", field=field)
    try:
        for raw in forms:
            raw_json.load(raw)
        read = [dialect.read_reply(raw) if is_reply else dialect.read_message(raw) for raw in forms]
        outputs = list(spilled(read[:1], 0))
        if is_reply and row["status"] == "superseded":
            return outputs  # Replies of any shape are stored so. No context holds them.
        if read[-1].is_malformed:  # The client may have any form; the last form is for models and must be valid.
            read[-1] = dialect.read_message(forms[-1])
    except (InvalidRequest, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"{field} is not a message of {row['dialect']}", field=field) from error
    if any(message.role != row["role"] for message in (read[-1:] if is_reply else read)):
        raise InvalidRequest(f"{field} is not a message of the role {row['role']}", field=field)
    return outputs


def _read_plan(plan: bytes, field: str, last_seq: int) -> Epoch:
    try:
        epoch = sessions.read_epoch(plan)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InvalidRequest(f"{field} is not an epoch", field=field) from error
    if epoch.number < 1 or not 1 <= epoch.cut <= last_seq + 1 or not all(1 <= seq <= last_seq for seq in epoch.kept):
        raise InvalidRequest(f"{field} is an epoch over other messages", field=field)
    if epoch.repeats is not None and not are_checksums(epoch.repeats.replaced):
        raise InvalidRequest(
            f"repeats.replaced in {field} must be checksums of 4 bytes each, at most {MAX_REPLACED:,}", field=field
        )
    return epoch


def _check_json(body: bytes, field: str) -> None:
    try:
        raw_json.split_object(body)
    except ValueError as error:
        raise InvalidRequest(f"{field} is not a JSON object", field=field) from error


def _text(value: object, name: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{FIELD}.session.{name} must be a text", field=f"{FIELD}.session.{name}")
    return value
