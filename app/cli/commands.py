"""``tersely``: the commands, each a thin layer over what it starts or asks.

All but those that talk to a running service need the service itself, whose parts take their time to load: they are
imported by the command that needs them.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Literal, NoReturn

import typer

from app import __version__
from app.cli import context_commands, knowledge_commands, session_commands, transfer_commands
from app.cli.chat import chat
from app.cli.printing import busy, is_plain, print_error, print_json, print_table, print_text
from app.cli.reaching import AsJson
from app.cli.refusals import Refused
from app.domain.errors import TerselyError

app = typer.Typer(
    name="tersely",
    help="A context proxy for LLM agents: stores the whole conversation, sends the model a short one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if is_plain() else "rich",
)
keys_app = typer.Typer(help="Create, list and revoke the keys of tenants.", no_args_is_help=True)


def main() -> int:
    """Run a command; the exit code is 0, 1 for what went wrong, 2 for wrong arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what this terminal's encoding lacks is no reason to fail
    try:
        app(standalone_mode=True)
    except (Refused, TerselyError) as error:
        _fail(str(error))
    return 0


def _fail(message: str) -> NoReturn:
    print_error(message)
    raise SystemExit(1)


def _version(value: bool) -> None:
    if value:
        print_text(__version__)
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
    from app.cli.serving import Serving, serve_forever

    serve_forever(Serving(host=host, port=port, workers=workers, is_scripted=upstream == "scripted"))


@app.command()
def migrate() -> None:
    """Bring the database to the current schema."""
    from app.cli import operating

    operating.migrate()
    print_text("The database is at the current schema.")


@app.command()
def cleanup(
    days: Annotated[
        int | None,
        typer.Option(help="After how many idle days; without it, as configured.", min=0, max=36_500),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's sessions.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete idle sessions: those under `trim` after 30 days, or all after --days."""
    from app.cli import operating

    with busy("cleaning up"):
        count = operating.cleanup(days, tenant)
    if as_json:
        print_json({"deleted": count})
    else:
        print_text(f"{count} session{'' if count == 1 else 's'} deleted.")


@app.command()
def openapi() -> None:
    """Print the OpenAPI document."""
    from app.cli import operating

    sys.stdout.buffer.write(operating.openapi())


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def replay(context: typer.Context) -> None:
    """Play recorded conversations through the proxy, both sides; check and measure what happens."""
    from app.cli.replay import replay as command
    from app.cli.serving import plainly

    # Its own options are read by an application of its own: even their names are behind the import.
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None if is_plain() else "rich"
    )
    alone.command()(command)
    with plainly():
        alone(args=context.args, prog_name=context.command_path)


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="Whose key; comes into being with its first one.")],
    name: Annotated[str, typer.Option(help="A label to know the key by.")] = "",
) -> None:
    """Print a new key. It is shown this once."""
    from app.cli import operating

    print_text(operating.create_key(tenant, name))


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the keys of all tenants, without their secrets."""
    from app.cli import operating

    rows = operating.list_keys(tenant)
    if as_json:
        print_json(rows)
        return
    names = ("id", "tenant", "name", "created_at", "revoked_at")
    print_table(("id", "tenant", "name", "created", "revoked"), [[row[name] for name in names] for row in rows])


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, the part between tsk_ and the next _.")],
    tenant: Annotated[str | None, typer.Option(help="Only if it is this tenant's.")] = None,
) -> None:
    """Revoke a key. Workers that have just seen it may trust it for up to 30 seconds more."""
    from app.cli import operating

    operating.revoke_key(key_id, tenant)
    print_text(f"Revoked {key_id}.")


app.add_typer(keys_app, name="keys")
app.command()(chat)
for commands in (session_commands, context_commands, knowledge_commands, transfer_commands):
    commands.install(app)
