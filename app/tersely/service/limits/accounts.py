"""A worker's share of a tenant's or a key's limits: a portion that was reserved in advance."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import msgspec

from tersely.domain.limits import (
    LEASE,
    NOTHING,
    Grant,
    LimitName,
    Limits,
    Portion,
    TotalUse,
    UseRequest,
    plus,
    retry_after,
)
from tersely.store.ops.limits import LimitHolder

# The maximum share of a limit that a worker reserves in advance.
AHEAD = 0.01
# Seconds without a request after which reserved amounts are given back.
IDLE = 2.0
# Seconds without a request after which an account is dropped: a call whose client has left may be charged late.
KEPT = 120.0
# Seconds before a worker that was granted nothing asks again.
PAUSE = 1.0
PAUSE_FOR_SLOT = 0.05
# The weight of the newest call in the mean use of a call.
NEWEST = 0.2
# A first call is taken for as large as its body, but for no more than this part of the limit.
FIRST = 0.02
BYTES_PER_TOKEN = 4
LEAST_MONEY = 1e-6


class RequestNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of a request: a slot for a concurrent call, tokens and money, and room for its stored bytes.

    ``size`` of its body in bytes.
    """

    is_concurrent: bool = False
    is_model_call: bool = False
    stores: bool = False
    size: int = 0


class Account(msgspec.Struct, eq=False):
    """The account of ``subject`` in this worker. Times are monotonic, in seconds; balances may be negative: a debt."""

    subject: LimitHolder
    limits: Limits
    holder: str
    monotonic: Callable[[], float]
    clock: Callable[[], datetime]
    use: TotalUse = msgspec.field(default_factory=TotalUse)
    requests: float = 0
    tokens: float = 0.0
    money: float = 0.0
    slots: int = 0
    in_flight: int = 0
    waiting: int = 0
    mean_tokens: float | None = None
    mean_money: float = 0.0
    # Use that is not in the shared record yet because the database was unavailable, and the part that the last `ask`
    # reported.
    unreported: Portion = NOTHING
    reported: Portion = NOTHING
    on_release: Callable[[Account], None] = lambda _: None
    day: str = ""
    month: str = ""
    used_at: float = 0.0
    synced_at: float = 0.0
    recent: int = 0
    paused: dict[LimitName, float] = msgspec.field(default_factory=dict)
    released: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    # A request

    def lacks(self, need: RequestNeed) -> list[LimitName]:
        """Return the limits of which this worker does not hold enough for a request."""
        self.begin_period()
        limits = self.limits
        found: list[LimitName] = []
        if limits.requests_per_minute is not None and self.requests < 1:
            found.append("requests_per_minute")
        if need.is_concurrent and limits.concurrent is not None and self.in_flight >= self.slots:
            found.append("concurrent")
        if need.is_model_call:
            # Where less than half a call is left there is none left: on average the limit is met.
            if limits.tokens_per_day is not None and (self.tokens <= 0 or self.tokens < self._call_tokens(need) / 2):
                found.append("tokens_per_day")
            if limits.money_per_month is not None and (self.money <= 0 or self.money < self._call_money() / 2):
                found.append("money_per_month")
        if need.stores and limits.stored_bytes is not None and (self.use.stored or 0) >= limits.stored_bytes:
            found.append("stored_bytes")
        return found

    def is_paused(self, name: LimitName) -> bool:
        """Return whether the limit was found used up a moment ago."""
        return name == "stored_bytes" or self.paused.get(name, 0.0) > self.monotonic()

    def take(self, need: RequestNeed) -> AccountReservation:
        """Reserve the amounts for a request. The caller has checked that no limit lacks any."""
        self.used_at = self.monotonic()
        self.recent += 1
        tokens = money = 0.0
        if self.limits.requests_per_minute is not None:
            self.requests -= 1
        if need.is_concurrent:
            self.in_flight += 1
        if need.is_model_call:
            tokens = self._call_tokens(need) if self.limits.tokens_per_day is not None else 0.0
            money = self._call_money() if self.limits.money_per_month is not None else 0.0
            self.tokens -= tokens
            self.money -= money
        return AccountReservation(self, tokens, money, is_concurrent=need.is_concurrent)

    def charge(self, tokens: float, money: float) -> None:
        """Count use that no request has reserved. A resulting debt is settled in the background."""
        self.begin_period()
        if self.limits.tokens_per_day is not None:
            self.tokens -= tokens
        if self.limits.money_per_month is not None:
            self.money -= money

    def wait(self, name: LimitName) -> float:
        """Return the seconds that a refused client should wait."""
        return retry_after(name, self.use, self.limits, self.clock())

    def _call_tokens(self, need: RequestNeed) -> float:
        limit = self.limits.tokens_per_day or 0
        if self.mean_tokens is None:
            return min(need.size / BYTES_PER_TOKEN, FIRST * limit)
        return min(self.mean_tokens, limit / 2)

    def _call_money(self) -> float:
        return min(self.mean_money, (self.limits.money_per_month or 0.0) / 2)

    def learn(self, tokens: float, money: float) -> None:
        """Update the mean use of a call."""
        if self.mean_tokens is None:
            self.mean_tokens, self.mean_money = tokens, money
        else:
            self.mean_tokens += NEWEST * (tokens - self.mean_tokens)
            self.mean_money += NEWEST * (money - self.mean_money)

    # The record that all workers share

    @property
    def is_short(self) -> bool:
        """Return whether the next request might have to wait for the database."""
        limits = self.limits
        return (
            (limits.requests_per_minute is not None and self.requests < self._ahead_requests() / 2)
            or (limits.tokens_per_day is not None and self.tokens < (self.mean_tokens or 0.0))
            or (limits.money_per_month is not None and self.money < self.mean_money)
        ) and not any(self.is_paused(name) for name in ("requests_per_minute", "tokens_per_day", "money_per_month"))

    @property
    def is_scarce(self) -> bool:
        """Return whether other workers may be waiting for slots that this one does not use."""
        limit = self.limits.concurrent
        return limit is not None and self.slots > self.in_flight and self.use.slots >= 0.8 * limit

    def is_due(self) -> bool:
        """Return whether the shared record is to be brought up to date without a request."""
        now = self.monotonic()
        is_idle = now - self.used_at > IDLE
        if self.requests < 0 or self.tokens < 0 or self.money < 0 or self.unreported != NOTHING:
            return True
        if self.slots and (now - self.synced_at > LEASE / 3 or (is_idle and self.slots > self.in_flight)):
            return True
        if self.limits.stored_bytes is not None and not is_idle and now - self.synced_at > PAUSE:
            return True
        return is_idle and (self.requests >= 1 or self.tokens > 0 or self.money > 0)

    @property
    def is_empty(self) -> bool:
        """Return whether the account can be dropped without losing counts."""
        return (
            self.monotonic() - self.used_at > KEPT
            and not (self.in_flight or self.slots or self.waiting or self.requests or self.tokens or self.money)
            and self.unreported == NOTHING
        )

    def ask(self, *, wants: bool) -> UseRequest:
        """Return the request for the next portion. Debts and returned amounts leave the balances: see `revert`."""
        self.begin_period()
        is_idle = not wants and self.monotonic() - self.used_at > IDLE
        returned = Portion(
            requests=min(0.0, self.requests) if not is_idle else self.requests,
            tokens=min(0.0, self.tokens) if not is_idle else self.tokens,
            money=min(0.0, self.money) if not is_idle else self.money,
        )
        self.requests -= returned.requests
        self.tokens -= returned.tokens
        self.money -= returned.money
        used = plus(self.unreported, returned, sign=-1)
        self.reported, self.unreported = self.unreported, NOTHING
        spare = 0 if is_idle else self._spare()
        # Returned amounts must not be used meanwhile.
        self.slots = min(self.slots, self.in_flight + spare)
        return UseRequest(
            holder=self.holder,
            used=used,
            wanted=self._wanted() if wants else NOTHING,
            slots=self.in_flight,
            spare=spare,
        )

    def revert(self, ask: UseRequest) -> UseRequest:
        """Restore the amounts of an `ask` that was not delivered. Return the part that this worker has not
        counted yet.
        """
        self.unreported = plus(self.unreported, ask.used)
        return replace(ask, used=plus(ask.used, self.reported, sign=-1))

    def accept(self, ask: UseRequest, granted: Grant, *, is_local: bool) -> None:
        """Add a granted portion. ``is_local``: by this worker itself, while the database was away."""
        now = self.monotonic()
        portion = granted.portion
        self.use = granted.use
        self.requests += portion.requests
        self.begin_period()
        # What was granted of a period that has ended meanwhile is not there in the new one.
        if granted.use.day >= self.day:
            self.tokens += portion.tokens
        if granted.use.month >= self.month:
            self.money += portion.money
        self.slots = granted.slots
        self.synced_at = now
        self.recent = 0
        if is_local:
            self.unreported = plus(self.unreported, portion)
        got: tuple[tuple[LimitName, float, float, float], ...] = (
            ("requests_per_minute", ask.wanted.requests, portion.requests, PAUSE),
            ("tokens_per_day", ask.wanted.tokens, portion.tokens, PAUSE),
            ("money_per_month", ask.wanted.money, portion.money, PAUSE),
            ("concurrent", ask.slots + ask.spare, granted.slots, PAUSE_FOR_SLOT),
        )
        for name, wanted, given, pause in got:
            if given < wanted:
                self.paused[name] = now + pause
            elif wanted:
                self.paused.pop(name, None)

    def _wanted(self) -> Portion:
        limits = self.limits
        requests = tokens = money = 0.0
        if limits.requests_per_minute is not None:
            requests = max(self._ahead_requests(), self.waiting) - max(0.0, self.requests)
        calls = max(1, self.waiting)
        if limits.tokens_per_day is not None:
            ahead = max(AHEAD * limits.tokens_per_day, (self.mean_tokens or 0.0) * calls, 1.0)
            tokens = ahead - max(0.0, self.tokens)
        if limits.money_per_month is not None:
            ahead = max(AHEAD * limits.money_per_month, self.mean_money * calls, LEAST_MONEY)
            money = ahead - max(0.0, self.money)
        return Portion(requests=max(0.0, requests), tokens=max(0.0, tokens), money=max(0.0, money))

    def _ahead_requests(self) -> int:
        """Return the requests to hold: those of about a second, at most a hundredth of a minute's."""
        elapsed = max(0.1, self.monotonic() - self.synced_at)
        most = max(1, math.floor(AHEAD * (self.limits.requests_per_minute or 0)))
        return max(1, min(most, math.ceil(self.recent / elapsed)))

    def _spare(self) -> int:
        """Return the slots to hold beside those of calls in flight."""
        limit = self.limits.concurrent
        return 0 if limit is None else self.waiting + math.floor(2 * AHEAD * limit)

    def begin_period(self) -> None:
        """Reset the use of a past day or month."""
        now = self.clock()
        day, month = f"{now:%Y-%m-%d}", f"{now:%Y-%m}"
        if day != self.day:
            self.day, self.tokens = day, min(0.0, self.tokens)
            self.paused.pop("tokens_per_day", None)
        if month != self.month:
            self.month, self.money = month, min(0.0, self.money)
            self.paused.pop("money_per_month", None)


class AccountReservation:
    """The tokens, the money and the slot that a request has reserved in an account."""

    __slots__ = ("_account", "_day", "_is_concurrent", "_money", "_month", "_tokens")

    def __init__(self, account: Account, tokens: float, money: float, *, is_concurrent: bool) -> None:
        self._account = account
        self._day, self._month = account.day, account.month
        self._tokens = tokens
        self._money = money
        self._is_concurrent = is_concurrent

    def charge(self, tokens: float, money: float) -> None:
        """Count the use of a model call, first against its reservation."""
        account = self._account
        account.learn(tokens, money)
        self._drop_past()
        if account.limits.tokens_per_day is not None:
            from_reserve = min(self._tokens, tokens)
            self._tokens -= from_reserve
            account.tokens -= tokens - from_reserve
        if account.limits.money_per_month is not None:
            from_reserve = min(self._money, money)
            self._money -= from_reserve
            account.money -= money - from_reserve

    def _drop_past(self) -> None:
        """Drop what was reserved of a day or month that has ended: the new one's use is charged in full."""
        account = self._account
        account.begin_period()
        if self._day != account.day:
            self._tokens = 0.0
        if self._month != account.month:
            self._money = 0.0

    def close(self) -> None:
        """Give back the rest of the reservation, and the slot."""
        account = self._account
        self._drop_past()
        account.tokens += self._tokens
        account.money += self._money
        self._tokens = self._money = 0.0
        if self._is_concurrent:
            self._is_concurrent = False
            account.in_flight -= 1
            account.released.set()
            account.on_release(account)
