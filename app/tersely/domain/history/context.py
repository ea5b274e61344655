"""A context: the exact messages for one model call, with the report that explains it."""

from __future__ import annotations

from typing import Literal

import msgspec

from tersely.domain.history.history import Entry, Epoch, HeadMessage

Kept = Literal["full", "truncated", "terse", "summary", "left_out"]


FIXED_LAYERS = frozenset({"instructions", "tools"})
"""Layers that every context of an epoch has alike, and that no strategy shortens."""


class LayerReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A layer (``instructions``, ``tools``, ``injected``, ``activity_log``, ``references``, ``kept``, ``tail``) and its
    tokens.
    """

    name: str
    tokens: int


class TurnReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one turn in a context. ``tokens`` is its cost in this context, ``reason`` the cause."""

    turn: int
    kept: Kept
    tokens: int
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The messages that a context keeps, shortens or omits, with reasons. Tokens include instructions and tools."""

    tokens_before: int
    tokens_after: int
    epoch: int
    reason: str
    cut: int
    layers: tuple[LayerReport, ...]
    turns: tuple[TurnReport, ...]


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """A mend that pairing needed; `tersely.domain.history.pairing.repair` lists the kinds."""

    kind: str
    call_id: str
    seq: int


ContextMessage = HeadMessage | Entry


class Context(msgspec.Struct, frozen=True, kw_only=True):
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
