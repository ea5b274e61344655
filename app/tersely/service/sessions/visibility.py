"""Change who sees a message: the client, the model, both or nobody (tiancaiamao/ai, "Message Visibility")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Protocol

from tersely.domain.errors import Conflict, NotFound
from tersely.domain.history.runs import Run
from tersely.domain.history.sessions import Session
from tersely.service.sessions.pins import require_message, step_of
from tersely.store.commit import turns, visibility
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages
from tersely.store.history.messages import StoredMessage


class MemoryRetelling(Protocol):
    """Rewrites the memory entries of ranges, which are stored first, in the transaction that changes them."""

    async def enqueue_rewrites(
        self, connection: Connection, tenant: str, session: Session, memory_runs: Iterable[tuple[Run, ...]] | None
    ) -> None: ...

    async def rewrite_memory(
        self, tenant: str, session: Session, memory_runs: Iterable[tuple[Run, ...]] | None
    ) -> None: ...


class Visibility:
    """Changes the visibility of messages, within a tenant."""

    def __init__(self, database: Database, *, memory: MemoryRetelling, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._memory = memory
        self._clock = clock

    async def change(
        self, tenant: str, session_id: str, seq: int, *, client_visible: bool | None, model_visible: bool | None
    ) -> StoredMessage:
        """Change who sees message ``seq`` (None: as it is) and return the message.

        Calls and their results are hidden from the model, and shown to it, together: providers refuse one without the
        other. Raises `NotFound`; `Conflict` for instructions, for what is no longer part of the history, and for calls
        to tools of Tersely's own.
        """
        ranges: list[tuple[Run, ...]] = []
        async with self._database.edit(tenant, session_id) as connection:
            session = await turns.lock(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            message = await require_message(connection, tenant, session_id, seq)
            await self._check(connection, tenant, session_id, message)
            now = self._clock()
            if client_visible is not None and client_visible != message.client_visible:
                await visibility.set_client_visible(connection, tenant, session, seq, now, visible=client_visible)
            if model_visible is not None and model_visible != message.model_visible:
                step = await _step(connection, tenant, session_id, message)
                ranges = await visibility.set_model_visible(
                    connection, tenant, session, step, now, visible=model_visible
                )
            await self._memory.enqueue_rewrites(connection, tenant, session, ranges)
            found = await require_message(connection, tenant, session_id, seq)
        await self._memory.rewrite_memory(tenant, session, ranges)
        return found

    async def _check(self, connection: Connection, tenant: str, session_id: str, message: StoredMessage) -> None:
        if message.turn == 0:
            raise Conflict(f"message {message.seq} is an instruction: each request brings its own", field="seq")
        is_hidden_alone = message.status == "dropped" and not message.model_visible
        if message.status != "live" and not is_hidden_alone:
            raise Conflict(f"message {message.seq} is {message.status}: it is in no view", field="seq")
        if await visibility.is_tersely_traffic(connection, tenant, session_id, message.seq):
            raise Conflict(f"message {message.seq} belongs to a tool of Tersely's own", field="seq")


async def _step(connection: Connection, tenant: str, session_id: str, message: StoredMessage) -> Sequence[int]:
    """Return the message, and the calls and results that belong to it."""
    seqs = await visibility.of_turn(connection, tenant, session_id, message.turn)
    return sorted(step_of(message.seq, await messages.content(connection, tenant, session_id, seqs)))
