"""The rows of a turn are found wherever they are, and without a look at the others."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.store.history import turn_rows
from tests.store.test_distribution import on_one_server
from tests.store.test_lookup_plans import plan_nodes

TENANT = "north"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADD_SESSION = """
INSERT INTO sessions (tenant_id, id, metadata, last_seq, turns, tokens, version, edits, edited, calls, epoch, cut,
    created_at, updated_at)
VALUES ($1, $2, '{}', $3, $4, 0, 1, 0, false, 0, 0, 1, $5, $5)
"""
ADD_MESSAGES = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, call, digest, created_at, raw, newest_turn)
SELECT $1, $2, seq, turn, 1, seq, 'user', 'live', 'openai_chat', true, true, false, 0, '', $6, '{}', newest
FROM unnest($3::bigint[], $4::int[], $5::int[]) AS u (seq, turn, newest)
"""
OLDER, UNKNOWN = 0, -1


@given(st.lists(st.integers(0, 9)))
def test_turns_do_not_fall_where_no_newest_turn_is_noted(given_turns: list[int]) -> None:
    noted = list(turn_rows.newest_turns(given_turns))
    reached = [turn if newest is None else newest for turn, newest in zip(given_turns, noted, strict=True)]
    assert reached == sorted(reached)
    assert 0 not in noted, "0 says that the row is older than the column"


async def add(
    admin: asyncpg.Connection[asyncpg.Record], session: str, given_turns: list[int], noted: list[int | None]
) -> None:
    await admin.execute(ADD_SESSION, TENANT, session, len(given_turns), max(given_turns, default=0), NOW)
    seqs = list(range(1, len(given_turns) + 1))
    await admin.execute(ADD_MESSAGES, TENANT, session, seqs, given_turns, noted, NOW)


async def brute(connection: Connection, session: str, first: int, last: int) -> list[tuple[int, int]]:
    records = await connection.fetch(
        "SELECT turn, seq FROM messages WHERE tenant_id = $1 AND session_id = $2 AND turn BETWEEN $3 AND $4 "
        "AND turn > 0 ORDER BY seq",
        TENANT, session, first, last,
    )  # fmt: skip
    return [(record["turn"], record["seq"]) for record in records]


@pytest.mark.parametrize("seed", range(6))
async def test_all_rows_of_turns_are_found(
    store: Database, admin: asyncpg.Connection[asyncpg.Record], seed: int
) -> None:
    """Among them rows that go back to earlier turns, rows older than the column and rows that older code wrote."""
    chance = random.Random(seed)
    for number in range(25):
        given_turns, turn = [], 0
        for _ in range(chance.randrange(60)):
            turn += chance.random() < 0.4
            given_turns.append(chance.randint(0, turn) if chance.random() < 0.2 else turn)
        older = chance.choice([0, 0, chance.randint(0, len(given_turns))])
        noted: list[int | None] = list(turn_rows.newest_turns(given_turns))
        noted[:older] = [OLDER] * older
        if chance.random() < 0.3:  # older code runs beside this one, and writes rows of any turn
            for at in range(older, len(noted)):
                if chance.random() < 0.4:
                    given_turns[at], noted[at] = chance.randint(0, 20), UNKNOWN
            rest = [at for at in range(older, len(noted)) if noted[at] != UNKNOWN]
            for at, newest in zip(rest, turn_rows.newest_turns(given_turns[at] for at in rest), strict=True):
                noted[at] = newest
        session = f"s{number}"
        await add(admin, session, given_turns, noted)
        async with store.reading(TENANT) as connection:
            for first in range(23):
                last = first + chance.choice([0, 0, 1, 5, 2**31])
                expected = await brute(connection, session, first, min(last, turn_rows.LAST_TURN))
                assert await turns.live_seqs(connection, TENANT, session, first, last) == [s for _, s in expected]
                live = await turns.live_turns(connection, TENANT, session, first, last)
                assert sorted(live) == sorted({turn for turn, _ in expected})
            assert await turns.live_seqs(connection, TENANT, session, 2**31, 2**40) == []
            wanted = chance.sample(range(23), 7)
            ends = await turns.ends(connection, TENANT, session, wanted)
            by_turn = {turn: [s for each, s in await brute(connection, session, turn, turn)] for turn in wanted}
            assert ends == {turn: (min(seqs), max(seqs)) for turn, seqs in by_turn.items() if seqs}
            for since, limit in ((1, 1), (1, 4), (3, 50), (30, 2)):
                found = await turns.first_live_turns(connection, TENANT, session, since=since, limit=limit)
                everything = {turn for turn, _ in await brute(connection, session, since, 2**31 - 1)}
                assert found == sorted(everything)[:limit]


async def test_rows_that_are_stored_later_belong_to_the_newest_turn(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    await add(admin, "s1", [1, 1, 2], [None, None, None])
    async with store.reading(TENANT) as connection:
        found = await turn_rows.span(connection, TENANT, "s1", 2, 2)
        await admin.execute(ADD_MESSAGES, TENANT, "s1", [4], [2], [None], NOW)
        records = await connection.fetch(turns.LIVE_SEQS, TENANT, "s1", *found)
    assert sorted(record["seq"] for record in records) == [3, 4]


async def test_a_reply_to_instructions_alone_is_in_the_first_turn(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    """The session's counter does not count that turn."""
    await add(admin, "s1", [0, 1], [None, None])
    await admin.execute("UPDATE sessions SET turns = 0")
    async with store.reading(TENANT) as connection:
        assert await turns.first_live_turns(connection, TENANT, "s1", since=1, limit=9) == [1]


@on_one_server
@pytest.mark.parametrize("is_older", [False, True])
async def test_a_turn_of_a_long_session_is_found_by_a_few_rows(
    admin: asyncpg.Connection[asyncpg.Record], is_older: bool
) -> None:
    length = 60_000
    given_turns = [1 + at // 2 for at in range(length)]
    await add(admin, "s1", given_turns, [OLDER if is_older else None] * length)
    await admin.execute("ANALYZE messages")
    await admin.execute(f"SELECT set_config('app.tenant', '{TENANT}', false)")
    await admin.execute("SET plan_cache_mode = force_generic_plan")
    await admin.execute(f"PREPARE beginnings AS {turn_rows._BEGINNINGS}")
    explained = await admin.fetchval(
        f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE beginnings ('{TENANT}', 's1', ARRAY[7, 29000])"
    )
    nodes = [node for node in plan_nodes(json.loads(explained)[0]["Plan"]) if node.get("Relation Name") == "messages"]
    assert {node["Index Name"] for node in nodes} == {"messages_pkey"}
    rows = sum(node["Actual Loops"] * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) for node in nodes)
    assert rows <= 2 * 17
