"""The cached tail of a session equals the stored one, or it is not used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b

import pytest

from tersely.domain.history.history import Epoch, HeadMessage
from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.reconciliation import reconcile
from tersely.domain.messages import Role
from tersely.service.recognition.incoming_history import extend
from tersely.store.commit import turns
from tersely.store.commit.records import CallReport, NewEpoch, NewReply, NewSession, ReplyWrite, RequestWrite
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tersely.store.history.lookups import Lookups
from tersely.store.history.sessions import ReplyMatch, write_epoch
from tersely.store.history.tail_cache import TailCache, cached_tail
from tests import conftest

TENANT = "north"
START = datetime(2026, 1, 1, 12, tzinfo=UTC)
SHOWN = b'{"text":"what the client was shown of the reply"}'


def identity_of(role: Role, words: str) -> MessageIdentity:
    digest = blake2b(f"{role}{words}".encode(), digest_size=16).digest()
    return MessageIdentity(digest=digest, is_link=role != "system", starts_turn=role == "user", role=role)


@dataclass(slots=True)
class Talk:
    """A client's history, and the chain after each of its replies, the newest first."""

    id: str
    history: list[MessageIdentity] = field(default_factory=lambda: [identity_of("system", "be brief")])
    chains: list[bytes] = field(default_factory=list)


class Worker:
    """The part of a service that writes and looks up."""

    def __init__(self, database: Database, budget: int = 1_000_000) -> None:
        self.database = database
        self.tails = TailCache(budget)
        self.writer = Writer(database, tail_cache=self.tails)
        self.lookups = Lookups(database, self.tails)

    async def find(self, talk: Talk) -> ReplyMatch:
        hit = await self.lookups.find(TENANT, talk.chains, None)
        assert hit is not None
        return hit

    async def turn(
        self, talk: Talk, words: str, reply: str, *, at: int, apart: bool = False, cuts: bool = False
    ) -> None:
        """Ask and be answered, ``at`` seconds after the start; ``apart``: in two writes."""
        hit = await self.find(talk) if talk.chains else None
        talk.history.append(identity_of("user", words))
        session, rows = (hit.session, [tail.row for tail in hit.tail or ()]) if hit else (None, [])
        last_seq, turn = (session.last_seq, session.turns) if session else (0, 0)
        now = START + timedelta(seconds=at)
        request = RequestWrite(
            tenant=TENANT,
            session_id=talk.id,
            create=None if session else NewSession(client_id="c", metadata=b'{"a":1}'),
            mode="full",
            dialect="openai_chat",
            incoming=talk.history[:],
            raws=[b"{}"] * len(talk.history),
            tokens=[3] * len(talk.history),
            decision=reconcile(rows, talk.history, last_seq=last_seq, turns=turn, first_link=_before(hit, talk)),
            session=session,
            now=now,
        )
        written = self.writer.submit(request)
        if apart:
            await written
        answer = identity_of("assistant", reply)
        chain = b""
        for link in talk.history:
            chain = extend(chain, link.digest) if link.is_link else chain
        chain = extend(chain, answer.digest)
        epoch = None
        if cuts:
            assert session is not None
            epoch = _epoch(session.epoch + 1, cut=session.last_seq + 1, at=now)
        answered = ReplyWrite(
            request=request,
            replies=[
                NewReply(
                    raw=SHOWN, model_raw=SHOWN[:9] + reply.encode() + SHOWN[9:],
                    digest=answer.digest, chain=chain, tokens=5, finish="stop",
                    terse=((reply, "model"),),
                )
            ],
            report=CallReport(
                model="m", strategy="slim", epoch=0, cut=1, tools=None, tokens_before=1, tokens_after=1, status=200
            ),
            started=now,
            now=now + timedelta(milliseconds=1),
            epoch=epoch,
            request_stored=written,
        )  # fmt: skip
        await self.writer.submit(answered)
        talk.history.append(answer)
        talk.chains.insert(0, chain)


def _before(hit: ReplyMatch | None, talk: Talk) -> int:
    """Links of the history in front of the rows at hand."""
    if hit is None:
        return 0
    known = [tail.row for tail in hit.tail or () if tail.row.is_link]
    return len([link for link in talk.history if link.is_link]) - 1 - len(known)


def _epoch(number: int, *, cut: int, at: datetime) -> NewEpoch:
    head = HeadMessage(layer="activity_log", role="user", text="what was", tokens=2)
    epoch = Epoch(
        number=number, cut=cut, head=(head,), kept=(), reason="stride", fingerprint="f", references=(), created_at=at
    )
    return NewEpoch(epoch=epoch, plan=write_epoch(epoch), tokens_before=9, tokens_after=2)


@pytest.fixture(params=["", "on"], ids=["", "pooler"])
async def database(request: pytest.FixtureRequest, database: conftest.Database) -> AsyncIterator[Database]:
    opened = Database(dsn=database.dsn, timeout=20, pooler=request.param or "off")
    await opened.open()
    yield opened
    await opened.close()


async def as_stored(database: Database, talk: Talk) -> ReplyMatch:
    """Return the tail that a process without a cache finds."""
    return await Worker(database).find(talk)


async def assert_right_tail(worker: Worker, talk: Talk, *, remembered: bool) -> None:
    """Check that ``worker`` finds the stored tail; ``remembered``: without reading it again."""
    before = worker.tails.get(TENANT, talk.id)
    hit = await worker.find(talk)
    assert hit == await as_stored(worker.database, talk)
    assert (before is not None and hit.tail is before.rows) == remembered


@pytest.mark.parametrize("apart", [False, True])
async def test_the_tail_cache_equals_the_store(database: Database, apart: bool) -> None:
    worker, talk = Worker(database), Talk("s")
    for number in range(4):
        await worker.turn(talk, f"question {number}", f"answer {number}", at=number, apart=apart)
        await assert_right_tail(worker, talk, remembered=True)
    await worker.turn(talk, "cut here", "so be it", at=10, apart=apart, cuts=True)
    await assert_right_tail(worker, talk, remembered=True)
    assert [tail.row.seq for tail in (await worker.find(talk)).tail or ()] == [1, 10, 11]
    await worker.turn(talk, "after the cut", "yes", at=11, apart=apart)
    await assert_right_tail(worker, talk, remembered=True)


async def test_turns_that_another_worker_wrote_are_seen(database: Database) -> None:
    one, other, talk = Worker(database), Worker(database), Talk("s")
    for number, worker in enumerate([one, one, other, one, one, other]):
        await worker.turn(talk, f"question {number}", f"answer {number}", at=number)
        await assert_right_tail(one if worker is other else other, talk, remembered=False)
    assert [tail.row.seq for tail in (await one.find(talk)).tail or ()] == list(range(1, 14))


async def test_an_edit_is_seen(database: Database) -> None:
    worker, talk = Worker(database), Talk("s")
    await worker.turn(talk, "first", "one", at=0)
    await worker.turn(talk, "second", "two", at=1)
    async with database.transaction(TENANT) as connection:
        session = await turns.lock(connection, TENANT, "s")
        assert session is not None
        await turns.hide(connection, TENANT, session, 1, "dropped", START)

    hit = await worker.find(talk)

    assert [tail.row.status for tail in hit.tail or ()] == ["live", "dropped", "dropped", "live", "live"]
    assert hit.session.edited
    await assert_right_tail(worker, talk, remembered=False)


async def test_recreated_session_with_equal_content_is_another_session(database: Database) -> None:
    worker, other, talk = Worker(database), Worker(database), Talk("s")
    await worker.turn(talk, "first", "one", at=0)
    async with database.transaction(TENANT) as connection:
        assert await sessions.delete(connection, TENANT, "s")
    again = Talk("s", history=[identity_of("system", "be longwinded")])
    await other.turn(again, "first", "one", at=60)
    assert again.chains == talk.chains

    await assert_right_tail(worker, talk, remembered=False)

    rows = list((await worker.find(talk)).tail or ())
    assert rows[0].row.digest == identity_of("system", "be longwinded").digest
    assert rows[0].created_at == START + timedelta(seconds=60)


async def test_nothing_of_another_tenant_is_found(database: Database) -> None:
    worker, talk = Worker(database), Talk("s")
    await worker.turn(talk, "first", "one", at=0)
    assert await worker.lookups.find("south", talk.chains, None) is None
    assert await worker.lookups.find(TENANT, talk.chains, None) is not None
    found = await asyncio.gather(*(worker.lookups.find(tenant, talk.chains, None) for tenant in (TENANT, "south") * 10))
    assert [hit is not None for hit in found] == [True, False] * 10


async def test_an_evicted_tail_is_read_again(database: Database) -> None:
    talks = [Talk(f"s{number}") for number in range(8)]
    worker = Worker(database, budget=20_000)
    for number, talk in enumerate(talks):
        await worker.turn(talk, f"hello {number}", f"hi {number}", at=number)
    assert 0 < len(worker.tails) < len(talks)
    assert worker.tails.get(TENANT, "s0") is None
    for talk in talks:
        assert await worker.find(talk) == await as_stored(database, talk)
        await worker.turn(talk, "go on", "well", at=100)


async def test_the_budget_holds(database: Database) -> None:
    worker, talk = Worker(database), Talk("s")
    await worker.turn(talk, "first", "one", at=0)
    hit = await worker.find(talk)
    size = cached_tail(hit.session, hit.tail or (), b"").size
    small = TailCache(size * 2)
    for number in range(5):
        small.put(str(number), cached_tail(hit.session, hit.tail or (), b"chain"))
        assert len(small) == min(number + 1, 2)
    assert small.ending_with("3", b"chain") is not None
    assert small.ending_with("2", b"chain") is None
    small.put("9", cached_tail(hit.session, list(hit.tail or ()) * 9, b"chain"))
    assert small.ending_with("9", b"chain") is None, "what is over the whole budget is not remembered at all"
    assert len(small) == 2
