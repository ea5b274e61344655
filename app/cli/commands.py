"""``tersely``: the commands, each a thin layer over what it starts or asks."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, NoReturn, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from app import __version__
from app.api.openapi import openapi_document
from app.cli import session_commands
from app.cli.chat import chat
from app.cli.replay import replay
from app.cli.serving import Refused, Serving, database_of, serve_forever
from app.domain.errors import TerselyError
from app.main import build, clock, recipes_of
from app.service.auth import new_key
from app.service.cleanup import Cleanup
from app.settings import Settings, explain
from app.store import keys as key_store
from app.store.connection import TENANT, Database
from app.store.embedded import EmbeddedPostgresError
from app.store.migrations import migrate as migrate_database

app = typer.Typer(
    name="tersely",
    help="A context proxy for LLM agents: stores the whole conversation, sends the model a short one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Create, list and revoke the keys of tenants.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.command("replay")(replay)
app.command("chat")(chat)
session_commands.install(app)

T = TypeVar("T")

_out = Console()


def main() -> int:
    """Run a command; the exit code is 0, 1 for what went wrong, 2 for wrong arguments."""
    try:
        app(standalone_mode=True)
    except (Refused, TerselyError, EmbeddedPostgresError) as error:
        _fail(str(error))
    except ValidationError as error:
        _fail(explain(error))
    return 0


def _fail(message: str) -> NoReturn:
    print(f"tersely: {message}", file=sys.stderr)
    raise SystemExit(1)


def _version(value: bool) -> None:
    if value:
        _out.print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Options of all commands."""
    del version


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8484,
    workers: Annotated[int, typer.Option(help="Processes.", min=1, max=256)] = 1,
    upstream: Annotated[
        Literal["scripted"] | None,
        typer.Option(help="`scripted`: a built-in model that needs no key, for trying things out."),
    ] = None,
) -> None:
    """Serve the proxy and the REST API."""
    serve_forever(Settings(), Serving(host=host, port=port, workers=workers, is_scripted=upstream == "scripted"))


@app.command()
def migrate() -> None:
    """Bring the database to the current schema."""
    with database_of(Settings()) as url:
        asyncio.run(migrate_database(url))
    _out.print("The database is at the current schema.")


@app.command()
def cleanup(
    days: Annotated[
        int | None,
        typer.Option(help="After how many idle days; without it, as configured.", min=0, max=36_500),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's sessions.")] = None,
) -> None:
    """Delete idle sessions: those under `trim` after 30 days, or all after --days."""
    _check_tenant(tenant)
    settings = Settings()

    async def work(database: Database) -> int:
        recipes = recipes_of(settings)
        return await Cleanup(database, recipes, clock=clock, days=settings.cleanup_days).run(days, tenant=tenant)

    count = _with_database(work)
    _out.print(f"{count} session{'' if count == 1 else 's'} deleted.")


@app.command()
def openapi() -> None:
    """Print the OpenAPI document."""
    sys.stdout.buffer.write(openapi_document(build(Settings(), database_url="postgresql://").rest))


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Whose key; comes into being with its first one.")],
    name: Annotated[str, typer.Option(help="A label to know the key by.")] = "",
) -> None:
    """Print a new key. It is shown this once."""
    text, stored = new_key(tenant, name, now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32))

    async def work(database: Database) -> None:
        await key_store.add(database, stored)

    _with_database(work)
    print(text)


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List the keys of all tenants, without their secrets."""
    _check_tenant(tenant)

    async def work(database: Database) -> list[key_store.Key]:
        if tenant is None:
            return await key_store.of_all_tenants(database)
        return await key_store.of_tenant(database, tenant)

    rows = [
        {
            "id": key.id,
            "tenant": key.tenant,
            "name": key.label,
            "created_at": key.created_at.isoformat(timespec="seconds"),
            "revoked_at": key.revoked_at.isoformat(timespec="seconds") if key.revoked_at else None,
        }
        for key in _with_database(work)
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("id", "tenant", "name", "created", "revoked")
    for row in rows:
        table.add_row(*(str(row[name] or "") for name in ("id", "tenant", "name", "created_at", "revoked_at")))
    _out.print(table)


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, the part between tsk_ and the next _.")],
    tenant: Annotated[str | None, typer.Option(help="Only if it is this tenant's.")] = None,
) -> None:
    """Revoke a key. Workers that have just seen it may trust it for up to 30 seconds more."""
    _check_tenant(tenant)

    async def work(database: Database) -> bool:
        owner = await key_store.tenant_of(database, key_id)
        if owner is None or tenant not in (None, owner):
            return False
        return await key_store.revoke(database, owner, key_id, clock())

    if not _with_database(work):
        _fail(f"{f'{tenant} has' if tenant else 'there is'} no valid key {key_id}")
    _out.print(f"Revoked {key_id}.")


def _check_tenant(tenant: str | None) -> None:
    if tenant is not None and not TENANT.fullmatch(tenant):
        _fail(f"{tenant!r} is no tenant's name")


def _with_database(work: Callable[[Database], Awaitable[T]]) -> T:
    """The result of ``work(database)`` on the configured database, migrated."""
    with database_of(Settings()) as url:

        async def run() -> T:
            await migrate_database(url)
            database = Database(dsn=url, size=2)
            await database.open()
            try:
                return await work(database)
            finally:
                await database.close()

        return asyncio.run(run())
