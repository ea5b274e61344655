"""``tersely add``, ``build``, ``stats`` and so on: sessions handled from a terminal, through the REST API."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import typer

from app.cli.printing import busy, print_json, print_stats, print_table, print_text
from app.cli.reaching import AsJson, Key, Local, Place, Service, SessionId, Url, session_path, work
from app.cli.serving import Refused
from app.main import clock

MAIN = "main"
Role = Literal["system", "user", "assistant", "tool"]
Strategy = Annotated[str | None, typer.Option(help="Another strategy than the session's: a name, or JSON.")]


def add(
    role: Annotated[Role, typer.Argument(help="Who says it.")],
    content: Annotated[str, typer.Argument(help="What is said; `-` reads it from standard input.")] = "-",
    session: SessionId = MAIN,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in every context.")] = False,
    priority: Annotated[int | None, typer.Option(help="How important it is.", min=0, max=100)] = None,
    call: Annotated[str | None, typer.Option(help="With role tool: the id of the call that it answers.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Add a message to a session, which is made if it is new."""
    message = {"role": role, "content": sys.stdin.read() if content == "-" else content}
    if call is not None:
        message["tool_call_id"] = call

    async def task(service: Service) -> Any:
        done = await service.ask("POST", session_path(session, "messages"), json={"messages": [message]})
        at = session_path(session, "messages", str(done["last_seq"]))
        if pin:
            await service.call("POST", f"{at}/pin")
        if priority is not None:
            await service.call("PUT", f"{at}/priority", json={"priority": priority})
        return done

    done = work(_place(url, key, local), task)
    if as_json:
        print_json(done)
    else:
        print_text(f"{session}: message {done['last_seq']}" + (f", {done['turn']}" if done["turn"] else ""))


def build(
    session: SessionId = MAIN,
    strategy: Strategy = None,
    epoch: Annotated[str | None, typer.Option(help="Another epoch policy: a name, or JSON.")] = None,
    model: Annotated[str, typer.Option(help="For which model tokens are counted.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="The window that the context must fit into.", min=1)] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Build the context of the next call and print it. Nothing is changed."""
    wish = {"strategy": strategy, "epoch": epoch, "model": model, "max_tokens": max_tokens}
    body = {**wish, "format": "json" if as_json else "text"}

    async def task(service: Service) -> httpx.Response:
        return await service.call("POST", session_path(session, "context"), json=body)

    found = work(_place(url, key, local), task)
    if as_json:
        print_json(found.json())
    else:
        print(found.text, end="")


def stats(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Figures of a session."""
    found = _ask(_place(url, key, local), "GET", session_path(session, "stats"))
    if as_json:
        print_json(found)
    else:
        print_stats(found, clock())


def compress(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Compact a session now, without waiting for the end of its epoch."""
    with busy("compressing"):
        done = _ask(_place(url, key, local), "POST", session_path(session, "compact"))
    if as_json:
        print_json(done)
        return
    report, summary = done["report"], done["summary"]
    print_text(f"The context has {report['tokens_after']:,} tokens now, of {report['tokens_before']:,} in all.")
    if summary and summary["tokens_after"]:
        print_text(f"Summarised: {summary['tokens_before']:,} -> {summary['tokens_after']:,} tokens.")


def search(
    query: Annotated[str | None, typer.Argument(help="What to find; not for tail, head and turn.")] = None,
    mode: Annotated[Literal["search", "relevant", "tail", "head", "turn"], typer.Option(help="How.")] = "search",
    session: SessionId = MAIN,
    before: Annotated[int | None, typer.Option(help="Messages before each match.", min=0)] = None,
    after: Annotated[int | None, typer.Option(help="Messages after each match.", min=0)] = None,
    count: Annotated[int | None, typer.Option("-n", help="How many, for relevant, tail and head.", min=0)] = None,
    turn: Annotated[str | None, typer.Option(help="For mode turn: its id.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Search a session's whole history. The exit code is 1 when nothing is found."""
    asked = {"mode": mode, "query": query, "before": before, "after": after, "turnId": turn}
    asked["last" if mode == "tail" else "first"] = count
    body = {name: value for name, value in asked.items() if value is not None}
    found = _ask(_place(url, key, local), "POST", session_path(session, "search"), json=body)
    if as_json:
        print_json(found)
    else:
        print_text(found["text"])
    if not found["excerpts"]:
        raise typer.Exit(1)


def sessions(
    parent: Annotated[str | None, typer.Option(help="Only the subagents of that session.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=100_000)] = 50,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List sessions, the newest first; subagents under their parents."""
    params = {} if parent is None else {"parent": parent}

    async def task(service: Service) -> list[Any]:
        return await service.page_through("/api/sessions", params, limit)

    found = work(_place(url, key, local), task)
    if as_json:
        print_json(found)
        return
    rows = [
        (f"{'  ' * depth}{each['id']}", _name(each["strategy"]), each["turns"], each["messages"], f"{each['tokens']:,}",
         each["updated_at"][:19].replace("T", " "))
        for each, depth in _under_parents(found)
    ]  # fmt: skip
    print_table(("session", "strategy", "turns", "messages", "tokens", "updated (UTC)"), rows)


def show(
    turn: Annotated[str | None, typer.Argument(help="A turn's id, to see it whole.")] = None,
    session: SessionId = MAIN,
    last: Annotated[int, typer.Option("-n", help="How many of the last turns are listed.", min=1, max=200)] = 20,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List a session's turns with their tokens, or show one."""
    place = _place(url, key, local)
    if as_json:
        print_json(_ask(place, "GET", session_path(session, "turns", *([turn] if turn else []))))
        return
    text = f"/message show {turn}" if turn else f"/message list {last}"
    print_text(_ask(place, "POST", session_path(session, "commands"), json={"text": text})["text"])


def export(
    file: Annotated[Path | None, typer.Argument(help="Where to; standard output without it.")] = None,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
) -> None:
    """Export a session as JSON, in the shapes of context.json and context.terse.json."""

    async def task(service: Service) -> bytes:
        return (await service.call("GET", session_path(session, "export"))).content

    with busy("exporting"):
        content = work(_place(url, key, local), task)
    if file is None:
        sys.stdout.buffer.write(content + b"\n")
    else:
        file.write_bytes(content)


def import_(
    file: Annotated[Path, typer.Argument(help="What `tersely export` wrote; `-` reads standard input.")],
    session: Annotated[str | None, typer.Option("--session", "-s", help="The new session's id.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Import a session that was exported."""
    try:
        content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        document = json.loads(content)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise Refused(f"{file} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise Refused(f"{file} is no exported session")
    if session is not None:
        # In front of the rest, whose bytes stay as they are.
        rest = content.strip()[1:].lstrip()
        content = b'{"id":' + json.dumps(session).encode() + (b"," if document else b"") + rest

    async def task(service: Service) -> Any:
        headers = {"content-type": "application/json"}
        return await service.ask("POST", "/api/sessions/import", content=content, headers=headers)

    with busy("importing"):
        made = work(_place(url, key, local), task)
    if as_json:
        print_json(made)
    else:
        print_text(f"{made['id']}: {made['messages']:,} messages in {made['turns']:,} turns")


def undo(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Take the last turn back."""
    done = _ask(_place(url, key, local), "POST", session_path(session, "undo"))
    if as_json:
        print_json(done)
    else:
        print_text(f"{done['turn']} was taken back.")


def memos(
    query: Annotated[str | None, typer.Argument(help="What they should be about; the newest without it.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Memos with any of these tags; with --add: its tags.")] = None,
    add: Annotated[str | None, typer.Option(help="Save this as a new memo.")] = None,
    delete: Annotated[str | None, typer.Option(help="Delete the memo with this id.")] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1, max=100)] = 20,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List, find, save or delete memos."""
    place, tags = _place(url, key, local), tag or []
    if delete is not None:

        async def remove(service: Service) -> None:
            await service.call("DELETE", f"/api/memos/{delete}")

        work(place, remove)
        return
    if add is not None:
        found = [_ask(place, "POST", "/api/memos", json={"content": add, "tags": tags})]
    elif query is not None:
        found = _ask(place, "POST", "/api/memos/search", json={"query": query, "tags": tags, "limit": limit})["items"]
    else:
        found = _ask(place, "GET", "/api/memos", params={"limit": limit, "tag": tags})["items"]
    if as_json:
        print_json(found)
    else:
        print_table(("id", "tags", "memo"), [(each["id"], ", ".join(each["tags"]), each["content"]) for each in found])


def _place(url: str | None, key: str | None, local: bool) -> Place:
    return Place(url=url, key=key, is_local=local)


def _ask(place: Place, method: str, path: str, **how: Any) -> Any:
    async def task(service: Service) -> Any:
        return await service.ask(method, path, **how)

    return work(place, task)


def _name(setting: Any) -> str:
    return str(setting["name"]) if isinstance(setting, dict) else str(setting)


def _under_parents(found: list[Any]) -> list[tuple[Any, int]]:
    """Sessions with how deep they stand: each under its parent, where that is listed too."""
    known = {each["id"] for each in found}
    children: dict[str | None, list[Any]] = {}
    for each in found:
        children.setdefault(each["parent"] if each["parent"] in known else None, []).append(each)
    ordered: list[tuple[Any, int]] = []
    waiting = [(each, 0) for each in reversed(children.get(None, []))]
    while waiting:
        each, depth = waiting.pop()
        ordered.append((each, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(each["id"], []))]
    return ordered


def install(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (add, build, stats, compress, search, sessions, show, export, undo, memos):
        app.command()(command)
    app.command("import")(import_)
