"""A service for a replay: started here with its own database and tenants, or one that runs already."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tersely.composition.application import build
from tersely.composition.clock import clock
from tersely.embedded_postgres import open_embedded_postgres
from tersely.replay.checks import StoredClientMessage
from tersely.server.database import database_of
from tersely.server.embedded_server import serving
from tersely.service.common.auth import new_key
from tersely.settings import Settings
from tersely.store.db.connection import Database
from tersely.store.history import messages
from tersely.store.ops import keys, tenants

TENANT_PREFIX = "replay-"


@contextmanager
def database_for_replay(settings: Settings) -> Iterator[str]:
    """Yield the configured database, or else an embedded one that is deleted at the end."""
    if settings.database_url is not None:
        with database_of(settings) as url:
            yield url
        return
    with tempfile.TemporaryDirectory(prefix="tersely-replay-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        directory.chmod(0o711)  # root's Postgres runs as somebody else, who has to pass
        with open_embedded_postgres(directory) as server:
            yield server.admin_dsn


@asynccontextmanager
async def run_service(settings: Settings, database_url: str, upstream: str) -> AsyncIterator[str]:
    """The service on a free loopback port, until the block is left; its address."""
    # Every tenant is a new one, and a reply that could not be stored is an error.
    keys = dict.fromkeys(("openai_api_key", "anthropic_api_key", "gemini_api_key"))
    hosts = dict.fromkeys(
        ("anthropic_base_url", "gemini_base_url", "gemini_gca_base_url"), upstream.removesuffix("/v1")
    )
    own = settings.model_copy(update={"auth": "keys", "fail_open": "off", **keys, **hosts})
    application = build(own, database_url=database_url, openai_base_url=upstream)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with serving(application, sockets=[listener]):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@dataclass(slots=True, kw_only=True)
class ReplayTenants:
    """New tenants of a database, one for each strategy and file. All of their data is deleted at the end."""

    database: Database
    made: list[str] = field(default_factory=list)

    async def make(self) -> tuple[str, str]:
        """Return a new tenant: its name and a key."""
        name = f"{TENANT_PREFIX}{secrets.token_hex(8)}"
        text, stored = new_key(
            name, "replay", now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32)
        )
        await keys.add(self.database, stored)
        self.made.append(name)
        return name, text

    async def read(self, tenant: str, session_id: str) -> Sequence[StoredClientMessage]:
        """Return all current messages of a session, in order, as the client knows them."""
        async with self.database.transaction(tenant) as connection:
            rows = await messages.all_rows(connection, tenant, session_id)
            current = [row.row for row in rows if row.row.status == "live" and not row.is_hidden]
            content = await messages.content(connection, tenant, session_id, [row.seq for row in current])
        replies = {row.seq for row in current if row.relayed}
        return [StoredClientMessage(raw=message.raw, is_reply=message.seq in replies) for message in content]

    async def forget(self) -> None:
        """Remove what the tenants stored, and the tenants."""
        for name in self.made:
            await tenants.forget(self.database, name)


@asynccontextmanager
async def open_tenants(database_url: str) -> AsyncIterator[ReplayTenants]:
    """Yield tenants that are deleted at the end of the block."""
    database = Database(dsn=database_url, size=2, timeout=60)
    await database.open()
    made = ReplayTenants(database=database)
    try:
        yield made
    finally:
        await made.forget()
        await database.close()
