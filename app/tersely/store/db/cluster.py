"""A distributed Postgres (Citus): its nodes, and which of them stores a tenant's rows.

All rows of a tenant are on one node. A transaction of a tenant goes straight to that node, which answers without asking
another one. Each node has its own connections and its own state: a node that is away concerns its own tenants alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncpg import Record

from tersely.domain.errors import StoreUnavailable
from tersely.store.db.pool import Connection
from tersely.store.db.server import DatabaseServer, ServerKind

# The two statements know their number of rows without a prepared statement.
HAS_EXTENSION = "SELECT FROM pg_extension WHERE extname = 'citus'"
IS_DISTRIBUTED = "SELECT FROM pg_dist_partition WHERE logicalrelid = to_regclass('sessions')"
VERSION = "SELECT extversion, citus_version() AS version FROM pg_extension WHERE extname = 'citus'"
_NODE = "CASE WHEN groupid = 0 THEN NULL ELSE nodename END AS host, nodeport AS port"
# Any node can answer this one.
LOCATE = f"""
SELECT {_NODE} FROM pg_dist_node WHERE noderole = 'primary' AND groupid = (
    SELECT groupid FROM pg_dist_placement WHERE shardid = get_shard_id_for_distribution_column('sessions', $1::text)
)
"""
NODES = f"SELECT {_NODE} FROM pg_dist_node WHERE noderole = 'primary' AND isactive ORDER BY groupid"
# Seconds after which it is asked again where a tenant's rows are: usually, and while their node is away. Rows that have
# moved before that are missed at once: the old node refuses to answer.
LOCATED_FOR = 60.0
RELOCATE_EVERY = 2.0
MOST_LOCATED = 100_000
# From this version on a plan that is kept for a node's own shard is made again at each execution, and each time kept as
# well: memory grows without end. There plans are not kept at all.
FIRST_FORGETFUL = (13, 2, 1)

# Host and port; None: the server of the database's own address, which is the coordinator.
Address = tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class _Location:
    """The server that stores a tenant's rows, as known until ``until`` in the loop's time."""

    server: DatabaseServer
    until: float


def plan_cache_mode(version: str) -> str:
    """Return how statements on a node are planned, by the text of ``citus_version()``."""
    numbers = version.partition(" ")[2].partition(" ")[0].split(".")
    known = tuple(int(number) for number in numbers if number.isdigit())
    return "auto" if known and known < FIRST_FORGETFUL else "force_custom_plan"


class Cluster:
    """The coordinator and the nodes. ``connect`` makes the server of an address."""

    def __init__(self, connect: Callable[[ServerKind, Address], DatabaseServer]) -> None:
        self._connect = connect
        self.coordinator = self._open(ServerKind.COORDINATOR, None)
        self._nodes: dict[Address, DatabaseServer] = {}
        self._located: dict[str, _Location] = {}
        self._listed_until = 0.0

    def _open(self, kind: ServerKind, address: Address) -> DatabaseServer:
        server = self._connect(kind, address)
        server.open()
        return server

    def _node(self, address: Address) -> DatabaseServer:
        if address not in self._nodes:
            self._nodes[address] = self._open(ServerKind.NODE, address)
        return self._nodes[address]

    def servers(self) -> Iterator[DatabaseServer]:
        """Return the coordinator and the nodes that have been used."""
        yield self.coordinator
        yield from self._nodes.values()

    def any_server(self) -> DatabaseServer:
        """Return a server for rows that every node stores: the coordinator, or a node while that is away."""
        return next((server for server in self.servers() if not server.is_away), self.coordinator)

    def known_server(self, tenant: str) -> DatabaseServer | None:
        """Return the server that last stored the tenant's rows, if that is known."""
        found = self._located.get(tenant)
        return found.server if found else None

    async def server_of(self, tenant: str) -> DatabaseServer:
        """Return the server that stores the tenant's rows. Raises `StoreUnavailable`."""
        now = asyncio.get_running_loop().time()
        found = self._located.get(tenant)
        if found is not None and found.until > now:
            return found.server
        try:
            server = await self._locate(tenant)
        except StoreUnavailable:
            if found is None:
                raise
            server = found.server
        if len(self._located) >= MOST_LOCATED:
            self._located.clear()
        self._located[tenant] = _Location(server, now + (RELOCATE_EVERY if server.is_away else LOCATED_FOR))
        return server

    def doubt(self, tenant: str) -> None:
        """Ask soon where the tenant's rows are: the node did not answer, or does not store them any more."""
        found = self._located.get(tenant)
        if found is not None:
            soon = asyncio.get_running_loop().time() + (RELOCATE_EVERY if found.server.is_away else 0.0)
            self._located[tenant] = _Location(found.server, min(found.until, soon))

    async def _locate(self, tenant: str) -> DatabaseServer:
        failure = StoreUnavailable()
        for server in list(self.servers()):
            if server.is_away:
                continue
            try:
                async with server.use("", "", None, is_one=False) as connection:
                    record = await connection.fetchrow(LOCATE, tenant)
                    await self._list_nodes(connection)
            except StoreUnavailable as error:
                failure = error
                continue
            if record is None:
                raise StoreUnavailable("the database does not say where the tenant's rows are")
            return self._node(_address(record))
        raise failure

    async def _list_nodes(self, connection: Connection) -> None:
        """Know all nodes, so that one can be asked while the coordinator is away."""
        now = asyncio.get_running_loop().time()
        if now > self._listed_until:
            self._listed_until = now + LOCATED_FOR
            for record in await connection.fetch(NODES):
                self._node(_address(record))

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(server.close() for server in self.servers()))


def _address(record: Record) -> Address:
    return None if record["host"] is None else (record["host"], record["port"])
