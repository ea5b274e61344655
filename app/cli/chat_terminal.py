"""Where the lines of a chat come from: somebody at a terminal, or a pipe. And what is too long for a terminal."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from math import ceil

from app.cli.files import text_of
from app.cli.printing import print_text, visible


def is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


async def typed_lines() -> AsyncIterator[str]:
    """What is typed at a terminal, with a line editor and this chat's history, until it is left.

    Ctrl-D on an empty line leaves; Ctrl-C forgets what was typed, and leaves where nothing was.
    """
    # Only who talks at a terminal waits for it to load.
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))
    while True:
        try:
            # Signals stay with the chat: at the prompt Ctrl-C is a key like any other.
            yield await session.prompt_async("> ", handle_sigint=False)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not session.default_buffer.text:
                return


async def piped_lines() -> AsyncIterator[str]:
    """What standard input holds, line by line. Raises `Refused` for what is no text."""
    while line := sys.stdin.buffer.readline():
        yield text_of(line, "standard input")


async def page(text: str) -> None:
    """Show a text: as it is, or where it is taller than the terminal in $EDITOR, else $PAGER, else `less`."""
    program = os.environ.get("EDITOR") or os.environ.get("PAGER") or shutil.which("less")
    if not (program and is_terminal() and sys.stdout.isatty() and _is_tall(text)):
        print_text(text)
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="tersely-", suffix=".txt") as file:
        file.write(visible(text))
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
