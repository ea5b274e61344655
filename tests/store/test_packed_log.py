"""Readers find packed log lines where they would find them as rows, and removal leaves nothing of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.history import TerseEntry
from tersely.store.commit import transfer, turns
from tersely.store.db.connection import Database
from tersely.store.history import packed_log, terse
from tersely.store.history.packed_log import DERIVED_FROM, LogLine
from tersely.store.history.turn_rows import LAST_TURN
from tersely.store.ops import stats
from tests.store.test_lookup_plans import FILL_SESSIONS
from tests.store.test_statement_plans import FILL_MESSAGES

TENANT = "north"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADD_ROWS = """
INSERT INTO terse (tenant_id, session_id, turn, seq, number, role, source, created_at, text)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
"""
ADD_EPOCH = """
INSERT INTO epochs (tenant_id, session_id, number, cut, reason, head_tokens, tokens_before, tokens_after, created_at,
    plan, log, log_first_turn, log_last_turn, log_lines)
VALUES ($1, $2, $3, 1, 'full', 0, 0, 0, $4, '{}', $5, $6, $7, $8)
"""
ROWS, PACKED = "s1", "s2"


def line(turn: int, seq: int, number: int, text: str, *, source: Any = "derived") -> LogLine:
    at = NOW + timedelta(seconds=seq % 10**6, microseconds=turn)
    return (turn, seq, number), TerseEntry(
        turn=turn, seq=seq, role="assistant", text=text, source=source, created_at=at
    )


lines = st.lists(
    st.builds(
        line,
        st.integers(0, 2**31 - 1),
        st.integers(0, 2**62),
        st.integers(0, 2**31 - 1),
        st.text(st.characters(exclude_categories=["Cs"])),
    )
)


@given(lines)
def test_packed_lines_come_back_as_they_were(some: list[LogLine]) -> None:
    log, first, last, count = packed_log.pack(some)
    if not some:
        assert (log, first, last, count) == (None, None, None, None)
        return
    assert log is not None
    assert packed_log.unpack(log) == some
    numbers = [cursor[0] for cursor, _ in some]
    assert (first, last, count) == (min(numbers), max(numbers), len(some))


def fields(entry: TerseEntry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


@given(st.lists(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1)), min_size=1))  # noqa: DTZ001
def test_packed_times_are_exact(times: list[datetime]) -> None:
    some = [
        ((1, n, 0), TerseEntry(**{**fields(line(1, n, 0, "")[1]), "created_at": at.replace(tzinfo=UTC)}))
        for n, at in enumerate(times)
    ]
    log = packed_log.pack(some)[0]
    assert log is not None
    assert packed_log.unpack(log) == some


def test_a_lone_surrogate_is_replaced_as_in_a_row() -> None:
    log = packed_log.pack([line(1, 2, 0, "a\ud800b\0")])[0]
    assert log is not None
    assert packed_log.unpack(log)[0][1].text == "a?b\0"


def test_only_derived_lines_of_replies_are_packed() -> None:
    entries = [line(1, 2, 0, "a")[1], line(2, 4, 0, "b", source="model")[1], line(3, 6, 0, "c")[1]]
    packed, rows = packed_log.number_entries(entries)
    assert [cursor for cursor, _ in packed] == [(1, 2, DERIVED_FROM), (3, 6, DERIVED_FROM + 2)]
    assert [cursor for cursor, _ in rows] == [(2, 4, DERIVED_FROM + 1)]


async def add_rows(admin: asyncpg.Connection[asyncpg.Record], session: str, some: Sequence[LogLine]) -> None:
    for cursor, e in some:
        values = (*cursor, e.role, e.source, e.created_at, e.text.encode())
        await admin.execute(ADD_ROWS, TENANT, session, *values)


async def fill(
    admin: asyncpg.Connection[asyncpg.Record], log: Sequence[LogLine], packs: Sequence[Sequence[LogLine]], size: int
) -> None:
    """Store two sessions of ``size`` messages with the same log: all of it as rows, and with ``packs`` packed."""
    await admin.execute(FILL_SESSIONS, TENANT, NOW, 2)
    await admin.execute(FILL_MESSAGES, TENANT, NOW, size)
    await admin.execute(FILL_MESSAGES.replace("'s1'", "'s2'").replace("chain'", "other'"), TENANT, NOW, size)
    packed = {cursor for pack in packs for cursor, _ in pack}
    await add_rows(admin, ROWS, log)
    await add_rows(admin, PACKED, [each for each in log if each[0] not in packed])
    for number, pack in enumerate(packs, start=1):
        await admin.execute(ADD_EPOCH, TENANT, PACKED, number, NOW, *packed_log.pack(pack))


async def readings(store: Database, session: str, restored: Sequence[int], last_turn: int) -> dict[str, Any]:
    """Return what every reader of the log finds."""
    found: dict[str, Any] = {}
    async with store.reading(TENANT) as connection:
        found["inputs"] = await terse.log_inputs(connection, TENANT, session, restored=restored)
        found["told"] = await terse.told(connection, TENANT, session, {n: 2 * n for n in range(1, last_turn + 1, 3)})
        found["turns"] = [
            (each.turn, each.terse) for each in await turns.between(connection, TENANT, session, 2, last_turn)
        ]
        found["sources"] = await stats.terse_by_source(connection, TENANT, session)
        for limit in (1, 7, 1000):
            pages: list[Any] = []
            after: Any = (0, 0, 0)
            while page := await terse.log_page(
                connection, TENANT, session, after=after, limit=limit, last_turn=LAST_TURN
            ):
                pages += page
                after = page[-1][0]
            found[f"pages of {limit}"] = pages
            rows: list[Any] = []
            key: list[object] = []
            while True:
                some, key = await transfer.table_page(connection, TENANT, session, "terse", key, limit)
                rows += some
                if not key:
                    break
            found[f"rows in pages of {limit}"] = rows
        found["up to a turn"] = await terse.log_page(
            connection, TENANT, session, after=(2, 4, DERIVED_FROM), limit=50, last_turn=last_turn - 1
        )
    return found


@pytest.mark.parametrize("seed", range(6))
async def test_readers_find_packed_lines_where_rows_would_be(
    store: Database, admin: asyncpg.Connection[asyncpg.Record], seed: int
) -> None:
    rng = random.Random(seed)
    count = rng.choice([12, 30, 450])
    log: list[LogLine] = []
    for turn in range(1, count + 1):
        if rng.random() < 0.3:
            log.append(line(turn, 2 * turn, 0, f"told {turn}", source="model"))
        if rng.random() < 0.8:
            log.append(line(turn, 2 * turn, DERIVED_FROM + turn, f"Reply {turn}."))
    derived = [each for each in log if each[1].source == "derived"]
    packs: list[list[LogLine]] = []
    while derived:
        size = rng.randint(1, 9)
        some, derived = derived[:size], derived[size:]
        # Some lines are rows of older code; some epochs look at old turns again.
        packs.append([each for each in some if rng.random() < 0.9])
        if len(packs) > 2 and rng.random() < 0.3:
            other = packs[rng.randrange(len(packs) - 1)]
            packs[-1] += other[:1]
            del other[:1]
    await fill(admin, log, packs, 2 * count)
    left = rng.sample(range(2, 2 * count + 1, 2), count // 4)
    for status, seqs in (("superseded", left[::2]), ("dropped", left[1::2])):
        await admin.execute("UPDATE messages SET status = $1 WHERE seq = ANY($2::bigint[])", status, seqs)
    for last_turn in (count, count // 2):
        expected = await readings(store, ROWS, left[:2], last_turn)
        assert await readings(store, PACKED, left[:2], last_turn) == expected
        assert expected["inputs"].terse


async def test_a_line_that_is_stored_twice_counts_once(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    """An older and a newer replica may both have cut a turn."""
    log = [line(n, 2 * n, DERIVED_FROM, f"Reply {n}.") for n in range(1, 7)]
    await fill(admin, log, [log[:3], log[2:4]], 12)
    await add_rows(admin, PACKED, log[1:2])
    found = await readings(store, PACKED, [], 6)
    assert [each for _, each in found["pages of 7"]] == [each for _, each in log]
    assert found["turns"] == [(n, (f"Reply {n}.",)) for n in range(2, 7)]


async def test_the_newest_lines_of_many_small_epochs(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM, f"Reply {n}.") for n in range(1, 451)]
    await fill(admin, log, [[each] for each in log], 900)
    await admin.execute("UPDATE messages SET status = 'undone' WHERE seq > 860")
    expected = await readings(store, ROWS, [], 450)
    assert await readings(store, PACKED, [], 450) == expected
    assert len(expected["inputs"].terse) == 400
    assert expected["inputs"].older_turns == 30


class Counting:
    """A connection that counts its statements."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.statements = 0

    async def fetch(self, *arguments: Any) -> Any:
        self.statements += 1
        return await self.connection.fetch(*arguments)

    async def fetchval(self, *arguments: Any) -> Any:
        self.statements += 1
        return await self.connection.fetchval(*arguments)


async def test_many_logs_of_one_line_are_read_with_few_statements(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM, f"Reply {n}.") for n in range(1, 1001)]
    await fill(admin, log, [[each] for each in log], 2000)
    await admin.execute("UPDATE messages SET status = 'superseded' WHERE seq > 1200")
    async with store.reading(TENANT) as connection:
        counting: Any = Counting(connection)
        assert len((await terse.log_inputs(counting, TENANT, PACKED)).terse) == 400
        assert counting.statements < 60
        counting = Counting(connection)
        rows, _ = await transfer.table_page(counting, TENANT, PACKED, "terse", [], 1000)
        assert len(rows) == 1000
        assert counting.statements < 100


UNREADABLE = [b"", packed_log.VERSION, packed_log.VERSION + b"garbage", b"\x7f" + b"of a later version"]


@pytest.mark.parametrize("packed", [*UNREADABLE, None])
async def test_a_log_that_cannot_be_read_does_not_stop_readers_of_others(
    store: Database, admin: asyncpg.Connection[asyncpg.Record], packed: bytes | None
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM + n, f"Reply {n}.") for n in range(1, 7)]
    await fill(admin, log, [log[:2], log[2:4], log[4:]], 12)
    await admin.execute("DELETE FROM terse WHERE session_id = $1 AND turn IN (3, 4)", ROWS)
    if packed is None:  # a part is lost
        packed = await admin.fetchval("SELECT substring(log FOR length(log) - 5) FROM epochs WHERE number = 2")
    await admin.execute("UPDATE epochs SET log = $1 WHERE number = 2", packed)
    expected = await readings(store, ROWS, [], 6)
    found = await readings(store, PACKED, [], 6)
    del expected["sources"], found["sources"]  # counts
    assert found == expected


@pytest.mark.parametrize("packed", UNREADABLE)
async def test_a_log_that_cannot_be_read_goes_where_it_may_have_what_is_removed(
    store: Database, admin: asyncpg.Connection[asyncpg.Record], packed: bytes
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM + n, f"Reply {n}.") for n in range(1, 7)]
    await fill(admin, log, [log[:2], log[2:4], log[4:]], 12)
    await admin.execute("UPDATE epochs SET log = $1 WHERE number > 1", packed)

    async def numbers() -> list[int]:
        return [r["number"] for r in await admin.fetch("SELECT number FROM epochs WHERE log_lines > 0 ORDER BY number")]

    async with store.transaction(TENANT) as connection:
        await packed_log.forget(connection, TENANT, PACKED, turn=1)
        await packed_log.forget(connection, TENANT, PACKED, turn=4)
    assert await numbers() == [1, 3]
    async with store.transaction(TENANT) as connection:
        await packed_log.forget(connection, TENANT, PACKED, seq=4)
    assert await numbers() == []


async def test_removed_lines_leave_nothing_in_packed_logs(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM + n, f"secret {n}") for n in range(1, 7)]
    await fill(admin, log, [log[:4], log[4:5], log[5:]], 12)
    async with store.transaction(TENANT) as connection:
        await packed_log.forget(connection, TENANT, PACKED, turn=2)
        await packed_log.forget(connection, TENANT, PACKED, seq=10)
    records = await admin.fetch("SELECT * FROM epochs ORDER BY number")
    kept = [[entry.text for _, entry in packed_log.unpack(r["log"])] if r["log"] else None for r in records]
    assert kept == [["secret 1", "secret 3", "secret 4"], None, ["secret 6"]]
    columns = [(r["log_first_turn"], r["log_last_turn"], r["log_lines"]) for r in records]
    assert columns == [(1, 4, 3), (None, None, None), (6, 6, 1)]
    assert [cursor for cursor, _ in packed_log.unpack(records[0]["log"])] == [log[n][0] for n in (0, 2, 3)]


async def test_packed_lines_belong_to_their_tenant_and_session(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM, f"Reply {n}.") for n in range(1, 7)]
    await fill(admin, log, [log], 12)
    async with store.transaction("south") as connection:
        assert await packed_log.newest(connection, TENANT, PACKED, limit=9) == []
        assert await packed_log.between(connection, TENANT, PACKED, 1, 9) == []
        assert await packed_log.count(connection, TENANT, PACKED) == 0
        await packed_log.forget(connection, TENANT, PACKED, turn=1)
    async with store.reading(TENANT) as connection:
        assert await packed_log.count(connection, TENANT, ROWS) == 0
        assert await packed_log.count(connection, TENANT, PACKED) == 6


async def test_lines_of_a_turn_that_older_code_removed_are_not_shown(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    log = [line(n, 2 * n, DERIVED_FROM + n, f"Reply {n}.") for n in range(1, 7)]
    await fill(admin, log, [log], 12)
    await admin.execute("UPDATE messages SET status = 'removed', raw = '' WHERE turn = 2")
    found = await readings(store, PACKED, [], 6)
    del found["sources"]  # a count
    assert "Reply 3." in str(found)
    assert "Reply 2." not in str(found)
    assert str(transfer.write_value(b"Reply 3.")) in str(found)
    assert str(transfer.write_value(b"Reply 2.")) not in str(found)
