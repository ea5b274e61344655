"""What the start of an epoch needs beside the messages: each strategy's own, and nothing that it does not look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from app.domain.history import Material
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


async def load(connection: Connection, tenant: str, session_id: str, strategy: Strategy) -> Material:
    """What ``strategy`` makes an epoch's beginning of, of a stored session."""
    material = Material()
    if isinstance(strategy, Full | Slim | Tiered):
        material = await terse.material(connection, tenant, session_id)
    if isinstance(strategy, Window):
        state = await states.newest(connection, tenant, session_id)
        scratchpad = await scratchpads.get(connection, tenant, session_id)
        material = replace(material, state=state.text if state else "", scratchpad=scratchpad.text)
    for purpose, limit in SUMMARIES.get(type(strategy), ()):
        found = await summaries.newest(connection, tenant, session_id, [purpose], limit=limit)
        material = replace(material, summaries=(*material.summaries, *found))
    return material
