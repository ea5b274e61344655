"""A large write keeps nobody waiting, and keeps its place among those of its session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from hashlib import blake2b

import pytest
from msgspec import structs

from tersely.domain.errors import NotFound, StoreUnavailable
from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.reconciliation import append_messages
from tersely.store.commit.records import NewSession, RequestWrite
from tersely.store.commit.sizes import LARGE
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history import messages, sessions
from tests import conftest

TENANT = "north"
NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
async def database(database: conftest.Database) -> AsyncIterator[Database]:
    opened = Database(dsn=database.dsn, timeout=20)
    await opened.open()
    yield opened
    await opened.close()


def appended(session_id: str, count: int, word: str) -> RequestWrite:
    """``count`` messages that are added to a session, which is made where there is none."""
    identities = [
        MessageIdentity(
            digest=blake2b(f"{word}{n}".encode(), digest_size=16).digest(), is_link=True, starts_turn=True, role="user"
        )
        for n in range(count)
    ]
    return RequestWrite(
        tenant=TENANT,
        session_id=session_id,
        create=NewSession(metadata=b"{}"),
        mode="append",
        dialect="openai_chat",
        incoming=identities,
        raws=[b'{"role":"user","content":"%s"}' % word.encode()] * count,
        tokens=[3] * count,
        decision=append_messages(identities, last_seq=0, turns=0, turn=0),
        session=None,
        now=NOW,
        is_call=False,
    )


async def stored(database: Database, session_id: str) -> list[tuple[int, bytes]]:
    async with database.reading(TENANT) as connection:
        session = await sessions.get(connection, TENANT, session_id)
        rows = await messages.live_from(connection, TENANT, session_id, 1)
    assert session is not None
    assert session.last_seq == len(rows)
    return [(row.seq, row.raw) for row in rows]


async def test_small_writes_do_not_wait_for_a_large_one(database: Database) -> None:
    writer = Writer(database)
    large = writer.submit(appended("a", 4 * LARGE, "large"))
    await asyncio.sleep(0.01)
    await writer.write(appended("b", 2, "small"))
    assert not large.done()
    await large
    assert [seq for seq, _ in await stored(database, "a")] == list(range(1, 4 * LARGE + 1))
    assert len(await stored(database, "b")) == 2
    assert not writer._sessions
    assert not writer._queues


async def test_writes_of_one_session_keep_their_order(database: Database) -> None:
    writer = Writer(database)
    writes = [appended("a", size, f"w{n}") for n, size in enumerate((1, LARGE + 1, 2, LARGE + 5, 1))]
    await asyncio.gather(*map(writer.submit, writes))
    raws = [raw for _, raw in await stored(database, "a")]
    assert raws == [raw for write in writes for raw in write.raws]
    await writer.close()
    assert not writer._sessions


async def test_a_large_write_is_stored_whole_or_not_at_all(database: Database) -> None:
    writer = Writer(database)
    write = appended("a", 2 * LARGE, "large")
    # What the database will not have, in the last portion.
    write = structs.replace(write, raws=[*write.raws[:-1], "no bytes"])
    with pytest.raises((StoreUnavailable, ValueError, TypeError)):
        await writer.write(write)
    async with database.reading(TENANT) as connection:
        assert await sessions.get(connection, TENANT, "a") is None
    await writer.write(appended("a", 2 * LARGE, "again"))
    assert len(await stored(database, "a")) == 2 * LARGE


async def test_what_a_failed_batch_has_stored_is_not_stored_again(database: Database) -> None:
    """One of its writes is for a session that was deleted meanwhile."""
    writer = Writer(database)
    await writer.write(appended("gone", 1, "first"))
    async with database.transaction(TENANT) as connection:
        session = await sessions.get(connection, TENANT, "gone")
        await connection.execute("DELETE FROM sessions WHERE tenant_id = $1 AND id = 'gone'", TENANT)
    late = structs.replace(appended("gone", 1, "second"), create=None, session=session)
    writes = [writer.submit(each) for each in (appended("a", 1, "a"), appended("b", 2, "b"), late)]
    found = await asyncio.gather(*writes, return_exceptions=True)
    assert isinstance(found[2], NotFound)
    assert len(await stored(database, "a")) == 1
    assert len(await stored(database, "b")) == 2
