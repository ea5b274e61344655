"""Read the lines of a chat from a terminal or a pipe, and show texts that are longer than a terminal."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from math import ceil

from tersely.cli.files import decode_text
from tersely.cli.printing import escape_controls, print_text


def is_terminal() -> bool:
    """Return whether somebody types."""
    return sys.stdin.isatty()


def read_lines(prompt: str) -> Callable[[], Awaitable[str | None]]:
    """Return a function that returns the next line, or None when the chat ends. Raises `CommandError` for invalid text.

    ``prompt`` is printed at a terminal.
    """
    return _typed_lines(escape_controls(prompt)) if is_terminal() else _piped_line


def _typed_lines(prompt: str) -> Callable[[], Awaitable[str | None]]:
    """Lines from a line editor with this chat's history.

    Ctrl-D on an empty line leaves; Ctrl-C forgets what was typed, and leaves where nothing was.
    """
    # Only who talks at a terminal waits for it to load.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))

    async def line() -> str | None:
        while True:
            try:
                # Signals stay with the chat: at the prompt Ctrl-C is a key like any other.
                return await session.prompt_async(prompt, handle_sigint=False)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    return None

    return line


async def _piped_line() -> str | None:
    line = sys.stdin.buffer.readline()
    return decode_text(line, "a line of standard input") if line else None


async def show_in_pager(text: str) -> None:
    """Print a text. If it is taller than the terminal, open it in $EDITOR, else $PAGER, else `less`."""
    program = os.environ.get("EDITOR") or os.environ.get("PAGER") or shutil.which("less")
    if not (program and is_terminal() and sys.stdout.isatty() and _is_tall(text)):
        print_text(text)
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tersely-", suffix=".txt") as file:
        file.write(escape_controls(text))
        file.flush()
        try:
            shown = await asyncio.create_subprocess_exec(*shlex.split(program), file.name)
        except (OSError, ValueError):
            print_text(text)
            return
        await shown.wait()


def _is_tall(text: str) -> bool:
    width, height = shutil.get_terminal_size()
    return sum(max(1, ceil(len(line) / width)) for line in text.splitlines()) > height
