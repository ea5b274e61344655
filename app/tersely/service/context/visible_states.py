"""Read state blocks from replies that show them as text, because the session did not use `window` at that time.

When a session changes to `window`, these become its states. Blocks that were stripped from a reply are stored already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tersely.dialects.registry import dialect_named
from tersely.domain.history.history import Entry
from tersely.domain.history.sessions import Session
from tersely.domain.text.state import HEADING, StateBlock, strip_state
from tersely.domain.text.terse import strip_terse
from tersely.store.db.connection import Connection
from tersely.store.history import messages
from tersely.store.notes import states


def read_visible_states(entries: Iterable[Entry]) -> tuple[StateBlock, ...]:
    """Return the last state block of each reply whose client saw the block, in order."""
    found = []
    for entry in entries:
        message = entry.message
        if message.role != "assistant" or entry.is_ours or HEADING not in message.text:
            continue
        view = entry.client_view
        if view is not None:
            shown = dialect_named(view.dialect).read_reply(view.raw).text if view.raw else ""
            if shown.count(HEADING) < message.text.count(HEADING):
                continue
        if text := read_state(message.text):
            found.append(StateBlock(text=text, seq=entry.seq, source="model", created_at=entry.created_at))
    return tuple(found)


def read_state(text: str) -> str:
    """Return the last state block of a reply; an empty string if it has none."""
    blocks: Sequence[str] = strip_state(strip_terse(text)[0])[1]
    return blocks[-1] if blocks else ""


async def take_visible_states(connection: Connection, tenant: str, session: Session, since: int) -> None:
    """Store the state blocks of the session's replies from sequence number ``since`` on."""
    found = []
    for stored in await messages.live_replies_with(connection, tenant, session.id, HEADING.encode(), since):
        dialect = dialect_named(stored.dialect)
        if text := read_state(dialect.read_reply(stored.raw).text):
            found.append(StateBlock(text=text, seq=stored.seq, source="model", created_at=stored.created_at))
    await states.add_found(connection, tenant, session.id, found)
