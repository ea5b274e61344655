"""The model's view of a message is read as it was written, however it is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import asyncpg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tersely.store.commit import transfer, turns
from tersely.store.db.connection import Database
from tersely.store.history import large_rows, messages, model_views
from tersely.store.ops.limits import STORED
from tersely.store.search import query_rows
from tests import conftest
from tests.store.test_lookup_plans import FILL_SESSIONS

TENANT, SESSION = "north", "s1"
NOW = datetime(2026, 1, 1, tzinfo=UTC)
ADD = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, call, digest, created_at, raw, model_raw, model_prefix, model_suffix, model_middle)
VALUES ($1, $2, $3, 1, 1, $3::bigint, 'assistant', 'live', 'openai_chat', true, true, false, 1, '', $4, $5, $6, $7, $8,
    $9)
"""
SHOWN = b'{"role":"assistant","content":"It is done."}'
TAGGED = b'{"role":"assistant","content":"It is done.\\n<terse>did it</terse>"}'
VIEWS = [
    (SHOWN, None),
    (SHOWN, TAGGED),
    (TAGGED, SHOWN),
    (SHOWN, SHOWN),
    (b"", TAGGED),
    (SHOWN, b""),
    (b"a" * 40, b"a" * 70),
    (b"\x00\xff" * 60, b"\x00\xff" * 30 + b"\xfe" + b"\x00\xff" * 30),
    (b"quite another text", b"than the client's, which is long"),
    (bytes(range(256)) * 40, bytes(range(256)) * 20 + b"tag" + bytes(range(256)) * 20),
]


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60), st.binary(max_size=60))
@example(b"", b"", b"", b"")
@example(b"aa", b"a", b"aaaa", b"aa" * 20)
def test_a_view_comes_back_as_it_was(start: bytes, one: bytes, other: bytes, end: bytes) -> None:
    raw, model = start + one + end, start + other + end
    stored = model_views.columns_of(raw, model)
    assert model_views.view_of(raw, stored) == model
    size = len(stored[0]) if stored[0] is not None else len(stored[3] or b"")
    assert size <= max(len(other), min(len(model), len(other) + model_views.LEAST_SAVED))


def test_a_view_is_stored_whole_where_that_is_no_longer() -> None:
    assert model_views.columns_of(SHOWN, None) == (None, None, None, None)
    assert model_views.columns_of(b"one", b"other") == (b"other", None, None, None)
    assert model_views.columns_of(SHOWN, TAGGED)[0] is None
    long = b"x" * model_views.LARGEST
    assert model_views.columns_of(long, long + b"y") == (long + b"y", None, None, None)


@pytest.fixture
async def admin(database: conftest.Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A session with each of `VIEWS` twice: as it is stored now, and as older code stored it."""
    connection = await asyncpg.connect(database.admin_dsn)
    await connection.execute(FILL_SESSIONS, TENANT, NOW, 1)
    for n, (raw, model) in enumerate(VIEWS):
        new, old = model_views.columns_of(raw, model), (model, None, None, None)
        for seq, columns in ((2 * n + 1, new), (2 * n + 2, old)):
            await connection.execute(ADD, TENANT, SESSION, seq, NOW, raw, *columns)
    yield connection
    await connection.close()


async def test_readers_give_the_views_of_old_and_new_rows(
    store: Database, admin: asyncpg.Connection[asyncpg.Record]
) -> None:
    del admin
    seqs = list(range(1, 2 * len(VIEWS) + 1))
    expected = [view for view in VIEWS for _ in range(2)]
    models = [model for _, model in expected]
    async with store.reading(TENANT) as connection:
        content = await messages.content(connection, TENANT, SESSION, seqs)
        assert [(each.raw, each.model_raw) for each in content] == expected
        tail = await messages.tail_rows(connection, TENANT, SESSION, 1)
        assert [each.model_raw for each in tail] == models
        queried = await query_rows.some(connection, TENANT, SESSION, seqs)
        assert [each.model_raw for each in queried] == models
        documented = await transfer.messages(connection, TENANT, SESSION, 0, 100)
        assert [each["model_raw"] for each in documented] == [transfer.write_value(model) for model in models]
        sizes = await messages.sizes(connection, TENANT, SESSION, seqs)
        assert list(sizes.values()) == [len(raw) + len(model or b"") for raw, model in expected]
        assert await connection.fetchval(STORED, TENANT) == sum(sizes.values())
        for seq, model in zip(seqs, models, strict=True):
            pieces = await connection.fetch(large_rows.PIECES["model_raw"], TENANT, SESSION, seq)
            assert b"".join(piece["piece"] for piece in pieces) == (model or b"")


async def test_a_removed_turn_leaves_no_difference(admin: asyncpg.Connection[asyncpg.Record]) -> None:
    await admin.execute(turns.REMOVE, TENANT, SESSION, list(range(1, 2 * len(VIEWS) + 1)))
    columns = "raw, model_raw, " + ", ".join(model_views.COLUMNS)
    rows = await admin.fetch(f"SELECT {columns} FROM messages")
    assert {tuple(row) for row in rows} == {(b"", None, None, None, None)}


async def test_a_replaced_message_has_its_new_view(store: Database, admin: asyncpg.Connection[asyncpg.Record]) -> None:
    await admin.execute(turns.REPLACE, TENANT, SESSION, 3, b"short", b"shorter", 1)
    async with store.reading(TENANT) as connection:
        (found,) = await messages.content(connection, TENANT, SESSION, [3])
    assert (found.raw, found.model_raw) == (b"short", b"shorter")
    assert await admin.fetchval("SELECT model_middle FROM messages WHERE seq = 3") is None


@pytest.mark.parametrize("model", [None, b"whole"])
async def test_a_difference_does_not_count_for_what_older_code_wrote(
    store: Database, admin: asyncpg.Connection[asyncpg.Record], model: bytes | None
) -> None:
    """A replica of an earlier version empties or replaces both views, and knows nothing of the difference."""
    await admin.execute("UPDATE messages SET raw = '', model_raw = $1 WHERE seq = 3", model)
    async with store.reading(TENANT) as connection:
        (found,) = await messages.content(connection, TENANT, SESSION, [3])
    assert (found.raw, found.model_raw) == (b"", model)
