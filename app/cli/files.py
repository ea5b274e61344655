"""What the commands read and write: files, standard input and output."""

from __future__ import annotations

import sys
from pathlib import Path

from app.cli.refusals import Refused

STANDARD = "-"


def read_bytes(file: str | Path) -> bytes:
    """What a file holds; ``-`` is standard input. Raises `Refused`."""
    try:
        return sys.stdin.buffer.read() if str(file) == STANDARD else Path(file).read_bytes()
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error


def read_text(file: str | Path) -> str:
    """The same as text. Raises `Refused`."""
    return text_of(read_bytes(file), "standard input" if str(file) == STANDARD else str(file))


def text_of(content: bytes, source: str) -> str:
    """As text. Raises `Refused` for bytes that are none."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Refused(f"{source} is not UTF-8 text (byte {error.start})") from error


def write_bytes(file: str | Path, content: bytes) -> None:
    """Write a file; ``-`` is standard output. Raises `Refused`."""
    try:
        if str(file) == STANDARD:
            sys.stdout.buffer.write(content)
        else:
            Path(file).write_bytes(content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from error
