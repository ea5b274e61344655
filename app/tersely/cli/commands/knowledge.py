"""``tersely memos`` and ``memory``: knowledge of a tenant across sessions, through the REST API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tersely.cli.connection import (
    AsJson,
    Key,
    Local,
    Service,
    ServiceTarget,
    Url,
    path_of,
    request,
    target_of,
    with_service,
)
from tersely.cli.files import STANDARD, read_text, write_bytes
from tersely.cli.printing import print_json, print_table, print_text, show_progress

Export = Annotated[
    Path | None, typer.Option(help="Write all of it to this file as JSON lines; `-` is standard output.")
]
Limit = Annotated[int, typer.Option(help="Maximum number of entries.", min=1, max=100)]


def memos(
    query: Annotated[
        str | None, typer.Argument(help="The subject to search for. Default: list the newest memos.")
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Memos with any of these tags; with --add: its tags.")] = None,
    add: Annotated[str | None, typer.Option(help="Save this as a new memo; `-` reads it from standard input.")] = None,
    delete: Annotated[str | None, typer.Option(help="Delete the memo with this id.")] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the memos with the given tags, or all memos with --all.")
    ] = False,
    whole: Annotated[bool, typer.Option("--all", help="With --forget: delete all memos.")] = False,
    export: Export = None,
    limit: Limit = 20,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List, find, save, export or delete memos."""
    target, tags = target_of(url, key, local), tag or []
    if export is not None:
        _export(target, "memos", export, {"tag": tags})
        return
    if forget:
        wanted = {"tag": tags, **({"all": True} if whole else {})}
        _tell_deleted(request(target, "DELETE", path_of("memos"), params=wanted), as_json)
        return
    if delete is not None:
        done = request(target, "DELETE", path_of("memos", delete))
        if as_json:
            print_json(done)
        else:
            print_text(f"{delete} was deleted.")
        return
    if add is not None:
        content = read_text(STANDARD) if add == STANDARD else add
        found = [request(target, "POST", path_of("memos"), json={"content": content, "tags": tags})]
    elif query is not None:
        body = {"query": query, "tags": tags, "limit": limit}
        found = request(target, "POST", path_of("memos", "search"), json=body)["items"]
    else:
        found = request(target, "GET", path_of("memos"), params={"limit": limit, "tag": tags})["items"]
    if as_json:
        print_json(found)
    else:
        print_table(("id", "tags", "memo"), [(each["id"], ", ".join(each["tags"]), each["content"]) for each in found])


def memory(
    query: Annotated[
        str | None, typer.Argument(help="The subject to search for. Default: list the newest entries.")
    ] = None,
    day: Annotated[str | None, typer.Option(help="Only of this day: YYYY-MM-DD, in UTC.")] = None,
    session: Annotated[str | None, typer.Option("--session", "-s", help="Only entries of this session.")] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the entries that --day and --session select.")
    ] = False,
    export: Export = None,
    limit: Limit = 20,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List, find, export or delete the memory: what left the contexts of sessions, by day."""
    target = target_of(url, key, local)
    narrowed = {name: text for name, text in (("day", day), ("session", session)) if text is not None}
    if export is not None:
        _export(target, "memory", export, {})
        return
    if forget:
        _tell_deleted(request(target, "DELETE", path_of("memory"), params=narrowed), as_json)
        return
    if query is not None:
        wanted = {**narrowed, "query": query, "limit": limit}
        found = request(target, "POST", path_of("memory", "search"), json=wanted)["items"]
    else:
        found = request(target, "GET", path_of("memory"), params={**narrowed, "limit": limit})["items"]
    if as_json:
        print_json(found)
    else:
        rows = [(each["day"], each["session"], _ranges(each), each["text"]) for each in found]
        print_table(("day", "session", "messages", "in short"), rows)


def _ranges(entry: Any) -> str:
    """Write the messages that a memory entry covers; a service of an earlier release lists no ranges."""
    ranges = entry.get("ranges") or [entry]
    return ", ".join(f"{each['first_seq']}-{each['last_seq']}" for each in ranges)


def _export(target: ServiceTarget, kind: str, file: Path, params: dict[str, Any]) -> None:
    async def task(service: Service) -> bytes:
        return (await service.call("GET", path_of(kind, "export"), params=params)).content

    with show_progress("exporting"):
        write_bytes(file, with_service(target, task))


def _tell_deleted(done: Any, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        print_text(f"{done['deleted']:,} deleted.")


def install(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (memos, memory):
        app.command()(command)
