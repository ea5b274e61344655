"""An edit finds what this process had received of its session before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b

import pytest

from tersely.domain.history.links import MessageIdentity
from tersely.domain.history.reconciliation import append_messages
from tersely.store.commit.records import NewSession, RequestWrite
from tersely.store.commit.writer import Writer
from tersely.store.db.connection import Database
from tersely.store.history import sessions
from tests import conftest

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NORTH, SOUTH = "north", "south"


@dataclass(eq=False)
class Deferred:
    """A call that waits for its reply."""

    write: RequestWrite


@pytest.fixture
async def database(database: conftest.Database) -> AsyncIterator[Database]:
    opened = Database(dsn=database.dsn, timeout=20)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def writer(database: Database) -> AsyncIterator[Writer]:
    made = Writer(database)
    database.flush_with(made.flush)
    yield made
    await made.close()


def deferred(writer: Writer, tenant: str, session_id: str) -> Deferred:
    """Have the first question of a session wait for its reply."""
    digest = blake2b(session_id.encode(), digest_size=16).digest()
    identities = [MessageIdentity(digest=digest, is_link=True, starts_turn=True, role="user")]
    call = Deferred(
        RequestWrite(
            tenant=tenant,
            session_id=session_id,
            create=NewSession(metadata=b"{}"),
            mode="append",
            dialect="openai_chat",
            incoming=identities,
            raws=[b'{"role":"user","content":"the question"}'],
            tokens=[3],
            decision=append_messages(identities, last_seq=0, turns=0, turn=0),
            session=None,
            now=NOW,
        )
    )

    def submit(call: Deferred) -> None:
        del writer.deferred[call]
        writer.submit(call.write)

    writer.deferred[call] = submit
    return call


async def test_an_edit_finds_a_question_that_waits_for_its_reply(database: Database, writer: Writer) -> None:
    deferred(writer, NORTH, "one")
    other = deferred(writer, NORTH, "other")

    async with database.edit(NORTH, "one") as connection:
        found = await sessions.get(connection, NORTH, "one")

    assert found is not None
    assert found.last_seq == 1
    assert list(writer.deferred) == [other]


async def test_flush_of_a_tenant_leaves_other_tenants_alone(database: Database, writer: Writer) -> None:
    for session_id in ("one", "other"):
        deferred(writer, NORTH, session_id)
    kept = deferred(writer, SOUTH, "one")

    await database.flush(NORTH, None)

    assert list(writer.deferred) == [kept]
    async with database.reading(NORTH) as connection:
        assert all([await sessions.get(connection, NORTH, name) for name in ("one", "other")])


async def test_flush_waits_for_writes_under_way(database: Database, writer: Writer) -> None:
    first, last = (writer.submit(deferred(writer, NORTH, "one").write) for _ in range(2))
    writer.deferred.clear()

    await asyncio.wait_for(database.flush(NORTH, "one"), 20)

    assert first.done()
    assert last.done()
