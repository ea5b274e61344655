"""``tersely undo``, ``clear``, ``pin`` and so on: change a session's context. They are named like the chat commands."""

from __future__ import annotations

from typing import Annotated

import typer

from tersely.cli.connection import LONG_LIMITS
from tersely.cli.files import STANDARD, read_text
from tersely.cli.printing import print_json, print_text, show_progress
from tersely.cli.session_command import SessionCommand, session_command

# The priority from which on a message counts as important, and the priority of every other message.
IMPORTANT, ORDINARY = 75, 50

Turn = Annotated[str, typer.Argument(help="The turn's id, such as t5.")]
Seq = Annotated[int, typer.Argument(help="The message's number, as printed by `add` and `show TURN`.", min=1)]


def context(common: SessionCommand) -> None:
    """Print how the current context is composed. `build` prints its text."""
    if common.as_json:
        print_json(common.request("POST", "context", json={})["report"])
    else:
        print_text(common.run("/context"))


def clear(common: SessionCommand) -> None:
    """Start an empty context. History and memory stay."""
    done = common.request("POST", "clear")
    tokens = done["report"]["tokens_after"]
    common.print(done, f"The context is empty now: {tokens:,} tokens. History and memory stay.")


def window(
    common: SessionCommand,
    size: Annotated[int, typer.Argument(help="Turns that a context holds.", min=0)],
) -> None:
    """Set how many turns a context holds."""
    text = common.run("/context", "window", str(size))
    common.print(common.request("GET") if common.as_json else None, text)


def rebuild(common: SessionCommand) -> None:
    """Write the state block again from the current window."""
    with show_progress("rebuilding"):
        done = common.request("POST", "state", "rebuild", timeout=LONG_LIMITS)
    common.print(done, done["text"] or "There is nothing to make a state of.")


def undo(common: SessionCommand) -> None:
    """Take the last turn back."""
    done = common.request("POST", "undo")
    common.print(done, f"{done['turn']} was taken back.")


def drop(common: SessionCommand, turn: Turn) -> None:
    """Hide a turn from every context."""
    done = common.request("POST", "turns", turn, "drop")
    common.print(done, f"{done['turn']} is hidden from every context.")


def remove(common: SessionCommand, turn: Turn) -> None:
    """Remove a turn for good."""
    done = common.request("DELETE", "turns", turn)
    common.print(done, f"{turn} was removed for good.")


def pin(common: SessionCommand, seq: Seq) -> None:
    """Keep a message in every context."""
    done = common.request("POST", "messages", str(seq), "pin")
    common.print(done, f"Message {seq} stays in every context.")


def unpin(common: SessionCommand, seq: Seq) -> None:
    """Stop keeping a message in every context."""
    done = common.request("DELETE", "messages", str(seq), "pin")
    common.print(done, f"Message {seq} is no longer pinned.")


def important(
    common: SessionCommand,
    seq: Seq,
    priority: Annotated[
        int, typer.Argument(help=f"The priority; an ordinary message has {ORDINARY}.", min=0, max=100)
    ] = IMPORTANT,
) -> None:
    """Mark a message as important: `tiered` keeps its turn longer."""
    done = common.request("PUT", "messages", str(seq), "priority", json={"priority": priority})
    common.print(done, f"Message {seq} has priority {priority}.")


def scratchpad(
    common: SessionCommand,
    write: Annotated[
        str | None, typer.Option("--set", help="Replace the text with this; `-` reads standard input.")
    ] = None,
    append: Annotated[str | None, typer.Option(help="Add this on a new line; `-` reads standard input.")] = None,
) -> None:
    """Print the scratchpad, or write to it."""
    if write is not None and append is not None:
        raise typer.BadParameter("--set and --append exclude each other")
    if write is not None:
        answer = common.request("PUT", "scratchpad", json={"text": _read(write)})
    elif append is not None:
        answer = common.request("POST", "scratchpad", "append", json={"text": _read(append)})
    else:
        answer = common.request("GET", "scratchpad")
    common.print(answer, answer["text"] or "The scratchpad is empty.")


def config(
    common: SessionCommand,
    name: Annotated[str | None, typer.Argument(help="strategy, epoch, or a parameter of the strategy.")] = None,
    value: Annotated[str | None, typer.Argument(help="Its new value: a name, or JSON.")] = None,
) -> None:
    """Print the session's settings, or change one."""
    if name is not None and value is None:
        raise typer.BadParameter(f"{name} needs a value")
    words = ("/config",) if name is None or value is None else ("/config", name, value)
    text = common.run(*words)
    common.print(common.request("GET") if common.as_json else None, text)


def _read(text: str) -> str:
    """Return an option's text; ``-`` stands for standard input."""
    return read_text(STANDARD) if text == STANDARD else text


def install(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (
        context, clear, window, rebuild, undo, drop, remove, pin, unpin, important, scratchpad, config,
    ):  # fmt: skip
        app.command()(session_command(command))
