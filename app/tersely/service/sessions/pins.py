"""Pin messages, which keeps them in every context, and set their priority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from tersely.domain.errors import Conflict, InvalidRequest, NotFound
from tersely.domain.history.history import IMPORTANT, MAX_PRIORITY
from tersely.domain.history.sessions import Session
from tersely.service.sessions.messages import dialect_of
from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages
from tersely.store.history import pins as marks
from tersely.store.history.messages import StoredMessage


class Pins:
    """Sets pins and priorities, within a tenant. Raises `NotFound`, and `Conflict` for a removed message.

    Each method returns the changed message. Contexts change with the next one.
    """

    def __init__(self, database: Database, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock

    async def get(self, tenant: str, session_id: str, seq: int) -> StoredMessage:
        """Return a message, whatever its status. Raises `NotFound`."""
        async with self._database.reading(tenant) as connection:
            return await require_message(connection, tenant, session_id, seq)

    async def pin(self, tenant: str, session_id: str, seq: int, *, pinned: bool) -> StoredMessage:
        """Pin a message, even if it was cut long ago, or unpin it."""
        async with self._database.edit(tenant, session_id) as connection:
            return await self.pin_within(connection, tenant, session_id, seq, pinned=pinned)

    async def pin_within(
        self, connection: Connection, tenant: str, session_id: str, seq: int, *, pinned: bool
    ) -> StoredMessage:
        """Do what `pin` does, in a transaction of the caller's."""
        session, message = await _lock(connection, tenant, session_id, seq)
        if message.pinned != pinned:
            await marks.pin(connection, tenant, session, seq, self._clock(), pinned=pinned)
            await _carry(connection, tenant, session, message, pinned=pinned)
        return await require_message(connection, tenant, session_id, seq)

    async def set_priority(self, tenant: str, session_id: str, seq: int, priority: int) -> StoredMessage:
        """Set the priority of a message, 0 to 100; from 75 on it counts as important. Raises `InvalidRequest`."""
        async with self._database.edit(tenant, session_id) as connection:
            return await self.set_priority_within(connection, tenant, session_id, seq, priority)

    async def set_priority_within(
        self, connection: Connection, tenant: str, session_id: str, seq: int, priority: int
    ) -> StoredMessage:
        """Do what `set_priority` does, in a transaction of the caller's."""
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be from 0 to {MAX_PRIORITY}, not {priority}", field="priority")
        session, message = await _lock(connection, tenant, session_id, seq)
        if message.priority != priority:
            edits = (message.priority >= IMPORTANT) != (priority >= IMPORTANT)
            await marks.set_priority(connection, tenant, session, seq, priority, self._clock(), edits=edits)
        return await require_message(connection, tenant, session_id, seq)


async def _carry(
    connection: Connection, tenant: str, session: Session, message: StoredMessage, *, pinned: bool
) -> None:
    """Make the next epoch look at a message that an earlier cut removed, or stop it from doing so.

    A pin shows no message that is hidden from contexts.
    """
    if session.plan is None or message.turn == 0 or message.seq >= session.cut or message.status != "live":
        return
    seqs = await turns.live_seqs(connection, tenant, session.id, message.turn, message.turn)
    turn = await messages.content(connection, tenant, session.id, seqs)
    step = step_of(message.seq, turn)
    others = {each.seq for each in turn if each.pinned and each.seq != message.seq}
    if pinned:
        await marks.keep(connection, tenant, session, {*session.plan.kept, *step})
    elif not others & step and message.turn != session.turns:
        await marks.keep(connection, tenant, session, {*session.plan.kept} - step)


def step_of(seq: int, turn: Sequence[StoredMessage]) -> set[int]:
    """Return the sequence numbers of a message, and of the calls and results that belong to it."""
    ids = {each.seq: _call_ids(each) for each in turn}
    step = {seq}
    while True:
        named = set().union(*(ids.get(each, set()) for each in step))
        wider = step | {each for each, own in ids.items() if own & named}
        if wider == step:
            return step
        step = wider


def _call_ids(stored: StoredMessage) -> set[str]:
    message = dialect_of(stored.dialect).read_reply(stored.raw)
    return {call.id for call in message.calls} | {result.call_id for result in message.results}


async def _lock(connection: Connection, tenant: str, session_id: str, seq: int) -> tuple[Session, StoredMessage]:
    session = await turns.lock(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    message = await require_message(connection, tenant, session_id, seq)
    if message.status == "removed":
        raise Conflict(f"message {seq} was removed", field="seq")
    return session, message


async def require_message(connection: Connection, tenant: str, session_id: str, seq: int) -> StoredMessage:
    """Return a message, whatever its status. Raises `NotFound`."""
    found = await messages.content(connection, tenant, session_id, [seq])
    if not found:
        raise NotFound(f"there is no message {seq}")
    return found[0]
