"""The commands of ``tersely``.

The service's modules load slowly. Only commands that need them import them.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from tersely import __version__
from tersely.cli.chat.command import chat
from tersely.cli.commands import (
    context as context_commands,
)
from tersely.cli.commands import (
    knowledge as knowledge_commands,
)
from tersely.cli.commands import (
    sessions as session_commands,
)
from tersely.cli.commands import (
    transfer as transfer_commands,
)
from tersely.cli.connection import AsJson
from tersely.cli.printing import is_plain, print_error, print_json, print_table, print_text, show_progress
from tersely.domain.errors import TerselyError
from tersely.domain.limits import MAX_DAYS, MAX_LIMIT
from tersely.server.errors import CommandError

if TYPE_CHECKING:
    from tersely.store.ops.backup import Manifest

app = typer.Typer(
    name="tersely",
    help="A context proxy for LLM agents: stores the whole conversation, sends the model a short one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if is_plain() else "rich",
)
tenants_app = typer.Typer(help="Settings of tenants.", no_args_is_help=True)
keys_app = typer.Typer(help="Create, list and revoke the keys of tenants.", no_args_is_help=True)


def main() -> int:
    """Run a command; the exit code is 0, 1 for what went wrong, 2 for wrong arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what this terminal's encoding lacks is no reason to fail
    try:
        app(standalone_mode=True)
    except (CommandError, TerselyError) as error:
        _fail(str(error))
    return 0


def _fail(message: str) -> NoReturn:
    print_error(message)
    raise SystemExit(1)


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version")] = False) -> None:
    """Options of all commands."""
    if version:
        print_text(__version__)
        raise typer.Exit


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8484,
    workers: Annotated[int, typer.Option(help="Number of worker processes.", min=1, max=256)] = 1,
    upstream: Annotated[
        Literal["scripted"] | None,
        typer.Option(help="`scripted`: a built-in model that needs no key, for trying things out."),
    ] = None,
) -> None:
    """Serve the proxy and the REST API."""
    from tersely.server.run import ServeOptions, serve_forever

    serve_forever(ServeOptions(host=host, port=port, workers=workers, is_scripted=upstream == "scripted"))


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def wrap(
    command: Annotated[
        list[str],
        typer.Argument(
            help=(
                "The program to start (claude, codex, gemini, opencode, aider, qwen, copilot or any other) and "
                "its arguments."
            )
        ),
    ],
    url: Annotated[str | None, typer.Option(envvar="TERSELY_URL", help="A running service to use.")] = None,
    key: Annotated[
        str | None, typer.Option(envvar="TERSELY_KEY", help="A Tersely key, if the service requires one.")
    ] = None,
    upstream: Annotated[
        Literal["scripted"] | None, typer.Option(help="`scripted`: a built-in model that needs no key.")
    ] = None,
) -> None:
    """Start an agent that uses Tersely. If no service is running, one is started for it."""
    from tersely.cli.commands import wrap as wrapping

    raise typer.Exit(wrapping.wrap(command, url=url, key=key, upstream=upstream))


@app.command()
def doctor(
    port: Annotated[int, typer.Option(help="The port of the service.", min=1, max=65535)] = 8484,
    as_json: AsJson = False,
) -> None:
    """Check settings, port, disk, database, keys, model hosts and clock, and give advice."""
    from dataclasses import asdict

    from tersely.cli.commands.doctor import examine

    findings = []
    for finding in examine(port):
        findings.append(finding)
        if not as_json:
            print_text(f"{finding.state:<4}  {finding.subject:<8}  {finding.text}")
            if finding.advice:
                print_text(f"      {'':<8}  -> {finding.advice}")
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


@app.command()
def migrate(
    old_postgres: Annotated[
        Path | None,
        typer.Option(
            help="The bin directory of the older Postgres that made the embedded database, to upgrade it first."
        ),
    ] = None,
) -> None:
    """Bring the database to the current schema."""
    from tersely.cli.commands import operator as operating

    if old_postgres is not None:
        with show_progress("upgrading the database"):
            major = operating.upgrade_embedded(old_postgres)
        print_text(f"Upgraded from Postgres {major}. The old files are in cluster-{major}.old: remove them in time.")
    operating.migrate()
    print_text("The database is at the current schema.")


@app.command()
def distribute(
    shards: Annotated[int, typer.Option(min=1, max=1024, help="Number of shards; each shard is on one node.")] = 32,
    any_size: Annotated[bool, typer.Option(help="Copy also more than 10 GiB; tables are locked meanwhile.")] = False,
) -> None:
    """Distribute the database by tenant over the nodes of a Citus cluster. The service must not be running."""
    from tersely.cli.commands import operator as operating

    with show_progress("distributing the tables"):
        done = operating.distribute(shards, any_size=any_size, report=print_error)
    if not done.by_tenant and not done.everywhere:
        print_text(f"Nothing to do: all tables are distributed over {done.nodes} nodes.")
        return
    print_text(f"Distributed by tenant: {', '.join(done.by_tenant) or 'none'}")
    print_text(f"On every node: {', '.join(done.everywhere) or 'none'}")
    print_text(f"{done.nodes} nodes, {done.rows} rows moved. Start the service.")


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="The file to write, for example tersely.tgz.")],
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write everything that is stored into one file. The service may be running."""
    from tersely.cli.commands import operator as operating

    with show_progress("writing the backup"):
        manifest, waiting = operating.backup(file, overwrite=force)
    _print_backup("Backed up", manifest, as_json=as_json)
    if waiting:
        print_error("calls wait in the spool of this machine for the database: they are not in the backup")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="A file that `tersely backup` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Write a backup into an empty database, and compare every row with it."""
    from tersely.cli.commands import operator as operating

    with show_progress("restoring the backup"):
        manifest, left_out = operating.restore(file)
    _print_backup("Restored", manifest, as_json=as_json)
    for table in left_out:
        print_error(f"{table} were left out: this server cannot hold them, and they are made anew when needed")


def _print_backup(done: str, manifest: Manifest, *, as_json: bool) -> None:
    counts = {
        "tenants": manifest.tenants,
        "sessions": manifest.count("sessions"),
        "messages": manifest.count("messages"),
    }
    if as_json:
        print_json({**counts, "revision": manifest.revision, "created_at": manifest.created_at})
    else:
        names = {name: name.removesuffix("s") if count == 1 else name for name, count in counts.items()}
        totals = ", ".join(f"{count:,} {names[name]}" for name, count in counts.items())
        print_text(f"{done} {totals}; digests agree.")


@app.command()
def cleanup(
    days: Annotated[
        int | None,
        typer.Option(help="Number of idle days. Default: as configured.", min=0, max=MAX_DAYS),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's sessions.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete idle sessions: those under `trim` after 30 days, or all after --days."""
    from tersely.cli.commands import operator as operating

    with show_progress("cleaning up"):
        count = operating.cleanup(days, tenant)
    if as_json:
        print_json({"deleted": count})
    else:
        print_text(f"{count} session{'' if count == 1 else 's'} deleted.")


@app.command()
def forget(
    tenant: Annotated[
        str | None, typer.Option(help="The tenant. Without further options all of its data is removed.")
    ] = None,
    session: Annotated[str | None, typer.Option(help="Only this session and its descendants.")] = None,
    user: Annotated[str | None, typer.Option(help="Only sessions whose metadata name this `user`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a tenant, a session or a user's sessions for good, and print a receipt."""
    from tersely.cli.commands import operator as operating

    if (session is not None and user is not None) or (tenant is None and session is None and user is None):
        raise typer.BadParameter("give --tenant, --session or --user; the last two exclude each other")
    if "" in (session, user):
        raise typer.BadParameter("the name is empty")
    whose = tenant or "default"
    scope = f"session {session} of {whose}" if session else f"the sessions of user {user} of {whose}" if user else whose
    if not (yes or dry_run) and not typer.confirm(f"Remove everything of {scope} for good?", err=True):
        raise typer.Exit(1)
    with show_progress("forgetting"):
        receipt = operating.forget(whose, session, user, is_dry=dry_run)
    print_json(receipt)
    if receipt["left"] and not dry_run:
        print_error("rows came about meanwhile: run it again")
        raise typer.Exit(1)


@tenants_app.command("retention")
def retention(
    tenant: Annotated[str | None, typer.Argument(help="The tenant. Default: list all.")] = None,
    days: Annotated[
        int | None, typer.Option(help="Delete its sessions after this number of idle days.", min=1, max=MAX_DAYS)
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Use the service's own setting again.")] = False,
) -> None:
    """List or set after how many idle days a tenant's sessions are deleted."""
    from tersely.cli.commands import limits as limiting
    from tersely.cli.commands import operator as operating

    if days is not None and default:
        raise typer.BadParameter("give --days or --default")
    if tenant is None:
        if days is not None or default:
            raise typer.BadParameter("name the tenant")
        print_table(("tenant", "days"), list(operating.list_retentions().items()))
        return
    if days is None and not default:
        days = limiting.list_limits(tenant)[0].retention_days
    else:
        limiting.set_retention(tenant, days)
    print_text(f"{tenant}: {'as configured' if days is None else f'{days} days'}.")


@tenants_app.command("limits")
def limits(
    tenant: Annotated[str | None, typer.Argument(help="The tenant; without it, list all.")] = None,
    key: Annotated[str | None, typer.Option(help="The id of a key: set its own limits.")] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, max=MAX_LIMIT, help="Requests in any 60 seconds.")
    ] = None,
    concurrent: Annotated[int | None, typer.Option(min=0, max=MAX_LIMIT, help="Calls under way at a time.")] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=0, max=MAX_LIMIT, help="Tokens of model calls in a day (UTC).")
    ] = None,
    money_per_month: Annotated[
        float | None, typer.Option(min=0, max=MAX_LIMIT, help="USD of model calls in a month (UTC).")
    ] = None,
    stored_bytes: Annotated[int | None, typer.Option(min=0, max=MAX_LIMIT, help="Bytes of stored messages.")] = None,
    unset: Annotated[
        list[str] | None, typer.Option(help="Name of a limit that goes back to the default; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List or set limits of tenants and keys. Workers follow within some seconds."""
    from dataclasses import asdict

    from tersely.cli.commands import limits as limiting

    given = {
        "requests_per_minute": requests_per_minute,
        "concurrent": concurrent,
        "tokens_per_day": tokens_per_day,
        "money_per_month": money_per_month,
        "stored_bytes": stored_bytes,
    }
    unset = [name.replace("-", "_") for name in unset or ()]
    if unknown := [name for name in unset if name not in given]:
        raise typer.BadParameter(f"there is no limit {unknown[0]!r}: {', '.join(given)}")
    given = {name: value for name, value in given.items() if value is not None}
    if both := sorted(given.keys() & set(unset)):
        raise typer.BadParameter(f"{both[0]} is both set and unset")
    if key is not None and not (given or unset):
        raise typer.BadParameter("--key sets the limits of a key: give at least one")
    if given or unset:
        if tenant is None:
            raise typer.BadParameter("name the tenant")
        found = [limiting.set_limits(tenant, key, given, unset)]
    else:
        found = limiting.list_limits(tenant)
    if as_json:
        print_json(
            [
                {
                    "tenant": each.name,
                    "limits": asdict(each.limits),
                    "effective": asdict(each.effective),
                    "used": asdict(each.used),
                    "keys": [{"id": k.key.id, "limits": asdict(k.limits), "used": asdict(k.used)} for k in each.keys],
                }
                for each in found
            ]
        )
        return
    rows = [row for each in found for row in limiting.limit_rows(each)]
    print_table(("whose", "limit", "most", "used"), rows)


@app.command()
def openapi() -> None:
    """Print the OpenAPI document."""
    from tersely.cli.commands import operator as operating

    sys.stdout.buffer.write(operating.openapi())


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def replay(context: typer.Context) -> None:
    """Play recorded conversations through the proxy, both sides; check and measure what happens."""
    from tersely.replay import replay as command
    from tersely.server.database import plainly

    # Its own options are read by an application of its own: even their names are behind the import.
    alone = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None if is_plain() else "rich"
    )
    alone.command()(command)
    with plainly():
        alone(args=context.args, prog_name=context.command_path)


@keys_app.command("create")
def create_key(
    tenant: Annotated[str, typer.Option(help="The tenant of the key. It is created with its first key.")],
    name: Annotated[str, typer.Option(help="A label for the key.")] = "",
    scope: Annotated[
        Literal["read", "proxy"] | None,
        typer.Option(help="`read`: only read over REST; `proxy`: only call models. Default: everything."),
    ] = None,
    days: Annotated[int | None, typer.Option(help="Days after which the key expires.", min=1, max=MAX_DAYS)] = None,
    client: Annotated[
        str | None, typer.Option(help="Only this client may use it, by its name in lists of calls: claude-code, codex.")
    ] = None,
) -> None:
    """Print a new key. It is shown only now."""
    from tersely.cli.commands import operator as operating

    print_text(operating.create_key(tenant, name, scope=scope, days=days, client=client))


@keys_app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only keys of this tenant.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the keys of all tenants, without their secrets."""
    from tersely.cli.commands import operator as operating

    rows = operating.list_keys(tenant)
    if as_json:
        print_json(rows)
        return
    names = ("id", "tenant", "name", "scope", "client", "created_at", "expires_at", "revoked_at")
    print_table(
        ("id", "tenant", "name", "scope", "client", "created", "expires", "revoked"),
        [[row[name] for name in names] for row in rows],
    )


@keys_app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, the part between tsk_ and the next _.")],
    tenant: Annotated[str | None, typer.Option(help="Only if the key belongs to this tenant.")] = None,
) -> None:
    """Revoke a key. Workers may accept it for two seconds more; while the database is away, for up to 30."""
    from tersely.cli.commands import operator as operating

    operating.revoke_key(key_id, tenant)
    print_text(f"Revoked {key_id}.")


app.add_typer(keys_app, name="keys")
app.add_typer(tenants_app, name="tenants")
app.command()(chat)
for commands in (session_commands, context_commands, knowledge_commands, transfer_commands):
    commands.install(app)
