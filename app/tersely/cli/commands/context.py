"""``tersely undo``, ``clear``, ``pin`` and so on: hands on a session's context, named as the commands of a chat."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tersely.cli.connection import (
    MAIN,
    AsJson,
    Key,
    Local,
    SessionId,
    Url,
    request,
    run_command,
    session_path,
    target_of,
)
from tersely.cli.files import STANDARD, read_text
from tersely.cli.printing import print_json, print_text, show_progress

# From where on a message counts as important, and what each has unless it is set.
IMPORTANT, ORDINARY = 75, 50

Turn = Annotated[str, typer.Argument(help="The turn's id, such as t5.")]
Seq = Annotated[int, typer.Argument(help="The message's number, as printed by `add` and `show TURN`.", min=1)]


def context(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Print how the current context is composed. `build` prints its text."""
    place = target_of(url, key, local)
    if as_json:
        print_json(request(place, "POST", session_path(session, "context"), json={})["report"])
    else:
        print_text(run_command(place, session, "/context"))


def clear(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Start an empty context. History and memory stay."""
    done = request(target_of(url, key, local), "POST", session_path(session, "clear"))
    tokens = done["report"]["tokens_after"]
    _tell(done, f"The context is empty now: {tokens:,} tokens. History and memory stay.", as_json)


def window(
    size: Annotated[int, typer.Argument(help="Turns that a context holds.", min=0)],
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Set how many turns a context holds."""
    place = target_of(url, key, local)
    said = run_command(place, session, "/context", "window", str(size))
    _tell(request(place, "GET", session_path(session)) if as_json else None, said, as_json)


def rebuild(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Write the state block again from the current window."""
    with show_progress("rebuilding"):
        done = request(target_of(url, key, local), "POST", session_path(session, "state", "rebuild"))
    _tell(done, done["text"] or "There is nothing to make a state of.", as_json)


def undo(
    session: SessionId = MAIN, url: Url = None, key: Key = None, local: Local = False, as_json: AsJson = False
) -> None:
    """Take the last turn back."""
    done = request(target_of(url, key, local), "POST", session_path(session, "undo"))
    _tell(done, f"{done['turn']} was taken back.", as_json)


def drop(
    turn: Turn,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Hide a turn from every context."""
    done = request(target_of(url, key, local), "POST", session_path(session, "turns", turn, "drop"))
    _tell(done, f"{done['turn']} is hidden from every context.", as_json)


def remove(
    turn: Turn,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Remove a turn for good."""
    done = request(target_of(url, key, local), "DELETE", session_path(session, "turns", turn))
    _tell(done, f"{turn} was removed for good.", as_json)


def pin(
    seq: Seq,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Keep a message in every context."""
    done = request(target_of(url, key, local), "POST", session_path(session, "messages", str(seq), "pin"))
    _tell(done, f"Message {seq} stays in every context.", as_json)


def unpin(
    seq: Seq,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Stop keeping a message in every context."""
    done = request(target_of(url, key, local), "DELETE", session_path(session, "messages", str(seq), "pin"))
    _tell(done, f"Message {seq} is kept like any other.", as_json)


def important(
    seq: Seq,
    priority: Annotated[
        int, typer.Argument(help=f"How important; unless set it is {ORDINARY}.", min=0, max=100)
    ] = IMPORTANT,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Mark a message as important: `tiered` keeps its turn longer."""
    path = session_path(session, "messages", str(seq), "priority")
    done = request(target_of(url, key, local), "PUT", path, json={"priority": priority})
    _tell(done, f"Message {seq} has priority {priority}.", as_json)


def scratchpad(
    write: Annotated[str | None, typer.Option("--set", help="Write this instead; `-` reads standard input.")] = None,
    append: Annotated[str | None, typer.Option(help="Add this on a new line; `-` reads standard input.")] = None,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Print the scratchpad, or write to it."""
    if write is not None and append is not None:
        raise typer.BadParameter("--set and --append exclude each other")
    place, path = target_of(url, key, local), session_path(session, "scratchpad")
    if write is not None:
        found = request(place, "PUT", path, json={"text": _given(write)})
    elif append is not None:
        found = request(place, "POST", session_path(session, "scratchpad", "append"), json={"text": _given(append)})
    else:
        found = request(place, "GET", path)
    _tell(found, found["text"] or "The scratchpad is empty.", as_json)


def config(
    name: Annotated[str | None, typer.Argument(help="strategy, epoch, or a parameter of the strategy.")] = None,
    value: Annotated[str | None, typer.Argument(help="Its new value: a name, or JSON.")] = None,
    session: SessionId = MAIN,
    url: Url = None,
    key: Key = None,
    local: Local = False,
    as_json: AsJson = False,
) -> None:
    """Print the session's settings, or change one."""
    if name is not None and value is None:
        raise typer.BadParameter(f"{name} needs a value")
    place = target_of(url, key, local)
    words = ("/config",) if name is None or value is None else ("/config", name, value)
    said = run_command(place, session, *words)
    _tell(request(place, "GET", session_path(session)) if as_json else None, said, as_json)


def _given(text: str) -> str:
    return read_text(STANDARD) if text == STANDARD else text


def _tell(answer: Any, text: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print_text(text)


def install(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (
        context, clear, window, rebuild, undo, drop, remove, pin, unpin, important, scratchpad, config,
    ):  # fmt: skip
        app.command()(command)
