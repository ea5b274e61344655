"""Delete oversized tool outputs, each by itself: its message stays, with a notice in its place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from tersely.domain.errors import NotFound
from tersely.domain.text.tool_output import output_digest
from tersely.service.common import tokens
from tersely.service.sessions.artifacts import digest_of
from tersely.service.sessions.messages import dialect_of
from tersely.service.sessions.sessions import DELETE_LIMIT, Sessions
from tersely.store.commit import turns
from tersely.store.db.connection import Database
from tersely.store.history import artifacts, messages
from tersely.store.history.messages import StoredMessage


class ArtifactRemoval:
    """Deletes artifacts, within a tenant."""

    def __init__(self, database: Database, sessions: Sessions, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._sessions = sessions
        self._clock = clock

    async def delete(self, tenant: str, sha256: str) -> None:
        """Delete an output for good, in each message that has it: a notice takes its place.

        What was made of these messages (log lines, summaries, memory, recorded requests) is deleted too, and the next
        context starts an epoch. Raises `InvalidRequest` and `NotFound`.
        """
        digest = digest_of(sha256)
        await self._database.flush(tenant, None)
        async with self._database.reading(tenant) as connection:
            messages = await artifacts.messages_with(connection, tenant, digest)
        if not messages:
            raise NotFound("there is no such artifact")
        for session_id, seq in messages:
            await self._delete_from(tenant, session_id, seq, sha256)

    async def _delete_from(self, tenant: str, session_id: str, seq: int, sha256: str) -> None:
        async with self._database.edit(tenant, session_id, limit=DELETE_LIMIT) as connection:
            session = await turns.lock(connection, tenant, session_id)
            found = await messages.content(connection, tenant, session_id, [seq]) if session is not None else []
            if session is None or not found or found[0].status == "removed":
                return  # it went meanwhile
            shorter = _without_output(found[0], sha256)
            saved = max(0, found[0].tokens - shorter.tokens)
            runs = await turns.replace_content(connection, tenant, session, shorter, tokens=saved, now=self._clock())
            await self._sessions.enqueue_rewrites(connection, tenant, session, runs)
        await self._sessions.rewrite_memory(tenant, session, runs)


def _without_output(message: StoredMessage, sha256: str) -> StoredMessage:
    """Return the message with a notice in place of the output."""
    dialect = dialect_of(message.dialect)

    def shorten(raw: bytes) -> bytes:
        notices = {
            result.call_id: f"[Tool output of {len(result.text):,} characters: deleted]"
            for result in dialect.read_message(raw).results
            if output_digest(result.text) == sha256
        }
        return dialect.with_results(raw, notices) if notices else raw

    raw = shorten(message.raw)
    model_raw = None if message.model_raw is None else shorten(message.model_raw)
    count = tokens.estimate_message(dialect.read_message(raw if message.client_visible else model_raw or raw))
    return replace(message, raw=raw, model_raw=model_raw, tokens=count)
