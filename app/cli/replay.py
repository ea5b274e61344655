"""``tersely replay``: real conversations played through the proxy, both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(files: Annotated[list[Path], typer.Argument(help="Transcripts, one conversation per line.")]) -> None:
    """Play transcripts through the running proxy."""
    del files
