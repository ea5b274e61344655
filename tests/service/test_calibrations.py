"""Calibrations of models: what one worker learns, all others know within seconds, also those that start later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.calibrations import Calibrations
from tersely.store.db.connection import Database as Store
from tersely.store.ops import tenants
from tests.conftest import Database
from tests.support.http import body_of, post
from tests.support.loops import eventually
from tests.support.rows import query
from tests.support.services import serve
from tests.support.stores import open_store
from tests.support.upstreams import scripted

LONG_AGO = datetime.now(UTC) - timedelta(days=30)


@pytest.fixture
async def shared(database: Database) -> AsyncIterator[Store]:
    async with open_store(database, size=2, timeout=10) as store:
        yield store


async def exchange(shared: Store, *workers: Calibrations) -> None:
    for each in workers:
        await each.share(shared, datetime.now(UTC), LONG_AGO)


async def test_workers_share_what_they_learn(shared: Store) -> None:
    one, other, late = Calibrations(), Calibrations(), Calibrations()
    for _ in range(4):
        one.observe("claude", tenant="north", estimated=1000, reported=1400)
    other.observe("gemini", tenant="south", estimated=1000, reported=800)
    await exchange(shared, one, other, one, late)
    for each in (one, other, late):
        assert each.ratio("claude") == pytest.approx(1.4)
        assert each.ratio("gemini") == pytest.approx(0.8)
        assert each.ratio("unknown") == 1.0


async def test_workers_that_learn_different_things_agree(shared: Store) -> None:
    one, other = Calibrations(), Calibrations()
    for _ in range(20):
        one.observe("claude", tenant="north", estimated=1000, reported=1400)
        other.observe("claude", tenant="south", estimated=1000, reported=1200)
    await exchange(shared, one, other, one, other)
    assert one.ratio("claude") == pytest.approx(1.3, abs=0.06)
    assert other.ratio("claude") == pytest.approx(1.3, abs=0.06)
    steady = one.ratio("claude"), other.ratio("claude")
    await exchange(shared, one, other, one, other)
    assert (one.ratio("claude"), other.ratio("claude")) == steady, "what is known is not counted again"


async def test_a_forgotten_tenant_leaves_no_names_of_models(shared: Store, database: Database) -> None:
    one = Calibrations()
    one.observe("their-own-model", tenant="north", estimated=1000, reported=1400)
    await exchange(shared, one)
    assert len(await query(database, "SELECT FROM calibrations")) == 1
    await tenants.forget(shared, "north")
    assert await query(database, "SELECT FROM calibrations") == []


async def test_a_service_stores_what_its_calls_teach(database: Database) -> None:
    usage = {"prompt_tokens": 900, "completion_tokens": 1, "total_tokens": 901}
    with scripted() as model, serve(database, model.url) as service:
        for number in range(3):
            key = model.script(f"k{number}", ScriptedReply(message={"content": "ok"}, usage=usage))
            assert (await post(service, body_of("word " * 600, user=key))).status == 200

        async def stored() -> list[asyncpg.Record]:
            return await query(service, "SELECT tenant_id, model, ratio FROM calibrations")

        (row,) = await eventually(stored, 30)
        assert (row["tenant_id"], row["model"]) == ("default", "gpt-4o-mini")
        assert row["ratio"] != 1.0
