"""Sessions: find the one that a request belongs to, and the statements of the REST verbs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from typing import Any

import msgspec
from asyncpg import Record

from tersely.domain.history.history import Epoch
from tersely.domain.history.sessions import Session
from tersely.store.db.connection import Connection
from tersely.store.history.messages import TailRow

COLUMNS = (
    "id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens, version, edits, calls, "
    "edited, epoch, cut, plan, last_call_at, last_strategy, last_epoch_policy, created_at, updated_at"
)
_S = ", ".join(f"s.{name}" for name in COLUMNS.split(", "))

_epoch_decoder = msgspec.json.Decoder(Epoch)
_encoder = msgspec.json.Encoder()


def write_epoch(epoch: Epoch) -> bytes:
    """Encode an epoch as it is stored."""
    try:
        return _encoder.encode(epoch)
    except UnicodeEncodeError:  # a lone surrogate of a message's text: msgspec neither writes nor reads it
        return json.dumps(msgspec.to_builtins(epoch), separators=(",", ":")).encode()


def read_epoch(plan: bytes) -> Epoch:
    """Return the inverse of `write_epoch`. Raises `msgspec.DecodeError`."""
    try:
        return _epoch_decoder.decode(plan)
    except (msgspec.DecodeError, RecursionError):
        return _read_with_surrogates(plan)


def _read_with_surrogates(plan: bytes) -> Epoch:
    try:
        return msgspec.convert(json.loads(plan), Epoch)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError("not the plan of an epoch") from error


def session_from(row: Record | Mapping[str, Any]) -> Session:
    """Return a row with `COLUMNS` as a value."""
    return Session(
        id=row["id"],
        parent=row["parent"],
        client_id=row["client_id"],
        strategy=row["strategy"],
        epoch_policy=row["epoch_policy"],
        metadata=row["metadata"],
        last_seq=row["last_seq"],
        turns=row["turns"],
        tokens=row["tokens"],
        version=row["version"],
        edits=row["edits"],
        edited=row["edited"],
        calls=row["calls"],
        epoch=row["epoch"],
        cut=row["cut"],
        plan=None if row["plan"] is None else read_epoch(row["plan"]),
        last_call_at=row["last_call_at"],
        last_strategy=row["last_strategy"],
        last_epoch_policy=row["last_epoch_policy"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


class ReplyMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A relayed reply of a stored session that a request's history contains.

    ``tail``: the session's current rows from its cut on, where they were read along.
    """

    session: Session
    seq: int
    chain: bytes
    is_current: bool
    tail: list[TailRow] | None = None


GET = f"SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND id = $2"

# Conversations may begin with the same words and replies, any number of them. So many of those that got to a reply last
# are compared; the client's own sessions are looked through besides, so many messages at either end.
TWINS = 128
FIRST, LAST = 64, 256


def best_match(chain: str, columns: str) -> str:
    """Return the query for the session that a history with the reply ``chain`` continues. Parameters: $1 the tenant, $3
    the client's id. Its columns: ``columns`` of the session, which contain those of the order, and the ``hit_*`` ones.

    The client's own session is preferred, then one that ends with the reply, then the newest. A conversation with
    another client id is another conversation, whatever its content. Each part runs only if those before it find
    nothing. OFFSET 0 keeps the order of the joins: for a table that was never analysed the planner would read
    everything of the tenant.
    """
    s = ", ".join(f"s.{name}" for name in columns.split(", "))
    hit = "m.seq AS hit_seq, m.chain AS hit_chain, m.status <> 'superseded' AS hit_is_current"
    newest = f"""
    (SELECT session_id, seq, chain, status, created_at FROM messages
     WHERE tenant_id = $1 AND chain = {chain} ORDER BY created_at DESC LIMIT {TWINS}) AS m
    CROSS JOIN LATERAL (
        SELECT {columns} FROM sessions WHERE tenant_id = $1 AND id = m.session_id
            AND ($3::text IS NULL OR client_id IS NULL OR client_id = $3) OFFSET 0
    ) AS s
    """
    ends = "seq, chain, status FROM messages WHERE tenant_id = $1 AND session_id = s.id"
    return f"""
    (SELECT {s}, {hit} FROM {newest}
     WHERE m.seq = s.last_seq AND ($3::text IS NULL OR s.client_id = $3) ORDER BY m.created_at DESC LIMIT 1)
    UNION ALL
    (SELECT {s}, {hit} FROM (
        SELECT {columns} FROM sessions WHERE tenant_id = $1 AND client_id = $3::text
            AND CASE WHEN $3::text IS NOT NULL THEN (
                SELECT seq FROM messages WHERE tenant_id = $1 AND chain = {chain}
                ORDER BY created_at DESC OFFSET {TWINS} LIMIT 1
            ) IS NOT NULL END OFFSET 0
     ) AS s CROSS JOIN LATERAL (
        (SELECT {ends} AND seq <= {FIRST} ORDER BY seq LIMIT {FIRST}) UNION ALL
        (SELECT {ends} AND seq > greatest({FIRST}, s.last_seq - {LAST}) ORDER BY seq LIMIT {LAST})
     ) AS m WHERE m.chain = {chain} ORDER BY m.seq = s.last_seq DESC, s.updated_at DESC, s.id LIMIT 1)
    UNION ALL
    (SELECT {s}, {hit} FROM {newest}
     ORDER BY (s.client_id = $3) IS TRUE DESC, m.seq = s.last_seq DESC, s.updated_at DESC, s.id LIMIT 1)
    LIMIT 1
    """


# The longest match wins. Its chains are tried in turn, until one is known.
BY_CHAIN = f"""
SELECT h.* FROM unnest($2::bytea[]) AS c (chain) CROSS JOIN LATERAL ({best_match("c.chain", COLUMNS)}) AS h LIMIT 1
"""
BY_CHAIN_WITHIN = f"""
SELECT {_S}, m.seq AS hit_seq, m.chain AS hit_chain, m.status <> 'superseded' AS hit_is_current
FROM (
    SELECT session_id, seq, chain, status FROM messages
    WHERE tenant_id = $1 AND chain = ANY($2::bytea[]) AND session_id = $4 OFFSET 0
) AS m
CROSS JOIN LATERAL (
    SELECT {COLUMNS} FROM sessions
    WHERE tenant_id = $1 AND id = m.session_id AND ($3::text IS NULL OR client_id IS NULL OR client_id = $3) OFFSET 0
) AS s
ORDER BY array_position($2::bytea[], m.chain), m.seq = s.last_seq DESC
LIMIT 1
"""

# A reply that so many sessions contain identifies none of them.
MAX_SHARED = 100
BY_REPLY = f"""
SELECT m.session_id, m.digest AS key
FROM messages m JOIN sessions s ON s.tenant_id = m.tenant_id AND s.id = m.session_id
WHERE m.tenant_id = $1 AND m.digest = $2 AND m.chain IS NOT NULL
      AND ($3::text IS NULL OR s.client_id IS NULL OR s.client_id = $3)
LIMIT {MAX_SHARED}
"""

BY_WHOLE_CHAIN = BY_REPLY.replace("m.digest = $2", "m.chain = $2").replace("m.digest AS key", "m.chain AS key")

BY_SIDE_REPLY = f"""
SELECT DISTINCT ON (s.id) {_S}
FROM side_replies r JOIN sessions s ON s.tenant_id = r.tenant_id AND s.id = r.session_id
WHERE r.tenant_id = $1 AND r.anchor = ANY($2::bytea[]) AND r.created_at > $3 AND r.requester = $4
LIMIT 2
"""

BY_OPEN_CHAIN = f"""
SELECT {COLUMNS} FROM sessions
WHERE tenant_id = $1 AND open_chain = ANY($2::bytea[]) AND updated_at > $3 AND client_id IS NOT DISTINCT FROM $4
ORDER BY updated_at DESC, id LIMIT 1
"""

BY_OPEN_BEGINNING = f"""
SELECT {COLUMNS}, open_chain FROM sessions
WHERE tenant_id = $1 AND open_chain = ANY($2::bytea[]) AND updated_at > $3 AND client_id IS NOT DISTINCT FROM $4
ORDER BY array_position($2::bytea[], open_chain) LIMIT 2
"""

BY_CLIENT_ID = f"""
SELECT {COLUMNS} FROM sessions WHERE tenant_id = $1 AND client_id = $2 ORDER BY created_at, id LIMIT 1
"""


async def get(connection: Connection, tenant: str, session_id: str) -> Session | None:
    """Return the session with that id, if the tenant has one."""
    row = await connection.fetchrow(GET, tenant, session_id)
    return None if row is None else session_from(row)


async def find_by_chain(
    connection: Connection,
    tenant: str,
    chains: Sequence[bytes],
    client_id: str | None,
    *,
    session_id: str | None = None,
) -> ReplyMatch | None:
    """Return the session with the longest history in common; ``chains`` are the request's, the longest first.

    ``session_id``: only that session will do.
    """
    if session_id is None:
        row = await connection.fetchrow(BY_CHAIN, tenant, list(chains), client_id)
    else:
        row = await connection.fetchrow(BY_CHAIN_WITHIN, tenant, list(chains), client_id, session_id)
    if row is None:
        return None
    return ReplyMatch(
        session=session_from(row),
        seq=row["hit_seq"],
        chain=row["hit_chain"],
        is_current=row["hit_is_current"],
    )


async def find_by_reply(
    connection: Connection, tenant: str, digests: Sequence[bytes], client_id: str | None
) -> Session | None:
    """Return the one session that relayed the newest of these replies (``digests``: newest first).

    If several did, the older replies decide between them. None if they do not: a guess would be worse than a new
    session.
    """
    return await _find_only(connection, BY_REPLY, tenant, digests, client_id)


async def find_by_whole_chain(
    connection: Connection, tenant: str, chains: Sequence[bytes], client_id: str | None
) -> Session | None:
    """Return the one session with the newest of these histories (``chains``: newest first); None if several have it."""
    return await _find_only(connection, BY_WHOLE_CHAIN, tenant, chains, client_id)


async def _find_only(
    connection: Connection, query: str, tenant: str, keys: Sequence[bytes], client_id: str | None
) -> Session | None:
    keys = list(dict.fromkeys(keys))
    found: defaultdict[bytes, list[str]] = defaultdict(list)
    for row in await connection.fetchmany(query, [(tenant, key, client_id) for key in keys]) if keys else ():
        found[row["key"]].append(row["session_id"])
    candidates: set[str] = set()
    for key in keys:
        if not found[key] or len(found[key]) == MAX_SHARED:
            continue
        candidates = candidates.intersection(found[key]) or candidates or set(found[key])
        if len(candidates) == 1:
            return await get(connection, tenant, candidates.pop())
    return None


async def find_by_side_reply(
    connection: Connection, tenant: str, anchors: Sequence[bytes], since: datetime, requester: bytes
) -> Session | None:
    """Return the one session with a side call by ``requester`` that got such a reply since ``since``."""
    rows = await connection.fetch(BY_SIDE_REPLY, tenant, list(anchors), since, requester)
    return session_from(rows[0]) if len(rows) == 1 else None


def in_flight(open_chain: bytes) -> bytes:
    """Return the value that marks an unanswered history while its call is under way.

    Two conversations may begin with the same words. After a failed call there is nothing to mix up; until then only a
    recognised retry matches.
    """
    return blake2b(b"in flight" + open_chain, digest_size=16).digest()


def answered_in_words(open_chain: bytes) -> bytes:
    """Return the value that marks a history whose only reply called none of its offered tools.

    A client may refuse such a reply and continue without it. Only a request that reports this matches.
    """
    return blake2b(b"answered in words" + open_chain, digest_size=16).digest()


async def find_unanswered(
    connection: Connection,
    tenant: str,
    open_chain: bytes,
    since: datetime,
    client_id: str | None,
    *,
    is_retry: bool,
) -> Session | None:
    """Return a session that consists of this very history and has no reply: the request asks again.

    ``is_retry``: that is certain, so a call may still be under way.
    """
    chains = [open_chain, in_flight(open_chain)] if is_retry else [open_chain]
    row = await connection.fetchrow(BY_OPEN_CHAIN, tenant, chains, since, client_id)
    return None if row is None else session_from(row)


async def find_begun(
    connection: Connection, tenant: str, open_chains: Sequence[bytes], since: datetime, client_id: str | None
) -> Session | None:
    """Return the one unanswered session that consists of the longest of these histories (``open_chains``: longest
    first); None if two do. A session with a running call does not count, since it may be answered.
    """
    rows = await connection.fetch(BY_OPEN_BEGINNING, tenant, list(open_chains), since, client_id)
    is_one = len(rows) == 1 or (len(rows) == 2 and rows[0]["open_chain"] != rows[1]["open_chain"])
    return session_from(rows[0]) if is_one else None


async def find_by_client_id(connection: Connection, tenant: str, client_id: str) -> Session | None:
    """Return the oldest session under an id that a client sends for its own purposes."""
    row = await connection.fetchrow(BY_CLIENT_ID, tenant, client_id)
    return None if row is None else session_from(row)


# The REST verbs

ADD = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ($1, $2, $3, NULL, $4, $5, $6, 0, 0, 0, 0, 0, false, 0, 0, 1, NULL, NULL, NULL, $7, $7)
ON CONFLICT (tenant_id, id) DO NOTHING RETURNING id
"""
CHANGE = f"""
UPDATE sessions SET strategy = $3, epoch_policy = $4, metadata = $5, version = version + 1, updated_at = $6
WHERE tenant_id = $1 AND id = $2 RETURNING {COLUMNS}
"""
MARK_EDITED = """
UPDATE sessions SET edited = true, edits = edits + 1, version = version + 1, updated_at = $3
WHERE tenant_id = $1 AND id = $2 RETURNING id
"""
DELETE = "DELETE FROM sessions WHERE tenant_id = $1 AND id = $2 RETURNING id"
ORPHAN = "UPDATE sessions SET parent = NULL, version = version + 1 WHERE tenant_id = $1 AND parent = $2"
# The other tables' rows go with their session by themselves.
WITHOUT_KEY = ("messages", "terse", "calls")


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A session's settings: strategy and epoch policy in the form of the configuration, JSON metadata."""

    strategy: str | None
    epoch_policy: str | None
    metadata: bytes


async def add(
    connection: Connection, tenant: str, session_id: str, parent: str | None, given: Configuration, now: datetime
) -> bool:
    """Make an empty session; False when the id is taken."""
    made = await connection.fetchval(
        ADD, tenant, session_id, parent, given.strategy, given.epoch_policy, given.metadata, now
    )
    return made is not None


async def change(
    connection: Connection, tenant: str, session_id: str, given: Configuration, now: datetime
) -> Session | None:
    """Return the session with another configuration; None if it does not exist."""
    row = await connection.fetchrow(CHANGE, tenant, session_id, given.strategy, given.epoch_policy, given.metadata, now)
    return None if row is None else session_from(row)


async def mark_edited(connection: Connection, tenant: str, session_id: str, now: datetime) -> bool:
    """Lock the session and have its next context start a new epoch; False when it is not there."""
    return await connection.fetchval(MARK_EDITED, tenant, session_id, now) is not None


async def delete(connection: Connection, tenant: str, session_id: str) -> bool:
    """Delete a session with all its data; False if it does not exist. Its children stay without a parent."""
    if await connection.fetchval(DELETE, tenant, session_id) is None:
        return False
    await connection.execute(ORPHAN, tenant, session_id)
    for table in WITHOUT_KEY:
        await connection.execute(f"DELETE FROM {table} WHERE tenant_id = $1 AND session_id = $2", tenant, session_id)
    return True
