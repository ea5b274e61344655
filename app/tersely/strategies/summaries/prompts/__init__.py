"""The summarizer's prompts, one text file for each purpose. ``record`` precedes every record."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

Purpose = Literal["checkpoint", "tool_result", "trim", "ahead", "task", "tasks", "state"]
"""The purpose of a summary: compact's checkpoints and archived results, trim's memory (``ahead``: made before the
messages leave the context, and no part of the memory yet), tiered's tasks, one or several, window's state.
"""

PURPOSES: tuple[Purpose, ...] = ("checkpoint", "tool_result", "trim", "ahead", "task", "tasks", "state")


def _read(name: str) -> str:
    return files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8").strip()


INSTRUCTIONS: dict[Purpose, str] = {purpose: _read(purpose) for purpose in PURPOSES}
RECORD = _read("record")
