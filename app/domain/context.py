"""A context: the exact messages for one model call, with the report that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.domain.history import Entry, Epoch, HeadMessage

Kept = Literal["full", "truncated", "terse", "summary", "left_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A layer (``instructions``, ``activity_log``, ``references``, ``kept``, ``tail``), with its tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """What became of a turn: ``tokens`` is what it costs in this context, ``reason`` why."""

    turn: int
    kept: Kept
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was kept, shortened, left out, and why. Tokens include the fixed part (instructions and tools)."""

    tokens_before: int
    tokens_after: int
    epoch: int
    reason: str
    cut: int
    layers: tuple[LayerReport, ...]
    turns: tuple[TurnReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A mend that pairing needed; `app.domain.pairing.repair` lists the kinds."""

    kind: str
    call_id: str
    seq: int


ContextMessage = HeadMessage | Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What goes upstream after the instructions, in order: head, kept, tail; proved valid by ``seal``.

    A ``HeadMessage`` is rendered by the dialect; an ``Entry`` goes out as its raw bytes, patched where it was shortened
    or has a prefix. ``is_whole`` says that the entries are exactly the session's own, with nothing added, left out,
    shortened or mended: the caller may pass the client's bytes through. ``must_answer``: the model is to call no tools.
    """

    messages: tuple[ContextMessage, ...]
    epoch: Epoch
    report: Report
    repairs: tuple[Repair, ...]
    is_whole: bool
    must_answer: bool = False
