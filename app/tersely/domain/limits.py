"""Limits of tenants and keys, and the accounting of their use by all workers.

Workers reserve requests, tokens and money in portions, and slots for concurrent calls as leases that expire. The use is
one record, `TotalUse`; every worker changes it through `grant`. A worker that is killed loses at most its portions; its
slots are freed when their lease ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

LimitName = Literal["requests_per_minute", "concurrent", "tokens_per_day", "money_per_month", "stored_bytes"]
LIMIT_NAMES: tuple[LimitName, ...] = (
    "requests_per_minute", "concurrent", "tokens_per_day", "money_per_month", "stored_bytes",
)  # fmt: skip
# Seconds of the window in which requests are counted. It slides by one second.
WINDOW = 60
# Seconds after which a worker's slots are freed unless it renews them.
LEASE = 10.0
# Seconds after which a client may retry, if the time at which the limit allows more is unknown.
SOON = 1.0
# The same where calls that end make no room: only a deletion, or another limit.
AFTER_CHANGE = 60.0
# The largest limit: the largest number that JSON readers agree on.
MAX_LIMIT = 2**53
# Days: the longest retention, and the longest life of a key.
MAX_DAYS = 36_500


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a tenant or a key may use; None: no limit. Tokens and money are those of model calls."""

    requests_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None
    money_per_month: float | None = None
    stored_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether there is no limit at all."""
        return self == NO_LIMITS

    def over(self, defaults: Limits) -> Limits:
        """Return these limits, with the default for each that is not set."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(defaults, **{name: value for name, value in own.items() if value is not None})


NO_LIMITS = Limits()


@dataclass(slots=True, kw_only=True)
class TotalUse:
    """The use by all workers: seconds with their requests, the day's tokens, the month's money, slots.

    ``newest``: the latest time of any worker, in seconds; a slow clock does not turn it back. ``stored``: bytes,
    measured at ``measured``. ``measuring``: the time until which a worker measures it.
    """

    newest: float = 0.0
    seconds: dict[int, int] = field(default_factory=dict)
    day: str = ""
    tokens: float = 0.0
    month: str = ""
    money: float = 0.0
    holders: dict[str, tuple[int, float]] = field(default_factory=dict)
    stored: int | None = None
    measured: float = 0.0
    measuring: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON members."""
        return {
            "newest": self.newest,
            "seconds": sorted(self.seconds.items()),
            "day": self.day,
            "tokens": self.tokens,
            "month": self.month,
            "money": self.money,
            "holders": [[name, slots, until] for name, (slots, until) in sorted(self.holders.items())],
            "stored": self.stored,
            "measured": self.measured,
            "measuring": self.measuring,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TotalUse:
        """Return the record that `to_json` wrote. Members of other versions are left out."""
        known = {each.name: value[each.name] for each in fields(cls) if each.name in value}
        known["seconds"] = {int(second): int(count) for second, count in known.get("seconds", ())}
        known["holders"] = {name: (int(slots), float(until)) for name, slots, until in known.get("holders", ())}
        return cls(**known)

    def at(self, now: datetime) -> TotalUse:
        """Return the record at the time ``now``, without expired entries."""
        time = max(now.timestamp(), self.newest)
        moment = datetime.fromtimestamp(time, UTC)
        day, month = f"{moment:%Y-%m-%d}", f"{moment:%Y-%m}"
        first = int(time) - WINDOW
        return replace(
            self,
            newest=time,
            seconds={second: count for second, count in self.seconds.items() if second >= first and count},
            day=day,
            tokens=self.tokens if self.day == day else 0.0,
            month=month,
            money=self.money if self.month == month else 0.0,
            holders={name: held for name, held in self.holders.items() if held[1] > time and held[0]},
        )

    @property
    def requests(self) -> int:
        """Return the requests of the last minute."""
        return sum(self.seconds.values())

    @property
    def slots(self) -> int:
        """Return the slots for concurrent calls that workers hold."""
        return sum(slots for slots, _ in self.holders.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Some of each countable limit: requests, tokens, USD."""

    requests: float = 0
    tokens: float = 0.0
    money: float = 0.0


NOTHING = Portion()


def plus(one: Portion, other: Portion, *, sign: int = 1) -> Portion:
    """Return the sum, or with ``sign`` -1 the difference."""
    return Portion(
        requests=one.requests + sign * other.requests,
        tokens=one.tokens + sign * other.tokens,
        money=one.money + sign * other.money,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRequest:
    """The request of a worker with the name ``holder``.

    ``used`` is counted regardless of the limit; a negative value gives back what was reserved and not used. ``wanted``
    is granted as far as the limit allows. ``slots``: its concurrent calls. ``spare``: how many more it wants.
    """

    holder: str
    used: Portion = NOTHING
    wanted: Portion = NOTHING
    slots: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The worker's share: a portion, and its slots in all; ``use`` is the record afterwards."""

    portion: Portion
    slots: int
    use: TotalUse


def grant(use: TotalUse, limits: Limits, ask: UseRequest, now: datetime) -> Grant:
    """Grant a request as far as the limits allow. The grants of all workers never exceed a limit."""
    use = use.at(now)
    second = int(use.newest)
    seconds = dict(use.seconds)
    requests = 0
    if limits.requests_per_minute is not None:
        _add(seconds, second, math.ceil(ask.used.requests))
        room = limits.requests_per_minute - sum(seconds.values())
        requests = max(0, min(math.floor(ask.wanted.requests), room))
        _add(seconds, second, requests)
    tokens, use.tokens = _take(use.tokens, limits.tokens_per_day, ask.used.tokens, ask.wanted.tokens)
    money, use.money = _take(use.money, limits.money_per_month, ask.used.money, ask.wanted.money)
    use.seconds = seconds
    slots = 0
    use.holders = {name: held for name, held in use.holders.items() if name != ask.holder}
    if limits.concurrent is not None:
        slots = ask.slots + max(0, min(ask.spare, limits.concurrent - use.slots - ask.slots))
        if slots:
            use.holders[ask.holder] = (slots, use.newest + LEASE)
    return Grant(portion=Portion(requests=requests, tokens=tokens, money=money), slots=slots, use=use)


def _take(taken: float, limit: float | None, used: float, wanted: float) -> tuple[float, float]:
    """Return the grant, and the use after it."""
    taken = max(0.0, taken + used)
    given = wanted if limit is None else max(0.0, min(wanted, limit - taken))
    return given, taken + given


def _add(seconds: dict[int, int], second: int, count: int) -> None:
    """Add requests to a second. A negative number is taken from the latest ones."""
    if count >= 0:
        seconds[second] = seconds.get(second, 0) + count
        return
    for each in sorted(seconds, reverse=True):
        given = min(seconds[each], -count)
        seconds[each] -= given
        count += given
        if not count:
            return


def retry_after(name: LimitName, use: TotalUse, limits: Limits, now: datetime) -> float:
    """Return the seconds after which there is room again."""
    use = use.at(now)
    moment = datetime.fromtimestamp(use.newest, UTC)
    if name == "requests_per_minute":
        most = limits.requests_per_minute or 0
        excess = use.requests - most + 1
        for second, count in sorted(use.seconds.items()):
            excess -= count
            if excess <= 0:
                return max(SOON, second + WINDOW + 1 - use.newest)
        return float(WINDOW)
    if name == "tokens_per_day":
        tomorrow = moment.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return (tomorrow - moment).total_seconds()
    if name == "money_per_month":
        first = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return ((first + timedelta(days=32)).replace(day=1) - moment).total_seconds()
    is_closed = name == "concurrent" and limits.concurrent == 0
    return AFTER_CHANGE if is_closed or name == "stored_bytes" else SOON
