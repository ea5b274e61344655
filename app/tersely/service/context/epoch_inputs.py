"""Load what the start of an epoch needs besides messages. Each strategy loads only what it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from tersely.domain.history.history import EpochInputs, Summary
from tersely.domain.history.reconciliation import Reconciliation
from tersely.service.recognition.session_lookup import SessionMatch
from tersely.store.db.connection import Connection
from tersely.store.history import terse
from tersely.store.notes import scratchpads, states, summaries
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.summaries.prompts import Purpose

# How many of the newest summaries each strategy reads, by purpose. One checkpoint covers everything before it.
SUMMARIES: Mapping[type[Strategy], Sequence[tuple[Purpose, int]]] = {
    Trim: (("trim", 16), ("ahead", 2)),
    Compact: (("checkpoint", 2), ("tool_result", 200)),
    Tiered: (("task", 100), ("tasks", 64)),
}


def superseded_links(match: SessionMatch) -> set[int]:
    """Return the sequence numbers that the request removes from the history, without instructions."""
    superseded = set(match.decision.superseded)
    if not superseded:
        return superseded
    return superseded - {row.row.seq for row in match.rows if row.row.seq in superseded and not row.row.is_link}


def restored_links(match: SessionMatch) -> set[int]:
    """Return the sequence numbers that the request restores to the history, without instructions."""
    restored = set(match.decision.restored)
    if not restored:
        return restored
    return {row.row.seq for row in match.rows if row.row.seq in restored and row.row.is_link}


async def load_epoch_inputs(
    connection: Connection, tenant: str, match: SessionMatch, strategy: Strategy
) -> EpochInputs:
    """Load the epoch inputs of ``strategy`` for the matched session, which must exist.

    State, log and summaries are those of the history that the request carries.
    """
    assert match.session is not None
    session_id = match.session.id
    inputs = EpochInputs()
    taken_back = superseded_links(match)
    if isinstance(strategy, Full | Slim | Tiered):
        inputs = await terse.log_inputs(connection, tenant, session_id, restored=match.decision.restored)
        inputs = replace(inputs, terse=tuple(e for e in inputs.terse if e.seq not in taken_back))
    if isinstance(strategy, Window):
        inputs = await _with_notes(connection, tenant, session_id, match.decision, inputs)
    made: list[Summary] = []
    for purpose, limit in SUMMARIES.get(type(strategy), ()):
        made += await summaries.newest(connection, tenant, session_id, [purpose], limit=limit)
    changed = taken_back | restored_links(match)
    good = [s for s in made if not any(s.first_seq <= seq <= s.last_seq for seq in changed)]
    return replace(inputs, summaries=tuple(good))


async def _with_notes(
    connection: Connection, tenant: str, session_id: str, decision: Reconciliation, inputs: EpochInputs
) -> EpochInputs:
    state = await states.newest(connection, tenant, session_id, without=decision.superseded, restored=decision.restored)
    scratchpad = await scratchpads.get(connection, tenant, session_id)
    inputs = replace(inputs, scratchpad=scratchpad.text)
    return replace(inputs, state=state.text, state_seq=state.seq) if state else inputs
