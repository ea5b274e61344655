"""Artifacts: where oversized tool outputs are, by their SHA-256. The text itself is in its message, and only there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tersely.domain.messages import Message
from tersely.domain.text.tool_output import LEAST_SPILLED, output_digest
from tersely.store.db.connection import Connection
from tersely.store.history import large_rows
from tersely.store.history.messages import FULL_COLUMNS, StoredMessage

# The newest of several outputs with one content. Whoever asks knows the content's name, not the session's.
FIND = f"""
SELECT {large_rows.columns(FULL_COLUMNS, table="m")}, m.session_id
FROM artifacts a JOIN messages m ON m.tenant_id = a.tenant_id AND m.session_id = a.session_id AND m.seq = a.seq
WHERE a.tenant_id = $1 AND a.sha256 = $2 AND m.status <> 'removed' ORDER BY a.created_at DESC LIMIT 1
"""
# Characters. Whatever threshold a strategy sets for spilling, now or later, what it spills is to be found; and no
# message in wire form of so many bytes or fewer holds an output of more characters.
LARGE_OUTPUT = LEAST_SPILLED
OF_SESSION = """
SELECT sha256, seq, chars, created_at FROM artifacts WHERE tenant_id = $1 AND session_id = $2
ORDER BY created_at DESC, seq DESC LIMIT $3
"""
MESSAGES_WITH = "SELECT session_id, seq FROM artifacts WHERE tenant_id = $1 AND sha256 = $2 ORDER BY session_id, seq"
FORGET = "DELETE FROM artifacts WHERE tenant_id = $1 AND session_id = $2 AND seq = ANY($3::bigint[])"


class Artifact(msgspec.Struct, frozen=True, kw_only=True):
    """An output of ``chars`` characters in a written message. ``call_id`` is that of its call."""

    sha256: bytes
    call_id: str
    chars: int


class ArtifactPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of an output of ``chars`` characters. ``sha256`` in hex."""

    sha256: str
    seq: int
    chars: int
    created_at: datetime


def spilled(messages: Sequence[Message], index: int) -> list[Artifact]:
    """Return the oversized outputs in one of ``messages``."""
    return [
        Artifact(sha256=bytes.fromhex(output_digest(result.text)), call_id=result.call_id, chars=len(result.text))
        for result in messages[index].results
        if len(result.text) > LARGE_OUTPUT
    ]


def row(session_id: str, seq: int, artifact: Artifact, now: datetime) -> tuple[object, ...]:
    """In the order of the columns of the statement."""
    call_id = artifact.call_id.encode("utf-8", "surrogatepass")
    return (session_id, artifact.sha256, seq, call_id, artifact.chars, now)


async def find(connection: Connection, tenant: str, sha256: bytes) -> StoredMessage | None:
    """Return the message with that output, in any of the tenant's sessions, live or not."""
    record = await connection.fetchrow(FIND, tenant, sha256)
    if record is None:
        return None
    large = await large_rows.read(connection, tenant, record["session_id"], [record])
    found = large_rows.complete(record, large)
    del found["session_id"]
    return StoredMessage(**found)


async def of_session(connection: Connection, tenant: str, session_id: str, limit: int) -> list[ArtifactPlace]:
    """Return the newest artifacts of a session."""
    rows = await connection.fetch(OF_SESSION, tenant, session_id, limit)
    return [ArtifactPlace(**{**row, "sha256": row["sha256"].hex()}) for row in map(dict, rows)]


async def messages_with(connection: Connection, tenant: str, sha256: bytes) -> list[tuple[str, int]]:
    """Return session and message of each copy of that output."""
    return [(row["session_id"], row["seq"]) for row in await connection.fetch(MESSAGES_WITH, tenant, sha256)]


async def forget(connection: Connection, tenant: str, session_id: str, seqs: Sequence[int]) -> None:
    """Delete the references to these messages, which are emptied."""
    await connection.execute(FORGET, tenant, session_id, list(seqs))
