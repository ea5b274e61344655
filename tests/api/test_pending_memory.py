"""Memory entries that are to be written are stored until they are, and belong to their tenant and session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tersely.fakellm.scripted import ReceivedRequest, ScriptedModel, ScriptedReply, run_scripted
from tersely.service.common.metrics import Metrics
from tersely.service.summaries import memory_updates
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.service.summaries.models import Host, Models, SummarizerConfig
from tersely.service.summaries.summarizer import Summarizer
from tersely.store.db import connection
from tersely.store.notes import pending_memory
from tersely.store.notes.pending_memory import PendingMemory
from tersely.store.ops import tenants
from tersely.upstream.client import Timeouts, Upstream
from tests.api.conftest import Api, NewKey, serve
from tests.conftest import Database
from tests.support.stores import open_store

TRIM = {"name": "trim", "max_context_turns": 4}
NOW = datetime.now(UTC)
# A model host for which the operator has no key.
KEYLESS = Host(upstream=Upstream("http://127.0.0.1:1", Timeouts()))


async def rows(database: Database, sql: str = "SELECT * FROM pending_memory ORDER BY first_seq") -> list[Any]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        return list(await admin.fetch(sql))
    finally:
        await admin.close()


async def fill(api: Api, turns: int, session: str = "s", **headers: str) -> None:
    made = await api.http.post("/api/sessions", json={"id": session, "strategy": TRIM}, headers=headers)
    assert made.status_code == 201, made.text
    for number in range(1, turns + 1):
        messages = [
            {"role": "user", "content": f"quokka_{number}"},
            {"role": "assistant", "content": f"wombat_{number}"},
        ]
        answer = await api.http.post(f"/api/sessions/{session}/messages", json={"messages": messages}, headers=headers)
        assert answer.status_code == 201, answer.text


@asynccontextmanager
async def stalled(database: Database, **settings: Any) -> AsyncIterator[Api]:
    """A service whose summaries never end."""

    def stall(_: ReceivedRequest) -> ScriptedReply:
        return ScriptedReply(message={"content": "late"}, first_delay=60)

    async with run_scripted(model=ScriptedModel(script=stall)) as model:
        given = {"summarizer_model": "m", "summarizer_base_url": model.base_url, "summarizer_api_key": "k", **settings}
        async with serve(database.dsn, **given) as api:
            yield api


async def none_left(database: Database) -> None:
    async with asyncio.timeout(20):
        while await rows(database):
            await asyncio.sleep(0.05)


async def test_entries_that_were_written_are_not_pending(api: Api, database: Database) -> None:
    await fill(api, 12)
    await none_left(database)
    assert len(await rows(database, "SELECT 1 FROM memory")) >= 2
    assert (await api.http.post("/api/sessions/s/clear")).status_code == 200
    await none_left(database)
    assert (await api.http.post("/api/sessions/s/turns/t2/drop")).status_code == 200
    await none_left(database)


async def test_long_cleared_history_is_pending_piece_by_piece(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_updates, "PIECE", 2)
    monkeypatch.setattr(memory_updates, "PATIENCE", 0)
    async with stalled(database) as api:
        await fill(api, 3)
        assert (await api.http.post("/api/sessions/s/clear")).status_code == 200
        assert [(row["first_seq"], row["last_seq"]) for row in await rows(database)] == [(1, 2), (3, 4), (5, 6)]


async def test_rest_of_an_entry_is_pending_when_a_turn_is_hidden(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(database.dsn) as api:
        await fill(api, 8)
        await none_left(database)
        (entry,) = await rows(database, "SELECT first_seq, last_seq FROM memory ORDER BY first_seq LIMIT 1")
    monkeypatch.setattr(memory_updates, "PATIENCE", 0)
    async with stalled(database) as api:
        assert (await api.http.post("/api/sessions/s/turns/t1/drop")).status_code == 200
        (row,) = await rows(database)
    assert entry["first_seq"] <= row["first_seq"] <= row["last_seq"] == entry["last_seq"]


async def test_entries_go_with_their_session(database: Database) -> None:
    async with stalled(database) as api:
        await fill(api, 8)
        await fill(api, 8, session="other")
        assert {row["session_id"] for row in await rows(database)} == {"s", "other"}
        assert (await api.http.delete("/api/sessions/s")).status_code == 204
        assert {row["session_id"] for row in await rows(database)} == {"other"}
    # It has stopped, although the summary of a session was under way that is not there any more.


@pytest.fixture
async def store(database: Database) -> AsyncIterator[connection.Database]:
    async with open_store(database) as opened:
        yield opened


async def test_entries_are_their_tenants_alone(
    database: Database, store: connection.Database, new_tenant: NewKey
) -> None:
    async with stalled(database, auth="keys") as api:
        for tenant in ("north", "south"):
            await fill(api, 8, **await new_tenant(tenant))
    async with store.transaction("south") as south:
        assert {row["tenant_id"] for row in await south.fetch("SELECT tenant_id FROM pending_memory")} == {"south"}
        assert await south.execute("DELETE FROM pending_memory WHERE tenant_id = 'north'") == "DELETE 0"
    async with store.transaction("") as nobody:
        assert await nobody.fetch("SELECT 1 FROM pending_memory") == []
        await nobody.execute(pending_memory.LIST)
        assert len(await nobody.fetch("SELECT 1 FROM pending_memory")) >= 2
        assert await nobody.execute("DELETE FROM pending_memory") == "DELETE 0"
    await tenants.forget(store, "north")
    assert {row["tenant_id"] for row in await rows(database)} == {"south"}


CALLER = (("authorization", "Bearer caller"),)


def updates(store: connection.Database, now: datetime, *, host: Host | None = None) -> tuple[MemoryUpdates, Summarizer]:
    """A replica whose clock says ``now``; it does not work in the background. With ``host``, a model summarises."""
    metrics = Metrics()
    config = SummarizerConfig(model="m" if host else None)
    models = Models(config, own=None, hosts={"openai_chat": host} if host else {}, metrics=metrics)
    summarizer = Summarizer(store, models, metrics, clock=lambda: now, monotonic=lambda: 0.0, name="replica")
    return MemoryUpdates(store, summarizer, clock=lambda: now), summarizer


async def test_one_replica_takes_an_entry_over(database: Database, store: connection.Database) -> None:
    async with stalled(database) as api:
        await fill(api, 5)
    (before,) = await rows(database)
    early, _ = updates(store, NOW)
    assert await early.resume() == 0, "it is left to the process that stored it"
    replicas = [updates(store, datetime.now(UTC) + timedelta(minutes=2)) for _ in range(4)]
    assert sum(await asyncio.gather(*(each.resume() for each, _ in replicas))) == 1
    assert sum(summarizer.pending for _, summarizer in replicas) == 1
    (after,) = await rows(database)
    assert after["tries"] == 1
    assert after["due_at"] > before["due_at"]


async def test_entry_waits_for_a_callers_key(database: Database, store: connection.Database) -> None:
    async with stalled(database) as api:
        await fill(api, 5)
    soon = datetime.now(UTC) + timedelta(minutes=2)
    replica, summarizer = updates(store, soon, host=KEYLESS)
    assert await replica.resume() == 0, "nobody's key is there to pay for it"
    assert [row["tries"] for row in await rows(database)] == [0]
    for host, dialect in (("router", "openai_chat"), ("", "anthropic")):
        summarizer.caller_keys.remember("default", "s", CALLER, host=host, dialect=dialect)
        assert await replica.resume() == 0, "a key for one host is not lent to another"
    summarizer.caller_keys.remember("default", "s", CALLER, host="", dialect="openai_responses")
    assert await replica.resume() == 1
    assert summarizer.pending == 1


async def test_entry_without_a_key_is_extracted_later(database: Database, store: connection.Database) -> None:
    async with stalled(database) as api:
        await fill(api, 5)
    later = datetime.now(UTC) + memory_updates.KEY_PATIENCE + timedelta(minutes=2)
    assert await updates(store, later, host=KEYLESS)[0].resume() == 1


async def test_entry_that_fails_again_and_again_is_left_alone(database: Database, store: connection.Database) -> None:
    async with stalled(database) as api:
        await fill(api, 5)
    now = datetime.now(UTC)
    waits = []
    for _ in range(12):
        (row,) = await rows(database)
        now = max(now, row["due_at"])
        waits.append(await updates(store, now)[0].resume())
    assert waits == [1] * pending_memory.MOST_TRIES + [0] * 4


async def test_entry_is_stored_once(api: Api, store: connection.Database, database: Database) -> None:
    assert (await api.http.post("/api/sessions", json={"id": "s"})).status_code == 201
    entry = PendingMemory(first_seq=1, last_seq=2, runs=((1, 2),), strategy="slim", model="m", host="router")
    for _ in range(2):
        async with store.transaction("default") as open_transaction:
            await pending_memory.add(open_transaction, "default", "s", [entry], NOW)
    assert len(await rows(database)) == 1
    (due,) = await pending_memory.due(store, NOW + timedelta(minutes=2), limit=10)
    assert due.entry == entry
