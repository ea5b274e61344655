"""Runs a command once, though a client may send it again because the answer did not arrive.

The newest command of each session is kept in the database with its answer, for all replicas and over restarts. The same
command after the same history is a repetition:

- while the first one runs: both get its answer;
- for `RETRIED` after the answer, if the client marks the request as a retry;
- for `REPEATED` after the answer, if there was no other request in between. The same bytes later than that are a new
  command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from hashlib import blake2b

from tersely.domain.errors import NotFound, StoreUnavailable
from tersely.domain.history.chain import DIGEST_BYTES
from tersely.domain.messages import Message
from tersely.service.recognition.incoming_history import digest
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.ops import commands
from tersely.store.ops.commands import CommandClaim

_log = logging.getLogger(__name__)

RETRIED = timedelta(minutes=10)
REPEATED = timedelta(seconds=10)
# The process that runs a command renews its lease this often (seconds).
LEASE = timedelta(seconds=30)
RENEW = 10.0
POLL = 0.2
LIMIT = 15.0
AGAIN = "(This is the answer of a moment ago: the same command came again, and was carried out once.)"
BROKEN_OFF = (
    "The same command was broken off a moment ago. Whether it was carried out is not known: /message list shows "
    "the turns. After a few seconds it can be given again."
)
OVERTAKEN = "Another command came meanwhile; the answer to this one is gone. It was carried out once."

Work = Callable[[], Awaitable[str]]


def identify(messages: Sequence[Message], ids: Mapping[str, str], key: str | None = None) -> bytes:
    """Hash a command with everything before it (other commands and their answers too), the ids in its request, and the
    idempotency ``key`` of its request.
    """
    found = blake2b(digest_size=DIGEST_BYTES)
    for message in messages:
        identity, is_link = digest(message)
        if is_link:
            found.update(identity)
    found.update(repr((sorted(ids.items()), key)).encode("utf-8", "replace"))
    return found.digest()


class CommandDeduplicator:
    """Runs commands once."""

    def __init__(self, database: Database, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._clock = clock
        self._running: set[asyncio.Task[str]] = set()

    async def run_once(self, tenant: str, session_id: str, identity: bytes, work: Work, *, is_retry: bool) -> str:
        """Return the answer of ``work``, or that of the same command before. Raises what ``work`` raises.

        If the client disconnects, the command continues, and a repetition gets its answer.
        """
        while True:
            mine = await self._claim(tenant, session_id, identity, is_retry=is_retry)
            if mine is not None:
                task = asyncio.get_running_loop().create_task(self._run(tenant, mine, work))
                self._running.add(task)
                task.add_done_callback(self._end)
                return await asyncio.shield(task)
            if (text := await self._await_other(tenant, session_id, identity, is_retry=is_retry)) is not None:
                return text

    async def forget(self, tenant: str, session_id: str) -> None:
        """Forget the newest command: another request came in between."""
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            if await commands.newest(connection, tenant, session_id) is not None:
                await commands.forget(connection, tenant, session_id)

    def _end(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the client may be gone

    async def _claim(self, tenant: str, session_id: str, identity: bytes, *, is_retry: bool) -> CommandClaim | None:
        now = self._clock()
        since = now - (RETRIED if is_retry else REPEATED)
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            session = await sessions.get(connection, tenant, session_id)
            if session is None:
                raise NotFound("there is no such session")
            mine = CommandClaim(session_id=session_id, digest=identity, last_seq=session.last_seq, started_at=now)
            is_mine = await commands.claim(connection, tenant, mine, until=now + LEASE, since=since, is_retry=is_retry)
        return mine if is_mine else None

    async def _run(self, tenant: str, mine: CommandClaim, work: Work) -> str:
        prolonging = asyncio.get_running_loop().create_task(self._prolong(tenant, mine))
        try:
            text = await work()
        except Exception:
            await self._release(tenant, mine)
            raise
        finally:
            prolonging.cancel()
        try:
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                await commands.finish(connection, tenant, mine, text.encode("utf-8", "replace"), self._clock())
        except StoreUnavailable as error:
            _log.warning("the answer to a command was not stored: %s", error)
        return text

    async def _prolong(self, tenant: str, mine: CommandClaim) -> None:
        while True:
            await asyncio.sleep(RENEW)
            with suppress(StoreUnavailable):
                async with self._database.transaction(tenant, limit=LIMIT) as connection:
                    await commands.prolong(connection, tenant, mine, self._clock() + LEASE)

    async def _release(self, tenant: str, mine: CommandClaim) -> None:
        with suppress(StoreUnavailable):
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                await commands.release(connection, tenant, mine)

    async def _await_other(self, tenant: str, session_id: str, identity: bytes, *, is_retry: bool) -> str | None:
        """Return the answer of a command that another process runs; None if that failed, so that it may be run here."""
        while True:
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                newest = await commands.newest(connection, tenant, session_id)
            if newest is None:
                return None
            if newest.digest != identity:
                return OVERTAKEN
            if newest.text is not None:
                text = newest.text.decode()
                return text if is_retry else f"{text}\n{AGAIN}"
            if newest.until <= self._clock():
                return BROKEN_OFF
            await asyncio.sleep(POLL)
