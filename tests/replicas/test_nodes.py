"""Shards of a distributed Postgres move between its nodes while clients talk (`make test-distributed`)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import aiohttp
import asyncpg
import pytest

from tests.conftest import Database
from tests.store.test_distribution import on_cluster
from tests.support.conversations import Conversation, Got, compare, script, waits_for_spool
from tests.support.services import Service, many, serve
from tests.support.upstreams import scripted

pytestmark = [on_cluster, pytest.mark.timeout(300)]

ADMIN = "the-operator-s-own-key"
TENANTS = 12
KINDS = ("chat", "chat delta", "anthropic stream")
# How many shards of the sessions each worker stores.
PLACED = """
SELECT n.nodeport, count(p.shardid) AS shards FROM pg_dist_node n
LEFT JOIN pg_dist_placement p ON p.groupid = n.groupid
    AND p.shardid IN (SELECT shardid FROM pg_dist_shard WHERE logicalrelid = 'sessions'::regclass)
WHERE n.groupid > 0 GROUP BY n.nodeport
"""


async def _keys(service: Service) -> list[str]:
    async with aiohttp.ClientSession(headers={"X-Tersely-Key": ADMIN}) as http:
        found = []
        for number in range(TENANTS):
            async with http.post(f"{service.url}/api/admin/keys", json={"tenant": f"t{number}"}) as response:
                assert response.status == 201, await response.text()
                found.append((await response.json())["key"])
        return found


async def _hold(conversation: Conversation, done: asyncio.Event, found: list[tuple[Got, float]]) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        while not done.is_set():
            began = time.monotonic()
            found.append((await conversation.ask(http), time.monotonic() - began))
            await asyncio.sleep(0.2)


async def test_shards_leave_a_node_and_come_back_while_clients_talk(database: Database) -> None:
    with (
        scripted() as model,
        many(
            *(serve(database, model.url, auth="keys", admin_key=ADMIN, database_timeout=10.0) for _ in range(2))
        ) as two,
    ):
        model.state.script = script
        keys = await _keys(two[0])
        talks = [
            Conversation(url=two[number % 2].url, kind=kind, headers={"X-Tersely-Key": key})
            for number, key in enumerate(keys)
            for kind in KINDS
        ]
        done, found = asyncio.Event(), list[tuple[Got, float]]()
        running = [asyncio.create_task(_hold(each, done, found)) for each in talks]
        admin = await asyncpg.connect(database.admin_dsn)
        try:
            before = {row["nodeport"]: row["shards"] for row in await admin.fetch(PLACED)}
            [(host, port)] = await admin.fetch("SELECT nodename, nodeport FROM pg_dist_node WHERE groupid = 1")
            await asyncio.sleep(2)
            began = time.monotonic()
            await admin.execute(f"SELECT citus_drain_node('{host}', {port}, 'block_writes')")
            drained = time.monotonic() - began
            empty = {row["nodeport"]: row["shards"] for row in await admin.fetch(PLACED)}
            await asyncio.sleep(2)
            await admin.execute(f"SELECT citus_set_node_property('{host}', {port}, 'shouldhaveshards', true)")
            began = time.monotonic()
            await admin.execute("SELECT citus_rebalance_start(shard_transfer_mode => 'block_writes')")
            await admin.execute("SELECT citus_rebalance_wait()")
            rebalanced = time.monotonic() - began
            after = {row["nodeport"]: row["shards"] for row in await admin.fetch(PLACED)}
            await asyncio.sleep(2)
        finally:
            done.set()
            await asyncio.gather(*running)
            await admin.close()
        for each in two:
            await waits_for_spool(each.url)
        compared = await compare(database.admin_dsn, talks)
    contexts = Counter(got.context if got.has_ended else f"{got.status} {got.error[:80]}" for got, _ in found)
    print(f"before {before}, drained {empty} in {drained:.1f} s, rebalanced {after} in {rebalanced:.1f} s")
    print(f"{compared.acknowledged} acknowledged, {dict(contexts)}, slowest {max(took for _, took in found):.1f} s")
    assert before[port] > 0
    assert empty[port] == 0
    assert after[port] > 0
    assert compared.is_right, compared
    assert compared.acknowledged > len(talks)
