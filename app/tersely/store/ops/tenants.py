"""Forgetting: everything of a tenant, or of some of its sessions, is deleted and counted, table by table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tersely.store.db.connection import Connection, Database

# Every table of tenants, and whether its rows belong to a session.
TABLES = """
SELECT c.relname AS name, EXISTS (
    SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'session_id' AND NOT a.attisdropped
) AS of_session
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname = current_schema()
  AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped)
ORDER BY c.relname
"""
SOME = "SELECT id FROM sessions WHERE tenant_id = $1 ORDER BY id LIMIT $2"
DESCENDANTS = """
WITH RECURSIVE family AS (
    SELECT id FROM sessions WHERE tenant_id = $1 AND id = ANY ($2)
    UNION SELECT s.id FROM sessions s JOIN family f ON s.parent = f.id WHERE s.tenant_id = $1
)
SELECT id FROM family ORDER BY id
"""
LOCK = "SELECT id FROM sessions WHERE tenant_id = $1 AND id = ANY ($2) ORDER BY id FOR UPDATE"
ORPHAN = "UPDATE sessions SET parent = NULL, version = version + 1 WHERE tenant_id = $1 AND parent = ANY ($2)"
OF_USER = """
SELECT id, metadata FROM sessions
WHERE tenant_id = $1 AND id > $2 AND (position($3 IN metadata) > 0 OR position($4 IN metadata) > 0)
ORDER BY id LIMIT $5
"""
# Sessions that one transaction deletes, and its time limit in seconds.
BATCH = 100
LIMIT = 60.0


async def forget(database: Database, tenant: str) -> Counter[str]:
    """Remove a tenant with everything that is its own; table -> rows. Its keys end first."""
    removed: Counter[str] = Counter()
    async with database.transaction(tenant, limit=LIMIT, is_everywhere=True) as connection:
        tables = await connection.fetch(TABLES)
        removed["keys"] += _count(await connection.execute("DELETE FROM keys WHERE tenant_id = $1", tenant))
    while True:
        async with database.transaction(tenant, limit=LIMIT) as connection:
            ids = [row["id"] for row in await connection.fetch(SOME, tenant, BATCH)]
        if not ids:
            break
        removed += await forget_sessions(database, tenant, ids)
    async with database.transaction(tenant, limit=LIMIT, is_everywhere=True) as connection:
        for table in tables:
            deleted = await connection.execute(f'DELETE FROM "{table["name"]}" WHERE tenant_id = $1', tenant)
            removed[table["name"]] += _count(deleted)
    return +removed


async def forget_sessions(database: Database, tenant: str, ids: Sequence[str]) -> Counter[str]:
    """Remove sessions with every row of theirs, memory and memos included; table -> rows. Batch by batch."""
    removed: Counter[str] = Counter()
    for start in range(0, len(ids), BATCH):
        async with database.transaction(tenant, limit=LIMIT) as connection:
            removed += await _delete_batch(connection, tenant, ids[start : start + BATCH])
    return removed


async def _delete_batch(connection: Connection, tenant: str, ids: Sequence[str]) -> Counter[str]:
    removed: Counter[str] = Counter()
    await connection.execute(LOCK, tenant, ids)
    for table in await connection.fetch(TABLES):
        if table["of_session"]:
            statement = f'DELETE FROM "{table["name"]}" WHERE tenant_id = $1 AND session_id = ANY ($2)'
            removed[table["name"]] += _count(await connection.execute(statement, tenant, ids))
    await connection.execute(ORPHAN, tenant, ids)
    deleted = await connection.execute("DELETE FROM sessions WHERE tenant_id = $1 AND id = ANY ($2)", tenant, ids)
    removed["sessions"] += _count(deleted)
    return +removed


async def count_rows(database: Database, tenant: str, ids: Sequence[str] | None = None) -> Counter[str]:
    """Count the rows of a tenant, or of some of its sessions, by table. Empty tables are left out."""
    found: Counter[str] = Counter()
    async with database.transaction(tenant, limit=LIMIT) as connection:
        for table in await connection.fetch(TABLES):
            name = table["name"]
            if ids is None:
                found[name] = await connection.fetchval(f'SELECT count(*) FROM "{name}" WHERE tenant_id = $1', tenant)
            elif name == "sessions" or table["of_session"]:
                column = "id" if name == "sessions" else "session_id"
                statement = f'SELECT count(*) FROM "{name}" WHERE tenant_id = $1 AND {column} = ANY ($2)'
                found[name] = await connection.fetchval(statement, tenant, ids)
    return +found


async def family_of(database: Database, tenant: str, ids: Sequence[str]) -> list[str]:
    """Return the sessions that exist, and all their descendants."""
    async with database.transaction(tenant, limit=LIMIT) as connection:
        return [row["id"] for row in await connection.fetch(DESCENDANTS, tenant, ids)]


async def with_metadata(database: Database, tenant: str, word: bytes, other: bytes) -> list[tuple[str, bytes]]:
    """Return id and metadata of the sessions whose metadata contain one of the words."""
    found: list[tuple[str, bytes]] = []
    last = ""
    while True:
        async with database.transaction(tenant, limit=LIMIT) as connection:
            rows = await connection.fetch(OF_USER, tenant, last, word, other, 1_000)
        found += [(row["id"], row["metadata"]) for row in rows]
        if not rows:
            return found
        last = rows[-1]["id"]


def _count(status: str) -> int:
    return int(status.rpartition(" ")[2])
