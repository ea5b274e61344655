"""Makes the schema of a database distributed by tenant, on a Postgres with Citus.

Each tenant's rows are on one node, all tables alike; tenants, keys and limits are on every node. New tables of later
versions follow when they are migrated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from tersely.domain.errors import TerselyError
from tersely.store.db.cluster import HAS_EXTENSION, IS_DISTRIBUTED, VERSION, plan_cache_mode
from tersely.store.db.liveness import ended_when_silent
from tersely.store.db.pool import Connection

CONNECT_SECONDS = 10.0
SHARDS = 32
# Rows are copied in one transaction that locks the tables. More than this takes long.
MOST_BYTES = 10 * 1024**3
# Rows that are read before the tenant is known, or for all tenants, or on a node whose coordinator is away.
EVERYWHERE = ("alembic_version", "keys", "limits", "tenant_limits", "tenants")
# Tables that are not distributed yet. Others refer to sessions, so that table is first.
TABLES = """
SELECT c.relname AS name, pg_total_relation_size(c.oid) AS size, c.relforcerowsecurity AS is_forced
FROM pg_class c
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relnamespace = current_schema()::regnamespace
  AND (c.relname = ANY ($1) OR EXISTS (
      SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'tenant_id' AND NOT a.attisdropped))
  AND NOT EXISTS (SELECT FROM pg_dist_partition p WHERE p.logicalrelid = c.oid)
ORDER BY c.relname <> 'sessions', c.relname
"""
NODES = """
SELECT nodename AS host, nodeport AS port, groupid = 0 AS is_coordinator, shouldhaveshards AS has_shards
FROM pg_dist_node WHERE noderole = 'primary' AND isactive ORDER BY groupid
"""
IS_MEMBER = "SELECT pg_has_role(current_user, 'tersely_app', 'MEMBER')"
IS_UNRESTRICTED = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"

Reporter = Callable[[str], None]


class DistributionError(TerselyError):
    """The database cannot be distributed; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The result of a distribution: tables by tenant, tables on every node, and the rows that were moved."""

    by_tenant: tuple[str, ...]
    everywhere: tuple[str, ...]
    rows: int
    nodes: int


async def distribute(dsn: str, *, shards: int = SHARDS, any_size: bool = False, report: Reporter) -> Distribution:
    """Distribute every table that is not distributed yet; ``dsn`` is the coordinator's.

    ``shards``: how many parts the tenants are divided into, at most one node each. ``any_size``: however much is
    stored. ``report`` gets progress messages. Raises `DistributionError`, `TimeoutError` and what asyncpg raises.
    """
    async with _connection(dsn) as connection:
        await _check_extension(connection, report)
        nodes = await connection.fetch(NODES)
        if not any(node["has_shards"] for node in nodes):
            raise DistributionError("no node may store rows: SELECT citus_add_node('HOST', 5432) adds one")
        for node in nodes:
            if not node["is_coordinator"]:
                await _check_node(dsn, node["host"], node["port"])
        if await connection.fetchval(IS_UNRESTRICTED):
            report("the login is a superuser or bypasses row-level security: use another one for the service")
        tables = await connection.fetch(TABLES, EVERYWHERE)
        size = sum(table["size"] for table in tables)
        if size > MOST_BYTES and not any_size:
            raise DistributionError(
                f"{size // 1024**2} MiB are stored, and all tables stay locked while they are copied: "
                "stop the service and use --any-size, or restore a backup into a new database that is distributed first"
            )
        async with connection.transaction():
            rows = await _distribute_tables(connection, tables, shards)
    names = [table["name"] for table in tables]
    return Distribution(
        by_tenant=tuple(name for name in names if name not in EVERYWHERE),
        everywhere=tuple(name for name in names if name in EVERYWHERE),
        rows=rows,
        nodes=len(nodes),
    )


async def distribute_new_tables(dsn: str) -> None:
    """Distribute tables that a migration made, where the others are distributed. Raises what asyncpg raises."""
    async with _connection(dsn) as connection:
        if not await _has_rows(connection, HAS_EXTENSION) or not await _has_rows(connection, IS_DISTRIBUTED):
            return
        async with connection.transaction():
            tables = await connection.fetch(TABLES, EVERYWHERE)
            await _distribute_tables(connection, tables, SHARDS)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Connection]:
    """Connect for long work, which ends with `TimeoutError` when the server has stopped answering."""
    connection = await _connect(dsn)
    try:
        async with ended_when_silent(dsn, connection):
            yield connection
    finally:
        await connection.close()


async def _connect(dsn: str, **address: Any) -> Connection:
    return await asyncpg.connect(dsn, timeout=CONNECT_SECONDS, statement_cache_size=0, **address)


async def _has_rows(connection: Connection, statement: str) -> bool:
    return (await connection.execute(statement)) != "SELECT 0"


async def _check_extension(connection: Connection, report: Reporter) -> None:
    if not await _has_rows(connection, HAS_EXTENSION):
        raise DistributionError(
            "the database has no extension citus: a superuser creates it on every node (CREATE EXTENSION citus)"
        )
    record = await connection.fetchrow(VERSION)
    assert record is not None
    if plan_cache_mode(record["version"]) != "auto":
        report(
            f"{record['version'].partition(' on ')[0]} does not keep plans of a node's own rows: "
            "a call takes several times the processor time of 13.2.0"
        )


async def _check_node(dsn: str, host: str, port: int) -> None:
    """Make sure that a node can be reached from here, and that the login may use our role there."""
    try:
        connection = await _connect(dsn, host=host, port=port)
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise DistributionError(
            f"{host}:{port} cannot be reached from here with the login of DATABASE_URL ({type(error).__name__}): "
            "Tersely asks each node itself"
        ) from error
    try:
        if not await connection.fetchval(IS_MEMBER):
            # A statement about roles is passed on to the other nodes, which we ask ourselves.
            await connection.execute("SET citus.enable_ddl_propagation = off")
            await connection.execute("SET citus.enable_create_role_propagation = off")
            login = await connection.fetchval("SELECT quote_ident(current_user)")
            await connection.execute(f"GRANT tersely_app TO {login}")
    except asyncpg.PostgresError as error:
        raise DistributionError(
            f"on {host}:{port} the login may not use the role tersely_app ({type(error).__name__}): "
            "a superuser grants it there (GRANT tersely_app TO the login)"
        ) from error
    finally:
        await connection.close()


async def _distribute_tables(connection: Connection, tables: list[asyncpg.Record], shards: int) -> int:
    await connection.execute("SET LOCAL citus.multi_shard_modify_mode = 'sequential'")
    rows = 0
    for table in tables:
        name = f'"{table["name"]}"'
        if table["is_forced"]:  # Citus copies as the owner, who must see all rows meanwhile
            await connection.execute(f"ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY")
        before = await connection.fetchval(f"SELECT count(*) FROM {name}")
        if table["name"] in EVERYWHERE:
            await connection.execute(f"SELECT create_reference_table('{name}')")
        else:
            apart = f"colocate_with => 'none', shard_count => {shards:d}"
            how = apart if table["name"] == "sessions" else "colocate_with => 'sessions'"
            await connection.execute(f"SELECT create_distributed_table('{name}', 'tenant_id', {how})")
        after = await connection.fetchval(f"SELECT count(*) FROM {name}")
        if after != before:
            raise DistributionError(f"{table['name']} had {before} rows and has {after} on the nodes")
        if table["is_forced"]:
            await connection.execute(f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY")
        rows += after
    return rows
