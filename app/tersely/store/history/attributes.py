"""Data of requests outside their history: tool definitions, stored once per content."""

from __future__ import annotations

from tersely.store.db.connection import Connection

LAST_TOOLS = """
SELECT a.raw FROM (
    SELECT tools FROM calls WHERE tenant_id = $1 AND session_id = $2 ORDER BY number DESC LIMIT 1
) AS last JOIN attributes a ON a.tenant_id = $1 AND a.session_id = $2 AND a.digest = last.tools
"""

TOOLS = "SELECT raw FROM attributes WHERE tenant_id = $1 AND session_id = $2 AND digest = $3 AND kind = 'tools'"


async def tools(connection: Connection, tenant: str, session_id: str, digest: bytes) -> bytes | None:
    """Return a client's tools in wire form; None if they are not stored."""
    found: bytes | None = await connection.fetchval(TOOLS, tenant, session_id, digest)
    return found


async def last_tools(connection: Connection, tenant: str, session_id: str) -> bytes:
    """Return the client's tools of a session's last call, in wire form; empty if it had none."""
    return await connection.fetchval(LAST_TOOLS, tenant, session_id) or b""
