"""A context: the exact messages for one model call, with the report that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tersely.domain.history.history import Entry, Epoch, HeadMessage

Kept = Literal["full", "truncated", "terse", "summary", "left_out"]


FIXED_LAYERS = frozenset({"instructions", "tools"})
"""Layers that every context of an epoch has alike, and that no strategy shortens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A layer (``instructions``, ``tools``, ``injected``, ``activity_log``, ``references``, ``kept``, ``tail``) and its
    tokens.
    """

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReport:
    """What a context does with one turn. ``tokens`` is its cost in this context, ``reason`` the cause."""

    turn: int
    kept: Kept
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a context keeps, shortens and leaves out, with reasons. Tokens include instructions and tools."""

    tokens_before: int
    tokens_after: int
    epoch: int
    reason: str
    cut: int
    layers: tuple[LayerReport, ...]
    turns: tuple[TurnReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """A mend that pairing needed; `tersely.domain.history.pairing.repair` lists the kinds."""

    kind: str
    call_id: str
    seq: int


ContextMessage = HeadMessage | Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The messages of one model call after the instructions, in order: head, kept, tail. ``seal`` has validated it.

    The dialect renders a ``HeadMessage``. An ``Entry`` is sent as its raw bytes, patched where it was shortened or has
    a prefix. ``is_whole``: the entries are exactly the session's own, unchanged, so that the caller may pass the
    client's bytes through. ``must_answer``: the model must not call tools.
    """

    messages: tuple[ContextMessage, ...]
    epoch: Epoch
    report: Report
    repairs: tuple[Repair, ...]
    is_whole: bool
    must_answer: bool = False
