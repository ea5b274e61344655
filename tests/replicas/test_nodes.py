"""Nodes of a distributed Postgres while clients talk: shards move, and a node hangs (`make test-distributed`).

``TERSELY_TEST_SESSIONS=1000``: so many sessions meet a node that hangs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import asyncpg
import pytest

from tersely.store.db.cluster import LOCATE
from tests.conftest import Database
from tests.store.test_distribution import on_cluster
from tests.support.conversations import Conversation, Got, compare, script, waits_for_spool
from tests.support.http import STORED
from tests.support.relay import relay
from tests.support.services import Service, many, serve
from tests.support.upstreams import scripted

pytestmark = [on_cluster, pytest.mark.timeout(300)]

ADMIN = "the-operator-s-own-key"
TENANTS = 12
SESSIONS = int(os.environ.get("TERSELY_TEST_SESSIONS", "72"))
AT_ONCE = 32
MOVE_LIMIT_SECONDS = 2.0
KINDS = ("chat", "chat delta", "anthropic stream")
SHARD_OF = "SELECT get_shard_id_for_distribution_column($1::text::regclass, $2::text)"
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


async def _move_held_up(database: Database, tenant: str, seconds: float) -> float:
    """Move the shard of a tenant to another node. Somebody else locks one of its tables for so long, which no call
    needs. Return how long the move took.
    """
    admin = await asyncpg.connect(database.admin_dsn)
    from_node = await admin.fetchrow(LOCATE, tenant)
    assert from_node is not None
    [to_node] = [node for node in database.nodes if node != (from_node["host"], from_node["port"])][:1]
    shard = await admin.fetchval(SHARD_OF, "sessions", tenant)
    locked = await admin.fetchval(SHARD_OF, "shadows", tenant)
    parts = urlsplit(database.admin_dsn)
    host = f"{parts.username}@{from_node['host']}:{from_node['port']}"
    other = await asyncpg.connect(urlunsplit(parts._replace(netloc=host)))
    try:
        await other.execute("SET citus.enable_manual_changes_to_shards = on")
        async with other.transaction():
            await other.execute(f"LOCK TABLE shadows_{locked} IN ACCESS EXCLUSIVE MODE")
            # Otherwise the move asks for the table's size and waits before it stops the writes.
            await admin.execute("SET citus.check_available_space_before_move = off")
            began = time.monotonic()
            moving = asyncio.create_task(
                admin.execute(
                    f"SELECT citus_move_shard_placement({shard}, '{from_node['host']}', {from_node['port']}, "
                    f"'{to_node[0]}', {to_node[1]}, shard_transfer_mode => 'block_writes')"
                )
            )
            await asyncio.sleep(seconds)
            assert not moving.done(), "the move did not wait"
        await moving
        took = time.monotonic() - began
        located = await admin.fetchrow(LOCATE, tenant)
        assert located is not None
        assert (located["host"], located["port"]) == to_node
        return took
    finally:
        await other.close()
        await admin.close()


async def _tenants_of_shard(database: Database, tenant: str) -> set[int]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        moved = await admin.fetchval(SHARD_OF, "sessions", tenant)
        return {n for n in range(TENANTS) if await admin.fetchval(SHARD_OF, "sessions", f"t{n}") == moved}
    finally:
        await admin.close()


async def test_a_shard_that_moves_for_longer_than_the_time_limit_loses_nothing(database: Database) -> None:
    """Writes to the shard wait meanwhile. The calls of its tenants are spooled, all others go on, and all heal.

    Of the other tenants nobody sends only new messages, which is refused while replies wait in a spool.
    """
    with (
        scripted() as model,
        many(
            *(
                serve(database, model.url, auth="keys", admin_key=ADMIN, database_timeout=MOVE_LIMIT_SECONDS)
                for _ in range(2)
            )
        ) as two,
    ):
        model.state.script = script
        keys = await _keys(two[0])
        of_shard = await _tenants_of_shard(database, "t0")
        groups: dict[bool, list[Conversation]] = {True: [], False: []}
        for number, key in enumerate(keys):
            for kind in KINDS:
                if number in of_shard or "delta" not in kind:
                    talk = Conversation(url=two[number % 2].url, kind=kind, headers={"X-Tersely-Key": key})
                    groups[number in of_shard].append(talk)
        found: dict[tuple[str, bool], list[tuple[Got, float]]] = {}

        for name in ("before", "moves", "moved"):
            done = asyncio.Event()
            found |= {(name, True): [], (name, False): []}
            talking = [
                asyncio.create_task(_hold(each, done, found[name, is_moved]))
                for is_moved, talks in groups.items()
                for each in talks
            ]
            try:
                await asyncio.sleep(2)
                if name == "moves":
                    took = await _move_held_up(database, "t0", 6 * MOVE_LIMIT_SECONDS)
                    print(f"the move of tenants {sorted(of_shard)} took {took:.1f} s")
            finally:
                done.set()
                await asyncio.gather(*talking)
            print(_outcome(name, found[name, False], found[name, True]))
            began = time.monotonic()
            for each in two:
                await waits_for_spool(each.url)
            print(f"the spools were empty after {time.monotonic() - began:.1f} s")
        compared = await compare(database.admin_dsn, [*groups[True], *groups[False]])
    print(f"{compared.acknowledged} acknowledged")
    assert compared.is_right, compared
    assert all(set(_contexts(answers)) <= STORED for (name, _), answers in found.items() if name != "moves")
    assert set(_contexts(found["moves", False])) <= STORED
    assert "fail-open" in _contexts(found["moves", True])


async def _ask_all(talks: Sequence[Conversation]) -> list[tuple[Got, float]]:
    """Ask the next question of each conversation, at most `AT_ONCE` at once. Return the answers and their times."""
    free = asyncio.Semaphore(AT_ONCE)

    async def ask(http: aiohttp.ClientSession, each: Conversation) -> tuple[Got, float]:
        async with free:
            began = time.monotonic()
            return await each.ask(http), time.monotonic() - began

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        return await asyncio.gather(*(ask(http, each) for each in talks))


async def _tenants_of(database: Database, node: tuple[str, int]) -> set[int]:
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        places = {number: await admin.fetchrow(LOCATE, f"t{number}") for number in range(TENANTS)}
    finally:
        await admin.close()
    return {number for number, place in places.items() if place is not None and (place["host"], place["port"]) == node}


def _contexts(answers: Sequence[tuple[Got, float]]) -> Counter[str]:
    return Counter(got.context if got.has_ended else f"{got.status} {got.error[:80]}" for got, _ in answers)


def _outcome(name: str, living: Sequence[tuple[Got, float]], affected: Sequence[tuple[Got, float]]) -> str:
    parts = (
        f"{kind} {dict(_contexts(answers))}, slowest {max(took for _, took in answers):.1f} s"
        for kind, answers in (("others", living), ("affected", affected))
    )
    return f"{name}: {'; '.join(parts)}"


async def test_a_node_that_hangs_concerns_its_own_tenants_alone(database: Database) -> None:
    """All sessions call at once, without ids; then again, while the node accepts connections and answers nothing."""
    with (
        scripted() as model,
        relay(database) as way,
        many(
            *(
                serve(database, model.url, dsn=way.dsn, auth="keys", admin_key=ADMIN, database_timeout=5.0)
                for _ in range(2)
            )
        ) as two,
    ):
        model.state.script = script
        keys = await _keys(two[0])
        node = database.nodes[0]
        of_node = await _tenants_of(database, node)
        talks = [
            Conversation(url=two[number % 2].url, kind="chat", headers={"X-Tersely-Key": keys[number % TENANTS]})
            for number in range(SESSIONS)
        ]
        hanging = [each for number, each in enumerate(talks) if number % TENANTS in of_node]
        living = [each for each in talks if each not in hanging]
        assert hanging
        assert living

        async def ask(name: str) -> tuple[list[tuple[Got, float]], list[tuple[Got, float]]]:
            answers = await asyncio.gather(_ask_all(living), _ask_all(hanging))
            print(_outcome(name, *answers))
            return answers[0], answers[1]

        assert set(_contexts([*chain(*await ask("before"))])) <= STORED
        way.freeze_node(node)
        for number in range(2):
            of_living, of_hanging = await ask(f"hangs, {number + 1}")
            assert set(_contexts(of_living)) <= STORED
            assert all(got.has_ended for got, _ in of_hanging)
            assert "fail-open" in _contexts(of_hanging)
        way.restore()
        began = time.monotonic()
        for each in two:
            await waits_for_spool(each.url, 120)
        print(f"the spools were empty after {time.monotonic() - began:.1f} s")
        assert set(_contexts([*chain(*await ask("restored"))])) <= STORED
        compared = await compare(database.admin_dsn, talks)
        assert compared.is_right, compared
        assert compared.acknowledged == 4 * SESSIONS
