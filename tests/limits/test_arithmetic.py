"""All workers together never use more than a limit, whatever the clock does."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.limits import Limits, Portion, TotalUse, UseRequest, grant, retry_after
from tersely.service.limits.accounts import Account, RequestNeed
from tersely.store.ops.limits import LimitHolder

NOON = datetime(2026, 3, 31, 12, tzinfo=UTC)


def wanting(holder: str = "a", **portion: float) -> UseRequest:
    return UseRequest(holder=holder, wanted=Portion(**portion))


def test_requests_come_back_sixty_seconds_later() -> None:
    limits = Limits(requests_per_minute=100)
    first = grant(TotalUse(), limits, wanting(requests=70), NOON)
    second = grant(first.use, limits, wanting("b", requests=70), NOON + timedelta(seconds=30))
    assert (first.portion.requests, second.portion.requests) == (70, 30)
    assert grant(second.use, limits, wanting(requests=1), NOON + timedelta(seconds=59)).portion.requests == 0
    assert retry_after("requests_per_minute", second.use, limits, NOON + timedelta(seconds=59)) == 2
    assert grant(second.use, limits, wanting(requests=100), NOON + timedelta(seconds=61)).portion.requests == 70


@given(
    st.lists(st.tuples(st.floats(-5, 20), st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=60),
    st.integers(1, 100),
)
def test_no_sixty_seconds_hold_more_requests_than_the_limit(steps: list[tuple[float, int, int]], limit: int) -> None:
    use, now, taken = TotalUse(), NOON, list[tuple[float, float]]()
    for seconds, wanted, back in steps:
        now += timedelta(seconds=seconds)
        granted = grant(use, Limits(requests_per_minute=limit), wanting(requests=wanted), now)
        use = TotalUse.from_json(json.loads(json.dumps(granted.use.to_json())))
        taken.append((use.newest, granted.portion.requests))
        given_back = min(back, granted.portion.requests)
        use = grant(
            use, Limits(requests_per_minute=limit), UseRequest(holder="a", used=Portion(requests=-given_back)), now
        ).use
        taken.append((use.newest, -given_back))
    for moment, _ in taken:
        assert sum(count for at, count in taken if moment - 60 < at <= moment) <= limit


def test_a_clock_that_is_behind_does_not_open_the_window_again() -> None:
    limits = Limits(requests_per_minute=10, tokens_per_day=100)
    ahead = grant(TotalUse(), limits, wanting(requests=10, tokens=100), NOON + timedelta(hours=13))
    behind = grant(ahead.use, limits, wanting("b", requests=1, tokens=1), NOON)
    assert behind.portion == Portion()
    assert behind.use.day == "2026-04-01"


def test_tokens_come_back_at_midnight_and_money_on_the_first() -> None:
    limits = Limits(tokens_per_day=1000, money_per_month=5)
    late = datetime(2026, 3, 31, 23, 59, 59, tzinfo=UTC)
    spent = grant(TotalUse(), limits, wanting(tokens=2000, money=9), late)
    assert (spent.portion.tokens, spent.portion.money) == (1000, 5)
    assert retry_after("tokens_per_day", spent.use, limits, late) == 1
    assert retry_after("money_per_month", spent.use, limits, NOON) == 1  # the record's clock is that of the latest
    after = grant(spent.use, limits, wanting(tokens=1, money=1), late + timedelta(seconds=1))
    assert (after.portion.tokens, after.portion.money) == (1, 1)
    december = datetime(2026, 12, 31, tzinfo=UTC)
    assert retry_after("money_per_month", TotalUse(), limits, december) == 24 * 3600


def test_use_counts_beyond_the_limit_and_unused_amounts_are_returned() -> None:
    limits = Limits(tokens_per_day=100)
    over = grant(TotalUse(), limits, UseRequest(holder="a", used=Portion(tokens=130)), NOON)
    assert over.use.tokens == 130
    back = grant(over.use, limits, UseRequest(holder="a", used=Portion(tokens=-60), wanted=Portion(tokens=50)), NOON)
    assert (back.portion.tokens, back.use.tokens) == (30, 100)


def test_slots_of_a_dead_worker_return_when_its_lease_ends() -> None:
    limits = Limits(concurrent=10)
    dead = grant(TotalUse(), limits, UseRequest(holder="dead", slots=6, spare=2), NOON)
    other = grant(dead.use, limits, UseRequest(holder="b", slots=0, spare=10), NOON + timedelta(seconds=9))
    assert (dead.slots, other.slots) == (8, 2)
    later = grant(other.use, limits, UseRequest(holder="b", slots=2, spare=10), NOON + timedelta(seconds=11))
    assert later.slots == 10
    assert later.use.holders.keys() == {"b"}


def test_unlimited_amounts_are_granted_and_a_record_of_another_version_is_read() -> None:
    granted = grant(TotalUse(), Limits(), wanting(requests=5, tokens=7, money=2), NOON)
    assert (granted.portion.tokens, granted.portion.money) == (7, 2)
    assert TotalUse.from_json({"tokens": 3, "day": "2026-03-31", "later": 1}).at(NOON).tokens == 3


def test_a_tenant_without_any_concurrent_call_is_not_asked_to_try_each_second() -> None:
    assert retry_after("concurrent", TotalUse(), Limits(concurrent=1), NOON) == 1
    assert retry_after("concurrent", TotalUse(), Limits(concurrent=0), NOON) == 60


class Worker:
    """A worker's account of one tenant, beside the record that all workers share."""

    def __init__(self, limits: Limits, now: datetime) -> None:
        self.now = now
        self.use = TotalUse()
        self.account = Account(LimitHolder("t"), limits, "w", monotonic=self._seconds, clock=lambda: self.now)

    def _seconds(self) -> float:
        return self.now.timestamp()

    def refill(self, *, passes: timedelta = timedelta()) -> None:
        """Ask for a portion, which comes after so long."""
        ask = self.account.ask(wants=True)
        granted = grant(self.use, self.account.limits, ask, self.now)
        self.use, self.now = granted.use, self.now + passes
        self.account.accept(ask, granted, is_local=False)


def test_what_calls_reserved_before_midnight_is_no_room_of_the_new_day() -> None:
    worker = Worker(Limits(tokens_per_day=100_000, money_per_month=100), datetime(2026, 3, 31, 23, 59, tzinfo=UTC))
    account = worker.account
    account.mean_tokens, account.mean_money = 20_000, 20
    worker.refill()
    call, other = account.take(RequestNeed(is_model_call=True)), account.take(RequestNeed(is_model_call=True))
    worker.now += timedelta(minutes=2)
    call.close()
    account.begin_period()
    assert (account.tokens, account.money) == (-20_000, -20)  # both took more than there was
    other.charge(5_000, 5)
    other.close()
    assert (account.tokens, account.money) == (-25_000, -25)


def test_a_portion_that_comes_after_midnight_is_no_room_of_the_new_day() -> None:
    worker = Worker(Limits(tokens_per_day=100_000), datetime(2026, 3, 31, 23, 59, 59, tzinfo=UTC))
    worker.refill(passes=timedelta(seconds=2))
    assert worker.account.tokens == 0
    worker.refill()
    assert worker.account.tokens == 1_000
