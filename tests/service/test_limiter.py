"""The limiter of a worker, with a database that answers at once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from tersely.domain.errors import LimitExceeded
from tersely.domain.limits import Grant, Limits, TotalUse, UseRequest, grant
from tersely.service.common.metrics import Metrics
from tersely.service.limits.accounts import RequestNeed
from tersely.service.limits.limiter import Limiter
from tersely.store.db.connection import Database
from tersely.store.ops import limits as limits_store

NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)
CALL = RequestNeed(is_concurrent=True)
# A request looks at the clock a few times; one that repeats without end looks at it without end.
MANY = 1000


class Clock:
    """A clock that stands still, and fails a test that reads it without end."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> datetime:
        self.readings += 1
        assert self.readings < MANY, "a request repeats without end"
        return NOON


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> TotalUse:
    """The shared record of a tenant, in memory."""
    shared = TotalUse()

    async def take(_: Any, __: Any, limits: Limits, ask: UseRequest, now: datetime, **___: Any) -> tuple[Grant, bool]:
        granted = grant(shared, limits, ask, now)
        shared.holders = granted.use.holders
        return granted, False

    monkeypatch.setattr(limits_store, "take", take)
    return shared


def new_limiter(clock: Clock, **defaults: int) -> Limiter:
    monotonic = asyncio.get_running_loop().time
    database = cast(Database, None)  # only `take` would use it
    return Limiter(database, Metrics(), defaults=Limits(**defaults), clock=clock, monotonic=monotonic, name="worker")


async def test_limiter_admits_up_to_the_limit_and_refuses_the_next_call(record: TotalUse) -> None:
    limiter = new_limiter(Clock(), concurrent=2)
    for _ in range(2):
        assert len(await limiter.admit("north", "", CALL)) == 1
    with pytest.raises(LimitExceeded):
        await limiter.admit("north", "", CALL)
    assert record.slots == 2


async def test_limiter_admits_a_call_that_comes_as_a_portion_is_written(record: TotalUse) -> None:
    """The portion is not for the call, and its task has ended, though the loop has not run the task's callbacks yet."""
    limiter = new_limiter(Clock(), concurrent=1)
    [account] = limiter._accounts_of("north", "")
    written = limiter._start_refill(account, wants=False)
    while not written.done():
        await asyncio.sleep(0)
    assert limiter._refills, "the callbacks have run: the call does not meet the finished task"
    assert len(await limiter.admit("north", "", CALL)) == 1
    assert list(record.holders) == ["worker"]
    await asyncio.sleep(0)
    assert not limiter._refills
