"""State blocks that stand in replies as text, because the session was not under `window` when they came.

When a session becomes one of `window`, they are its states from then on. Blocks that were taken out of a reply when it
came are stored already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tersely.dialects.registry import DIALECTS
from tersely.domain.history.history import Entry
from tersely.domain.history.sessions import Session
from tersely.domain.text.state import HEADING, StateBlock, strip_state
from tersely.domain.text.terse import strip_terse
from tersely.store.db.connection import Connection
from tersely.store.history import messages
from tersely.store.notes import states


def read_visible_states(entries: Iterable[Entry]) -> tuple[StateBlock, ...]:
    """Return the last state block of each reply that its client was shown with the block in it, in order."""
    found = []
    for entry in entries:
        message = entry.message
        if message.role != "assistant" or entry.is_ours or HEADING not in message.text:
            continue
        view = entry.client_view
        if view is not None:
            shown = DIALECTS[view.dialect].read_reply(view.raw).text if view.raw else ""  # type: ignore[index]
            if shown.count(HEADING) < message.text.count(HEADING):
                continue
        if text := read_state(message.text):
            found.append(StateBlock(text=text, seq=entry.seq, source="model", created_at=entry.created_at))
    return tuple(found)


def read_state(text: str) -> str:
    """Return the state that a reply ends up with; empty where it has no block."""
    blocks: Sequence[str] = strip_state(strip_terse(text)[0])[1]
    return blocks[-1] if blocks else ""


async def take_visible_states(connection: Connection, tenant: str, session: Session, since: int) -> None:
    """Store the state blocks that stand in the session's replies from sequence number ``since`` on."""
    found = []
    for stored in await messages.live_replies_with(connection, tenant, session.id, HEADING.encode(), since):
        dialect = DIALECTS[stored.dialect]  # type: ignore[index]
        if text := read_state(dialect.read_reply(stored.raw).text):
            found.append(StateBlock(text=text, seq=stored.seq, source="model", created_at=stored.created_at))
    await states.add_found(connection, tenant, session.id, found)
