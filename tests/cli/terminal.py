"""Commands as processes: with pipes, or at a terminal that somebody types at."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import TERSELY

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [TERSELY]
# Makes standard input the terminal of a session of its own, as a terminal's window does for its shell.
AT_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
CTRL_C, CTRL_D, ENTER, UP = b"\x03", b"\x04", b"\r", b"\x1b[A"


def environment(**given: str) -> dict[str, str]:
    """This process's, without its settings, and what is given."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TERSELY", "DATABASE", "OPENAI", "NO_COLOR", "FORCE_COLOR", "EDITOR", "PAGER"))
    }
    # Where a terminal is asked where its cursor stands, nobody answers here.
    return {**own, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "LANG": "C.UTF-8", **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a command: its exit status, and the text that it wrote."""

    code: int
    out: str
    errors: str


def run(*arguments: str | bytes, stdin: bytes = b"", **given: str) -> Ran:
    """A command with pipes."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=environment(**given),
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return Ran(code=done.returncode, out=done.stdout.decode(), errors=done.stderr.decode())


@dataclass(slots=True)
class Terminal:
    """A command at a terminal of 80 columns and 24 lines. ``shown`` is all that came on it so far."""

    process: subprocess.Popen[bytes]
    screen: int
    shown: str = ""
    _raw: bytes = field(default=b"")

    def type(self, *keys: str | bytes) -> None:
        for key in keys:
            os.write(self.screen, key.encode() if isinstance(key, str) else key)

    def wait_for(self, text: str, seconds: float = 30) -> str:
        """Return the output up to ``text``; the next wait begins behind it."""
        start = time.monotonic()
        while text not in self.shown:
            assert self._read(start + seconds - time.monotonic()), f"no {text!r} in {self.shown!r}"
        found, _, self.shown = self.shown.partition(text)
        return found

    def end(self, seconds: float = 30) -> int:
        """The exit code; the rest is ``shown``."""
        start = time.monotonic()
        while self._read(start + seconds - time.monotonic()):
            pass
        return self.process.wait(max(0.1, start + seconds - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.screen], [], [], max(0, seconds))
        try:
            piece = os.read(self.screen, 65_536) if ready else b""
        except OSError:  # how Linux tells that nobody has it open any more
            piece = b""
        self._raw += piece
        try:
            self.shown, self._raw = self.shown + self._raw.decode(), b""
        except UnicodeDecodeError:
            pass  # a character came in two pieces
        return bool(piece)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


def open_terminal(*arguments: str, **given: str) -> Terminal:
    """Start a command at a terminal."""
    screen, line = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", AT_TERMINAL, *COMMAND, *arguments],
        cwd=ROOT,
        env=environment(**{"COLUMNS": "80", "LINES": "24", **given}),
        stdin=line,
        start_new_session=True,
    )
    os.close(line)
    return Terminal(process, screen)
