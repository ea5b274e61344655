"""``tersely export`` and ``import``: whole sessions, through the REST API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tersely.cli.connection import (
    LONG_LIMITS,
    MAIN,
    AsJson,
    Key,
    Local,
    Service,
    SessionId,
    Url,
    path_of,
    session_path,
    target_of,
    with_service,
)
from tersely.cli.files import read_bytes, write_bytes
from tersely.cli.printing import print_json, print_text, show_progress
from tersely.server.errors import CommandError


def export(
    file: Annotated[Path, typer.Argument(help="The file to write; `-` is standard output.")] = Path("-"),
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Export a session as JSON, in the shapes of context.json and context.terse.json."""

    async def task(service: Service) -> bytes:
        return (await service.call("GET", session_path(session, "export"), timeout=LONG_LIMITS)).content

    with show_progress("exporting"):
        content = with_service(target_of(url, key, local), task)
    if str(file) == "-":
        write_bytes(file, content + b"\n")  # it is JSON already
        return
    write_bytes(file, content)
    if as_json:
        print_json({"session": session, "file": str(file), "bytes": len(content)})
    else:
        print_text(f"{session}: {len(content):,} bytes in {file}")


def import_(
    file: Annotated[Path, typer.Argument(help="A file that `tersely export` wrote; `-` reads standard input.")],
    session: Annotated[str | None, typer.Option("--session", "-s", help="The new session's id.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Import a session that was exported."""
    content = read_bytes(file)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CommandError(f"{file} is not an exported session")
    if session is not None:
        # In front of the rest, whose bytes stay as they are.
        rest = content.strip()[1:].lstrip()
        content = b'{"id":' + json.dumps(session).encode() + (b"," if document else b"") + rest

    async def task(service: Service) -> Any:
        headers = {"content-type": "application/json"}
        path = path_of("sessions", "import")
        return await service.request("POST", path, content=content, headers=headers, timeout=LONG_LIMITS)

    with show_progress("importing"):
        made = with_service(target_of(url, key, local), task)
    if as_json:
        print_json(made)
    else:
        print_text(f"{made['id']}: {made['messages']:,} messages in {made['turns']:,} turns")


def install(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(export)
    app.command("import")(import_)
