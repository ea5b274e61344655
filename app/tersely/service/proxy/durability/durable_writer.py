"""Stores every reply that a client has read to its end: at once, or from a spool when the database is back.

A reply's end waits for the database within the database timeout. Then request and reply go to the spool of this process
as one exchange, flushed to disk before the client sees the end. Exchanges are replayed in their order, each exactly
once; a call that continues one of them waits for it. The spools of processes that have ended are adopted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from tersely.dialects.registry import DIALECTS
from tersely.domain.client_ids import ClientIds
from tersely.domain.errors import InvalidRequest, NotFound, StoreRefused, StoreUnavailable, TerselyError
from tersely.domain.history.sessions import Session
from tersely.service.common.metrics import Metrics
from tersely.service.common.offload import run_in_thread_if_large
from tersely.service.proxy.durability.spool_marks import SpoolMarks
from tersely.service.recognition import session_lookup
from tersely.service.recognition.incoming_history import IncomingHistory, extend, hash_history
from tersely.service.recognition.session_lookup import SessionHints
from tersely.store.commit import late_writes, spool
from tersely.store.commit.exchanges import Exchange, decode, encode, exchange_of, write_of
from tersely.store.commit.records import NewSession, ReplyWrite, StoredReply
from tersely.store.commit.spool import SpoolFile, SpoolFull
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history.artifacts import spilled

_log = logging.getLogger(__name__)

# Seconds. How often a replay is tried while the database is away, and how often the directory is searched for the
# spools of processes that have ended.
RETRY_EVERY = 0.25
ADOPT_EVERY = 5.0
# Seconds for one replay. Longer than a call may wait: otherwise one slow exchange would block all behind it.
REPLAY_LIMIT = 60.0
# After so many failures with the database present, an exchange is tried less often (seconds). Unrelated exchanges go
# first meanwhile.
MOST_FAILURES = 3
RETRY_FAILED_EVERY = 5.0
# How often a call that waits for a replay checks again (seconds).
LOOK_EVERY = 0.05
# A session that a replay made is compared with newer ones after so many seconds, and after the database timeout again:
# a call that was under way at that moment may have made another one.
REJOIN_AFTER = 0.5
# How long the database remembers which exchanges were replayed, beyond the life of their spool.
REMEMBERED = timedelta(days=7)

# Tenant, kind and value of something by which a later call may continue an exchange.
Key = tuple[str, str, str | bytes]


class _SpooledExchange(msgspec.Struct, eq=False):
    """An exchange in a file. ``pending``: its writes, which may be under way; the last one is the reply's. After
    ``failures`` it is tried again at ``retry_at``, in the loop's time.
    """

    file: SpoolFile
    place: int
    tenant: str
    keys: frozenset[Key]
    pending: Sequence[asyncio.Future[Any]] = ()
    failures: int = 0
    retry_at: float = 0.0

    @property
    def is_stuck(self) -> bool:
        """True after so many failures that other calls of its tenant no longer wait for it at other replicas."""
        return self.failures >= MOST_FAILURES


class _QueuedExchange(msgspec.Struct, eq=False):
    """An exchange on its way into the file."""

    payload: bytes
    exchange: Exchange
    pending: Sequence[asyncio.Future[Any]]
    done: asyncio.Future[None]


class DurableWriter:
    """Stores exchanges, and replays those that had to wait."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        metrics: Metrics,
        *,
        directory: Path,
        limit: int,
        name: str,
        clock: Callable[[], datetime],
    ) -> None:
        """``directory`` holds the spools of this database, at most ``limit`` bytes; ``name`` names this process."""
        self._database = database
        self._writer = writer
        self._metrics = metrics
        self._directory = directory
        self._limit = limit
        self._name = name
        self._clock = clock
        self._marks = SpoolMarks(database, process=name, clock=clock)
        self._own: SpoolFile | None = None
        self._counts: dict[SpoolFile, int] = {}
        self._queue: deque[_SpooledExchange] = deque()
        self._keys: Counter[Key] = Counter()
        self._damaged: set[SpoolFile] = set()
        self._unwritten: list[_QueuedExchange] = []
        self._file_lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._replayed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """The number of exchanges that wait to be replayed."""
        return len(self._queue)

    async def open(self) -> None:
        """Adopt the spools of processes that have ended, and start to replay."""
        await self._adopt()
        for work in (self._keep_replaying, self._keep_adopting):
            self._start(asyncio.get_running_loop().create_task(work()))

    async def close(self) -> None:
        """Stop. Waiting exchanges stay in their file, for the process that adopts it."""
        if self._queue:
            _log.warning("exchanges that wait in the spool for the next start: %d", len(self._queue))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        files = set(self._counts) | ({self._own} if self._own else set())
        for file in files:
            if file is self._own and not self._counts.get(file):
                file.remove()
            else:
                file.close()
        self._counts.clear()
        self._own = None

    def _start(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Storing

    async def commit(self, write: ReplyWrite, *, own_id: str | None) -> StoredReply | None:
        """Return when the exchange is in the database or in the spool; None if the writer did not store it.

        ``own_id`` is the session id of Tersely's own header. Raises `StoreUnavailable` if neither takes the exchange,
        `NotFound` if its session has been deleted.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._database.timeout
        reply = self._writer.submit(write)
        failure: Exception
        try:
            return await _wait_until(reply, end)
        except TimeoutError as error:
            failure = error
            self._writer.withdraw(write)
            self._writer.withdraw(write.request)
        except (TerselyError, ValueError) as error:
            failure = error
        _log.info("a reply was not stored at once: %s", type(failure).__name__)
        client = ClientIds(id=write.request.create.client_id if write.request.create else None)
        exchange = exchange_of(write, own_id=own_id, client=client)
        if self._keys.keys().isdisjoint(_keys_of(exchange)) and await self._write_within(exchange, end):
            return None
        # The last one, that of the reply, decides whether the exchange is stored, also where it has failed.
        pending = (reply,) if write.request_stored is None else (write.request_stored, reply)
        await self.spool(exchange, pending)
        return None

    async def _write_within(self, exchange: Exchange, end: float) -> bool:
        """Try to store the exchange until ``end``, in the loop's time; return whether it is stored."""
        now = asyncio.get_running_loop().time
        while (left := end - now()) > 0:
            if not await self._database.wait_until_back(left, exchange.tenant):
                return False
            try:
                await self._write(exchange, limit=max(end - now(), RETRY_EVERY))
                return True
            except StoreRefused:
                raise
            except (ValueError, InvalidRequest) as error:  # what cannot be sent to the database
                raise StoreRefused("the reply cannot be stored") from error
            except StoreUnavailable:
                await asyncio.sleep(max(0.0, min(RETRY_EVERY, end - now())))
        return False

    async def spool(self, exchange: Exchange, pending: Sequence[asyncio.Future[Any]] = ()) -> None:
        """Return when the exchange is on disk. Raises `StoreUnavailable` if the spool does not take it."""
        payload = await run_in_thread_if_large(sum(map(len, exchange.raws)), encode, exchange)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.append(_QueuedExchange(payload, exchange, pending, done))
        if len(self._unwritten) == 1:
            self._start(asyncio.get_running_loop().create_task(self._write_file()))
        await asyncio.shield(done)

    async def _write_file(self) -> None:
        async with self._file_lock:
            while batch := self._unwritten[:]:
                try:
                    file, places = await asyncio.to_thread(self._append, [each.payload for each in batch])
                except OSError as error:
                    del self._unwritten[: len(batch)]
                    self._metrics.write_failures.labels("lost").inc(len(batch))
                    _log.error("an exchange was not written to the spool: %s", error.strerror or type(error).__name__)
                    for each in batch:
                        _fail(each.done, StoreUnavailable("the database is away, and the spool takes nothing more"))
                    continue
                del self._unwritten[: len(batch)]
                for each, place in zip(batch, places, strict=True):
                    self._add(
                        _SpooledExchange(
                            file, place, each.exchange.tenant, _keys_of(each.exchange), tuple(each.pending)
                        )
                    )
                await self._marks.write()
                for each in batch:
                    if not each.done.done():
                        each.done.set_result(None)
                self._metrics.write_failures.labels("spooled").inc(len(batch))
                _log.warning("exchanges that wait in the spool for the database: %d", len(self._queue))

    def _append(self, payloads: list[bytes]) -> tuple[SpoolFile, list[int]]:
        if spool.total_size(self._directory) + sum(map(len, payloads)) > self._limit:
            raise SpoolFull(0, "it has reached TERSELY_SPOOL_SIZE")
        if self._own is None:
            self._own = SpoolFile.create(self._directory, self._name)
        return self._own, self._own.append(payloads)

    def _add(self, waiting: _SpooledExchange) -> None:
        self._queue.append(waiting)
        self._counts[waiting.file] = self._counts.get(waiting.file, 0) + 1
        self._keys.update(waiting.keys)
        self._marks.add(waiting.tenant)
        self._metrics.spooled.set(len(self._queue))
        self._wake.set()

    # Order

    def may_wait(self, *, is_delta: bool) -> bool:
        """Return whether `wait_for_earlier` may have to wait."""
        return bool(self._keys) or is_delta

    async def wait_for_earlier(
        self, tenant: str, hints: SessionHints, incoming: IncomingHistory, *, is_delta: bool
    ) -> None:
        """Return when no exchange waits that the request continues.

        ``is_delta``: the request does not carry its history, so that the spools of other processes of this machine
        count too, and of other machines as far as they could say so. Raises `StoreUnavailable` where that takes longer
        than the database timeout.
        """
        keys = _keys_of_request(tenant, hints, incoming) if self._keys else frozenset()

        def is_clear() -> bool:
            return self._keys.keys().isdisjoint(keys)

        async def is_all_stored() -> bool:
            return is_clear() and not (is_delta and (self._others_wait() or await self._marks.others_wait(tenant)))

        now = asyncio.get_running_loop().time
        if is_delta and not self._database.is_away(tenant) and (grace := await self._marks.grace(tenant)):
            await asyncio.sleep(grace)
        end = now() + self._database.timeout
        while not await is_all_stored():
            if self._database.is_away(tenant) or now() >= end:
                raise StoreUnavailable("earlier calls of this session are not in the database yet")
            self._replayed.clear()
            with suppress(TimeoutError):  # the file of another process tells nobody that it is empty
                async with asyncio.timeout(LOOK_EVERY):
                    await self._replayed.wait()

    async def has_all(self, tenant: str, session: Session) -> bool:
        """Return whether ``session`` is as the database has it now, and the database has every exchange of it: none
        waits in the spool of another process. Raises `StoreUnavailable`.
        """
        if self._database.is_away(tenant) or self._others_wait() or await self._marks.grace(tenant):
            return False
        return await self._marks.is_unchanged(tenant, session)

    def _others_wait(self) -> bool:
        return spool.has_others(
            self._directory, frozenset(file.path.name for file in (*self._counts, self._own) if file)
        )

    # Replaying

    async def _keep_replaying(self) -> None:
        while True:
            await self._wake.wait()
            await self._marks.write()
            waiting = self._next()
            if waiting is None:
                if await self._marks.remove_left() and not self._queue:
                    self._wake.clear()
                elif self._next() is None:
                    await asyncio.sleep(RETRY_EVERY)
                continue
            try:
                await self._replay(waiting)
            except StoreUnavailable as error:
                await self._note_failure(waiting, error)
                await self._database.wait_until_back(RETRY_EVERY, waiting.tenant)
                await asyncio.sleep(RETRY_EVERY)
                continue
            await self._finish(waiting)

    def _next(self) -> _SpooledExchange | None:
        """Return the first exchange that may be tried now and continues none that waits for its next try. Exchanges of
        tenants whose part of the database is away let the others pass.
        """
        now = asyncio.get_running_loop().time()
        stuck: set[Key] = set()
        away: dict[str, bool] = {}
        for waiting in self._queue:
            if waiting.tenant not in away:
                away[waiting.tenant] = self._database.is_away(waiting.tenant)
            if waiting.retry_at <= now and not away[waiting.tenant] and stuck.isdisjoint(waiting.keys):
                return waiting
            stuck |= waiting.keys
        return None

    async def _note_failure(self, waiting: _SpooledExchange, error: StoreUnavailable) -> None:
        """Count a failure, unless the database is away; after too many, postpone the next try."""
        if self._database.is_away(waiting.tenant):
            return
        waiting.failures += 1
        if waiting.failures == MOST_FAILURES:
            await self._marks.remove(waiting.tenant)
        if waiting.is_stuck:
            waiting.retry_at = asyncio.get_running_loop().time() + RETRY_FAILED_EVERY
            _log.warning("an exchange in the spool failed %d times: %s", waiting.failures, error.detail)

    async def _replay(self, waiting: _SpooledExchange) -> None:
        """Store a waiting exchange. Raises `StoreUnavailable` where the database is away."""
        for each in waiting.pending:
            with suppress(Exception):
                await asyncio.wait_for(asyncio.shield(each), 2 * self._database.timeout)
        is_stored = bool(waiting.pending) and _is_stored(waiting.pending[-1])
        payload, name = b"", f"{self._name}-{waiting.place}"
        try:
            payload = await asyncio.to_thread(waiting.file.read, waiting.place)
            exchange = await run_in_thread_if_large(len(payload), decode, payload)
            name = exchange.id
            if is_stored:
                write = (await self._plan(exchange, None))[0] if exchange.decision is not None else None
            else:
                write = await self._write(exchange, limit=REPLAY_LIMIT)
            if write is not None and write.request.create is not None and exchange.own_id is None:
                self._start(asyncio.get_running_loop().create_task(self._rejoin(write, write.request.create)))
        except NotFound:
            _log.warning("an exchange was dropped: its session was deleted before the exchange was stored")
        except StoreRefused as error:
            await self._set_aside(name, payload, error)
        except StoreUnavailable:
            raise
        except OSError as error:
            self._damaged.add(waiting.file)
            _log.error("a spool cannot be read: %s", error.strerror or type(error).__name__)
        except Exception as error:  # noqa: BLE001 one exchange must not hold up all others
            await self._set_aside(name, payload, error)

    async def _set_aside(self, name: str, payload: bytes, error: Exception) -> None:
        """Move an exchange that cannot be stored to a file of its own."""
        try:
            path = await asyncio.to_thread(spool.keep_refused, self._directory, name, payload)
        except OSError as failure:
            raise StoreUnavailable("a refused exchange cannot be set aside") from failure
        self._metrics.write_failures.labels("refused").inc()
        _log.error("an exchange could not be stored (%s) and is kept in %s", type(error).__name__, path)

    async def _finish(self, waiting: _SpooledExchange) -> None:
        self._queue.remove(waiting)
        self._counts[waiting.file] -= 1
        if not waiting.is_stuck:
            await self._marks.remove(waiting.tenant)
        self._keys.subtract(waiting.keys)
        for key in waiting.keys:
            if not self._keys[key]:
                del self._keys[key]
        self._metrics.spooled.set(len(self._queue))
        if not self._counts[waiting.file]:
            await self._empty(waiting.file)
        if not self._queue:
            _log.info("the spool is empty")
            with suppress(StoreUnavailable):
                async with self._database.transaction(waiting.tenant) as connection:
                    await late_writes.forget_replays(connection, waiting.tenant, self._clock() - REMEMBERED)
        self._replayed.set()

    async def _empty(self, file: SpoolFile) -> None:
        async with self._file_lock:
            if self._counts[file]:
                return
            is_kept = file is self._own and file not in self._damaged
            if not is_kept:
                del self._counts[file]
                self._own = None if file is self._own else self._own
            release = file.clear if is_kept else file.set_aside if file in self._damaged else file.remove
            try:
                await asyncio.to_thread(release)
            except OSError as error:
                _log.error("a spool could not be emptied: %s", error.strerror or type(error).__name__)

    async def _rejoin(self, write: ReplyWrite, create: NewSession) -> None:
        """Look again whether another replica made a session of the same conversation at the same moment."""
        for pause in (REJOIN_AFTER, self._database.timeout):
            await asyncio.sleep(pause)
            with suppress(StoreUnavailable, StoreRefused, NotFound):
                if await late_writes.rejoin(self._database, self._writer.tails, write, create, now=self._clock()):
                    _log.info("an exchange was moved to the session that continues it")

    async def _write(self, exchange: Exchange, *, limit: float | None = None) -> ReplyWrite:
        """Store an exchange, unless it is stored already. Returns the write."""
        write, version, chains = await self._plan(exchange, limit)
        await late_writes.write_late(
            self._database, self._writer.tails, write, outcome=exchange.outcome, version=version,
            is_named=exchange.own_id is not None, now=self._clock(), chains=chains, limit=limit,
        )  # fmt: skip
        return write

    async def _plan(self, exchange: Exchange, limit: float | None) -> tuple[ReplyWrite, int | None, Sequence[bytes]]:
        """Return the write of an exchange, the version of the session that its decision was made on, and the chains by
        which no session was found.
        """
        dialect = DIALECTS[exchange.dialect]  # type: ignore[index]
        if exchange.decision is not None:
            write = write_of(
                exchange,
                session_id=exchange.session_id,
                create=exchange.create,
                decision=exchange.decision,
                spill=lambda index: spilled([dialect.read_message(exchange.raws[index])], 0),
            )
            return write, exchange.version, ()
        size = sum(map(len, exchange.raws))
        read = await run_in_thread_if_large(size, lambda: [dialect.read_message(raw) for raw in exchange.raws])
        incoming = await run_in_thread_if_large(size, hash_history, read)
        hints = SessionHints(session_id=exchange.own_id, client=exchange.client, key=exchange.key)
        async with self._database.reading(exchange.tenant, limit=limit) as connection:
            found = await session_lookup.find(
                connection,
                exchange.tenant,
                incoming,
                hints,
                now=exchange.requested_at,
                new_id=lambda: exchange.session_id,
            )
        create = None
        if found.session is None:
            create = NewSession(parent=found.parent, client_id=exchange.client.id, spare_id=found.fallback_id)
        write = write_of(
            exchange,
            session_id=found.session_id,
            create=create,
            decision=found.decision,
            spill=lambda index: spilled(read, index),
        )
        return write, *((None, incoming.reply_chains()) if found.session is None else (found.session.version, ()))

    # Adopting

    async def _keep_adopting(self) -> None:
        while True:
            await asyncio.sleep(ADOPT_EVERY)
            await self._adopt()

    async def _adopt(self) -> None:
        """Take over the spools of processes that have ended."""
        try:
            for file, records in await asyncio.to_thread(self._read_orphans):
                for waiting in records:
                    self._add(waiting)
                    self._marks.adopt(waiting.tenant, file.path.stem)
                _log.warning("adopted a spool with %d exchanges", len(records))
        except OSError as error:
            _log.error("a spool could not be adopted: %s", error.strerror or type(error).__name__)

    def _read_orphans(self) -> list[tuple[SpoolFile, list[_SpooledExchange]]]:
        own = {file.path for file in (*self._counts, self._own) if file}
        found = []
        for path in spool.orphans(self._directory):
            file = SpoolFile.adopt(path) if path not in own else None
            if file is None:
                continue
            records = [self._indexed(file, place, payload) for place, payload in file.records()]
            if file.is_damaged:
                self._damaged.add(file)
                _log.error("a spool is damaged: %s", file.path)
            if records:
                found.append((file, records))
            elif file.is_damaged:
                file.set_aside()
            else:
                file.remove()
        return found

    def _indexed(self, file: SpoolFile, place: int, payload: bytes) -> _SpooledExchange:
        try:
            exchange = decode(payload)
        except ValueError:  # of another version: the replay moves it out of the spool
            return _SpooledExchange(file, place, "", frozenset())
        return _SpooledExchange(file, place, exchange.tenant, _keys_of(exchange))


def _keys_of(exchange: Exchange) -> frozenset[Key]:
    """Return the keys by which a later call may continue an exchange."""
    tenant = exchange.tenant
    keys: set[Key] = {(tenant, "chain", reply.chain) for reply in exchange.replies if reply.chain is not None}
    chain = b""
    for message in exchange.incoming:
        if message.is_link:
            chain = extend(chain, message.digest)
    keys.add((tenant, "chain", chain))
    if exchange.decision is not None:
        keys.add((tenant, "session", exchange.session_id))
    if exchange.own_id is not None:
        keys.add((tenant, "session", exchange.own_id))
    if exchange.client.id is not None:
        keys.add((tenant, "client", exchange.client.id))
    names = (name for reply in exchange.replies for name in (reply.id, *reply.items))
    keys.update((tenant, "reply", name) for name in names if name)
    return frozenset(keys)


def _keys_of_request(tenant: str, hints: SessionHints, incoming: IncomingHistory) -> frozenset[Key]:
    """Return the keys by which a request may continue an earlier exchange."""
    keys: set[Key] = {(tenant, "chain", chain) for chain in incoming.chains}
    ids: Iterable[str | None] = (hints.session_id, hints.conversation)
    keys.update((tenant, "session", each) for each in ids if each)
    if hints.client.id is not None:
        keys.add((tenant, "client", hints.client.id))
    if hints.reply_id:
        keys.add((tenant, "reply", hints.reply_id))
    return frozenset(keys)


def _is_stored(write: asyncio.Future[Any]) -> bool:
    return write.done() and not write.cancelled() and write.exception() is None


async def _wait_until(write: asyncio.Future[StoredReply], end: float) -> StoredReply:
    """Return the result of a write, which goes on if nobody waits any more. Raises `TimeoutError` at ``end``."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    write.add_done_callback(wake)
    alarm = loop.call_at(end, wake, None)
    try:
        await waiter
    finally:
        alarm.cancel()
        write.remove_done_callback(wake)
    if not write.done():
        raise TimeoutError
    return write.result()


def _fail(done: asyncio.Future[None], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
        done.exception()  # nobody may be waiting any more
