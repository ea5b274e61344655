"""What the start of an epoch needs beside the messages: each strategy's own, and nothing that it does not look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.domain.history import Material, Summary
from app.domain.lineage import Decision
from app.service.identity import Found
from app.store import scratchpads, states, summaries, terse
from app.store.connection import Connection
from app.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from app.strategies.summary_prompts import Purpose

# Newest summaries that are looked at, by strategy and purpose. One checkpoint stands for everything before it.
SUMMARIES: Mapping[type[Strategy], Sequence[tuple[Purpose, int]]] = {
    Trim: (("trim", 16),),
    Compact: (("checkpoint", 2), ("tool_result", 200)),
    Tiered: (("task", 400),),
}


def left_behind(found: Found) -> set[int]:
    """What the request takes out of the history; instructions, which come and go, are no part of it."""
    instructions = {row.row.seq for row in found.rows if not row.row.is_link}
    return {seq for seq in found.decision.superseded if seq not in instructions}


async def load_material(connection: Connection, tenant: str, found: Found, strategy: Strategy) -> Material:
    """What ``strategy`` begins an epoch with, of the session that was found, which must be there.

    State, log and summaries are those of the history which the request carries.
    """
    assert found.session is not None
    session_id = found.session.id
    material = Material()
    taken_back = left_behind(found)
    if isinstance(strategy, Full | Slim | Tiered):
        material = await terse.material(connection, tenant, session_id)
        material = replace(material, terse=tuple(e for e in material.terse if e.seq not in taken_back))
    if isinstance(strategy, Window):
        material = await _with_notes(connection, tenant, session_id, found.decision, material)
    made: list[Summary] = []
    for purpose, limit in SUMMARIES.get(type(strategy), ()):
        made += await summaries.newest(connection, tenant, session_id, [purpose], limit=limit)
    good = [s for s in made if not any(s.first_seq <= seq <= s.last_seq for seq in taken_back)]
    return replace(material, summaries=tuple(good))


async def _with_notes(
    connection: Connection, tenant: str, session_id: str, decision: Decision, material: Material
) -> Material:
    state = await states.newest(connection, tenant, session_id, without=decision.superseded, revived=decision.revived)
    scratchpad = await scratchpads.get(connection, tenant, session_id)
    material = replace(material, scratchpad=scratchpad.text)
    return replace(material, state=state.text, state_seq=state.seq) if state else material
