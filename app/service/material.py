"""What only the start of an epoch needs to know of a session."""

from __future__ import annotations

from dataclasses import replace

from app.domain.history import Material
from app.service.identity import Found
from app.store import scratchpads, states, terse
from app.store.connection import Connection


async def load_material(connection: Connection, tenant: str, found: Found, *, with_notes: bool) -> Material:
    """The terse log and, ``with_notes``, state and scratchpad of the session, which must be there.

    The state is that of the history which the request carries.
    """
    assert found.session is not None
    session_id = found.session.id
    material = await terse.material(connection, tenant, session_id)
    if not with_notes:
        return material
    decision = found.decision
    state = await states.newest(connection, tenant, session_id, without=decision.superseded, revived=decision.revived)
    scratchpad = await scratchpads.get(connection, tenant, session_id)
    return replace(material, state=state.text if state else "", scratchpad=scratchpad.text)
