"""Read and write files, standard input and output."""

from __future__ import annotations

import sys
from pathlib import Path

from tersely.server.errors import CommandError

STANDARD = "-"


def read_bytes(file: str | Path) -> bytes:
    """Return a file's content; ``-`` is standard input. Raises `CommandError`."""
    try:
        return sys.stdin.buffer.read() if str(file) == STANDARD else Path(file).read_bytes()
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error


def read_text(file: str | Path) -> str:
    """Return the same as text. Raises `CommandError`."""
    return decode_text(read_bytes(file), "standard input" if str(file) == STANDARD else str(file))


def decode_text(content: bytes, source: str) -> str:
    """Decode UTF-8 text. Raises `CommandError` for anything else."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"{source} is not UTF-8 text (byte {error.start})") from error


def write_bytes(file: str | Path, content: bytes) -> None:
    """Write a file; ``-`` is standard output. Raises `CommandError`."""
    try:
        if str(file) == STANDARD:
            sys.stdout.buffer.write(content)
        else:
            Path(file).write_bytes(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from error
