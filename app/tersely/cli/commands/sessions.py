"""``tersely add``, ``build``, ``search`` and so on: a session's content and figures, through the REST API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import httpx
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
    request,
    run_command,
    session_path,
    target_of,
    with_service,
)
from tersely.cli.files import STANDARD, read_text
from tersely.cli.printing import print_error, print_json, print_stats, print_table, print_text, show_progress

Role = Literal["system", "user", "assistant", "tool"]
Strategy = Annotated[str | None, typer.Option(help="Another strategy than the session's: a name, or JSON.")]


def add(
    role: Annotated[Role, typer.Argument(help="The role of the message.")],
    content: Annotated[str, typer.Argument(help="The text of the message; `-` reads it from standard input.")] = "-",
    session: SessionId = MAIN,
    pin: Annotated[bool, typer.Option("--pin", help="Keep the message in every context.")] = False,
    priority: Annotated[int | None, typer.Option(help="The priority of the message.", min=0, max=100)] = None,
    call: Annotated[str | None, typer.Option(help="With role tool: the id of the call that it answers.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Add a message to a session. A new session is created if it does not exist."""
    message = {"role": role, "content": read_text(STANDARD) if content == STANDARD else content}
    if call is not None:
        message["tool_call_id"] = call

    async def task(service: Service) -> Any:
        done = await service.request("POST", session_path(session, "messages"), json={"messages": [message]})
        at = session_path(session, "messages", str(done["last_seq"]))
        if pin:
            await service.call("POST", f"{at}/pin")
        if priority is not None:
            await service.call("PUT", f"{at}/priority", json={"priority": priority})
        return done

    done = with_service(target_of(url, key, local), task)
    if as_json:
        print_json(done)
    else:
        print_text(f"{session}: message {done['last_seq']}" + (f", {done['turn']}" if done["turn"] else ""))


def build(
    session: SessionId = MAIN,
    strategy: Strategy = None,
    epoch: Annotated[str | None, typer.Option(help="Another epoch policy: a name, or JSON.")] = None,
    model: Annotated[str, typer.Option(help="The model whose tokenizer counts the tokens.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="The window that the context must fit into.", min=1)] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Build the context of the next call and print it. Nothing changes."""
    request = {"strategy": strategy, "epoch": epoch, "model": model, "max_tokens": max_tokens}
    body = {**request, "format": "json" if as_json else "text"}

    async def task(service: Service) -> httpx.Response:
        return await service.call("POST", session_path(session, "context"), json=body)

    found = with_service(target_of(url, key, local), task)
    if as_json:
        print_json(found.json())
    else:
        print_text(found.text, end="")


def stats(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Figures of a session."""
    found = request(target_of(url, key, local), "GET", session_path(session, "stats"))
    if as_json:
        print_json(found)
    else:
        print_stats(found, datetime.now(UTC))


def savings(
    by: Annotated[
        Literal["day", "model", "strategy", "client"], typer.Option(help="Group by day, model, strategy or client.")
    ] = "day",
    since: Annotated[str | None, typer.Option(help="Start time, in ISO 8601. Default: 30 days ago.")] = None,
    until: Annotated[str | None, typer.Option(help="End time, not included.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Tokens and money saved, against the full history with a perfect cache."""
    given = {name: value for name, value in (("by", by), ("since", since), ("until", until)) if value}
    found = request(target_of(url, key, local), "GET", f"/api/savings?{urlencode(given)}")
    if as_json:
        print_json(found)
        return
    rows = [_savings_row(row) for row in (*found["items"], found["total"])]
    print_table((by, "calls", "tokens", "sent", "cached", "sent USD", "full USD", "saved USD"), rows)
    if found["total"].get("shadow"):  # a service of an earlier release has none
        print_text(f"Calls that tried out a strategy: {found['total']['shadow']['text']}.")


def _savings_row(row: dict[str, Any]) -> tuple[str, ...]:
    money = row["money"]
    costs = ("-",) * 3 if money is None else tuple(f"{money[name]:,.4f}" for name in ("sent", "full", "saved"))
    counts = (row["calls"], row["tokens_before"], row["tokens_after"], row["reported"]["cached"])
    return (row["key"] or "-", *(f"{count:,}" for count in counts), *costs)


def compress(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Compact a session now, without waiting for the end of its epoch."""
    with show_progress("compressing"):
        done = request(target_of(url, key, local), "POST", session_path(session, "compact"), timeout=LONG_LIMITS)
    if as_json:
        print_json(done)
        return
    report, summary = done["report"], done["summary"]
    print_text(f"The context has {report['tokens_after']:,} tokens now, of {report['tokens_before']:,} in all.")
    if summary and summary["tokens_after"]:
        print_text(f"Summarised: {summary['tokens_before']:,} -> {summary['tokens_after']:,} tokens.")
    if summary and summary["error"]:
        print_error(f"No model wrote the summary: {summary['error']}.")


def search(
    query: Annotated[
        str | None, typer.Argument(help="The text to find. Not used by the modes tail, head and turn.")
    ] = None,
    mode: Annotated[
        Literal["search", "relevant", "tail", "head", "turn"], typer.Option(help="How to search.")
    ] = "search",
    session: SessionId = MAIN,
    before: Annotated[int | None, typer.Option(help="Messages before each match.", min=0)] = None,
    after: Annotated[int | None, typer.Option(help="Messages after each match.", min=0)] = None,
    count: Annotated[
        int | None, typer.Option("-n", help="Number of messages, for the modes relevant, tail and head.", min=0)
    ] = None,
    turn: Annotated[str | None, typer.Option(help="The turn's id, for the mode turn.")] = None,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Search a session's whole history. The exit code is 1 when nothing is found."""
    arguments = {"mode": mode, "query": query, "before": before, "after": after, "turnId": turn}
    arguments["last" if mode == "tail" else "first"] = count
    body = {name: value for name, value in arguments.items() if value is not None}
    found = request(target_of(url, key, local), "POST", session_path(session, "search"), json=body)
    if as_json:
        print_json(found)
    else:
        print_text(found["text"])
    if not found["excerpts"]:
        raise typer.Exit(1)


def sessions(
    parent: Annotated[str | None, typer.Option(help="Only the subagents of that session.")] = None,
    limit: Annotated[int, typer.Option(help="Maximum number of entries.", min=1, max=100_000)] = 50,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List sessions, the newest first; subagents under their parents."""
    params = {} if parent is None else {"parent": parent}

    async def task(service: Service) -> list[Any]:
        return await service.page_through(path_of("sessions"), params, limit)

    found = with_service(target_of(url, key, local), task)
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
    turn: Annotated[str | None, typer.Argument(help="The id of a turn to print in full.")] = None,
    session: SessionId = MAIN,
    last: Annotated[int, typer.Option("-n", help="Number of newest turns to list.", min=1)] = 20,
    whole: Annotated[bool, typer.Option("--all", help="List all turns.")] = False,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """List a session's turns with their tokens, or show one."""
    target = target_of(url, key, local)
    if turn is not None:
        if as_json:
            print_json(request(target, "GET", session_path(session, "turns", turn)))
        else:
            print_text(run_command(target, session, "/message", "show", turn))
        return

    async def task(service: Service) -> list[Any]:
        turns = (await service.request("GET", session_path(session)))["turns"]
        before = 0 if whole else max(0, turns - last)
        after = {"after": f"t{before}"} if before else {}
        return await service.page_through(session_path(session, "turns"), after, turns)

    found = with_service(target, task)
    if as_json:
        print_json(found)
        return
    columns = ("turn", "status", "messages", "tokens", "input", "cached", "output", "in short")
    print_table(columns, [_tell_turn(each) for each in found], is_terse=True)


def _tell_turn(turn: Any) -> tuple[object, ...]:
    usage = turn["usage"]
    spent = ["" if usage[name] is None else f"{usage[name]:,}" for name in ("input", "cached", "output")]
    words = " ".join(" ".join(turn["terse"]).split())
    return turn["turn"], turn["status"], turn["messages"], f"{turn['tokens']:,}", *spent, words


def _name(setting: Any) -> str:
    return str(setting["name"]) if isinstance(setting, dict) else str(setting)


def _under_parents(found: list[Any]) -> list[tuple[Any, int]]:
    """Yield sessions with their depth, each under its parent where that is listed."""
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
    for command in (add, build, stats, savings, compress, search, sessions, show):
        app.command()(command)
