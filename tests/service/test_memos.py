"""The memos that a user's message brings up unasked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest

from tersely.service.memos.memos import RELEVANT, Memos, relevant
from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.stores import open_store

START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
async def store(database: Database) -> AsyncIterator[Store]:
    async with open_store(database) as store:
        yield store


@pytest.fixture
def memos(store: Store) -> Memos:
    numbers = count(1)
    seconds = count()
    return Memos(store, clock=lambda: START + timedelta(seconds=next(seconds)), new_id=lambda: f"m{next(numbers)}")


async def find(store: Store, text: str, **options: int) -> list[str]:
    async with store.reading("north") as connection:
        (found,) = await relevant(connection, "north", [text], **options)
        return [memo.content for memo in found]


async def test_message_retrieves_memos_about_its_subject(memos: Memos, store: Store) -> None:
    for content, tags in (
        ("The billing worker retries three times, then parks the invoice.", ["billing", "gotcha"]),
        ("Ports 8480 to 8489 are reserved for the test servers.", ["ports"]),
        ("Migrations run before the first worker starts.", ["arch-decision"]),
    ):
        await memos.save("north", content=content, tags=tags, session_id=None)
    await memos.save("south", content="Invoices of the south are parked elsewhere.", tags=[], session_id=None)

    found = await find(store, "Why was the invoice parked by the billing worker?")
    assert found[0] == "The billing worker retries three times, then parks the invoice."
    assert not any("south" in content or "Ports" in content for content in found)
    for nothing in ("continue", "go on, please", "what next?", "", "an entirely different matter of zoology"):
        assert await find(store, nothing) == []


async def test_no_more_than_a_few(memos: Memos, store: Store) -> None:
    for number in range(RELEVANT + 3):
        await memos.save("north", content=f"The palette of page {number} is blue.", tags=[], session_id=None)
    assert len(await find(store, "which palette?")) == RELEVANT
    assert len(await find(store, "which palette?", limit=2)) == 2
