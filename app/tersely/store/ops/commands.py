"""The newest command of each chat: that it is running, or its answer, so that no command runs twice."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from tersely.store.db.connection import Connection

# A command is new unless it is the stored one: after the same messages, and recent.
CLAIM = """
INSERT INTO commands (tenant_id, session_id, digest, last_seq, started_at, until, finished_at, text)
VALUES ($1, $2, $3, $4, $5, $6, NULL, NULL)
ON CONFLICT (tenant_id, session_id) DO UPDATE
SET digest = excluded.digest, last_seq = excluded.last_seq, started_at = excluded.started_at,
    until = excluded.until, finished_at = NULL, text = NULL
WHERE commands.digest <> excluded.digest OR NOT (commands.last_seq = excluded.last_seq OR $8)
   OR coalesce(commands.finished_at, commands.until) <= $7
RETURNING session_id
"""
OWN = "tenant_id = $1 AND session_id = $2 AND digest = $3 AND started_at = $4 AND finished_at IS NULL"
PROLONG = f"UPDATE commands SET until = $5 WHERE {OWN}"
FINISH = f"UPDATE commands SET finished_at = $5, text = $6 WHERE {OWN}"
RELEASE = f"DELETE FROM commands WHERE {OWN}"
READ = """
SELECT digest, started_at, until, finished_at, text FROM commands WHERE tenant_id = $1 AND session_id = $2
"""
FORGET = "DELETE FROM commands WHERE tenant_id = $1 AND session_id = $2 AND finished_at IS NOT NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandClaim:
    """A command. ``digest`` identifies it with all messages before it; ``last_seq`` is the last stored message."""

    session_id: str
    digest: bytes
    last_seq: int
    started_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """A session's newest command. ``text`` is the answer once it is finished; until ``until`` it is running."""

    digest: bytes
    started_at: datetime
    until: datetime
    finished_at: datetime | None
    text: bytes | None


async def claim(
    connection: Connection, tenant: str, claim_row: CommandClaim, *, until: datetime, since: datetime, is_retry: bool
) -> bool:
    """Store the session's newest command; False if it is stored already, begun or answered after ``since``.

    ``is_retry``: also if messages came in between. The session must exist.
    """
    given = (
        tenant,
        claim_row.session_id,
        claim_row.digest,
        claim_row.last_seq,
        claim_row.started_at,
        until,
        since,
        is_retry,
    )
    return await connection.fetchval(CLAIM, *given) is not None


async def prolong(connection: Connection, tenant: str, claim_row: CommandClaim, until: datetime) -> None:
    """Somebody is at work on it for longer."""
    await connection.execute(PROLONG, tenant, claim_row.session_id, claim_row.digest, claim_row.started_at, until)


async def finish(connection: Connection, tenant: str, claim_row: CommandClaim, text: bytes, now: datetime) -> None:
    """Remember the answer, unless another command has come since."""
    await connection.execute(FINISH, tenant, claim_row.session_id, claim_row.digest, claim_row.started_at, now, text)


async def release(connection: Connection, tenant: str, claim_row: CommandClaim) -> None:
    """Give a command up, so that a retry may run it."""
    await connection.execute(RELEASE, tenant, claim_row.session_id, claim_row.digest, claim_row.started_at)


async def newest(connection: Connection, tenant: str, session_id: str) -> CommandRecord | None:
    """Return the session's newest command, if one is remembered."""
    row = await connection.fetchrow(READ, tenant, session_id)
    return CommandRecord(**dict(row)) if row else None


async def forget(connection: Connection, tenant: str, session_id: str) -> None:
    """Forget the last command. After another command, the same text is meant as a new one."""
    await connection.execute(FORGET, tenant, session_id)
