"""What the start of an epoch needs beside the messages: each strategy's own, and nothing that it does not look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tersely.domain.history.history import EpochInputs, Summary
from tersely.domain.history.reconciliation import Reconciliation
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.db.connection import Connection
from tersely.store.history import terse
from tersely.store.notes import scratchpads, states, summaries
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.summaries.prompts import Purpose

# Newest summaries that are looked at, by strategy and purpose. One checkpoint stands for everything before it.
SUMMARIES: Mapping[type[Strategy], Sequence[tuple[Purpose, int]]] = {
    Trim: (("trim", 16), ("ahead", 2)),
    Compact: (("checkpoint", 2), ("tool_result", 200)),
    Tiered: (("task", 100), ("tasks", 64)),
}


def left_behind(found: SessionMatch) -> set[int]:
    """What the request takes out of the history; instructions, which come and go, are no part of it."""
    superseded = set(found.decision.superseded)
    if not superseded:
        return superseded
    return superseded - {row.row.seq for row in found.rows if row.row.seq in superseded and not row.row.is_link}


def brought_back(found: SessionMatch) -> set[int]:
    """What the request brings back to the history; instructions, which come and go, are no part of it."""
    restored = set(found.decision.restored)
    if not restored:
        return restored
    return {row.row.seq for row in found.rows if row.row.seq in restored and row.row.is_link}


async def load_material(connection: Connection, tenant: str, found: SessionMatch, strategy: Strategy) -> EpochInputs:
    """What ``strategy`` begins an epoch with, of the session that was found, which must be there.

    State, log and summaries are those of the history which the request carries.
    """
    assert found.session is not None
    session_id = found.session.id
    material = EpochInputs()
    taken_back = left_behind(found)
    if isinstance(strategy, Full | Slim | Tiered):
        material = await terse.log_inputs(connection, tenant, session_id)
        material = replace(material, terse=tuple(e for e in material.terse if e.seq not in taken_back))
    if isinstance(strategy, Window):
        material = await _with_notes(connection, tenant, session_id, found.decision, material)
    made: list[Summary] = []
    for purpose, limit in SUMMARIES.get(type(strategy), ()):
        made += await summaries.newest(connection, tenant, session_id, [purpose], limit=limit)
    good = [s for s in made if not any(s.first_seq <= seq <= s.last_seq for seq in taken_back)]
    return replace(material, summaries=tuple(good))


async def _with_notes(
    connection: Connection, tenant: str, session_id: str, decision: Reconciliation, material: EpochInputs
) -> EpochInputs:
    state = await states.newest(connection, tenant, session_id, without=decision.superseded, restored=decision.restored)
    scratchpad = await scratchpads.get(connection, tenant, session_id)
    material = replace(material, scratchpad=scratchpad.text)
    return replace(material, state=state.text, state_seq=state.seq) if state else material
