"""The savings of contexts: tokens and money as sent, against the full history with a perfect cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import reduce
from operator import add

from tersely.domain.errors import InvalidRequest
from tersely.service.money.prices import Prices
from tersely.store.db.connection import Database
from tersely.store.ops import calls
from tersely.store.ops import shadows as shadow_calls
from tersely.store.ops.calls import CallSums, GroupBy, SummarySums
from tersely.store.ops.shadows import ShadowSums

DAYS = 30
"""Days that are looked at where the caller names no beginning."""
LIMIT = 15.0
MAX_SETTING = 120
"""Characters of a strategy's setting that a sentence quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostComparison:
    """USD as sent, as the full history with a perfect cache would have cost, and the difference."""

    sent: float
    full: float

    @property
    def saved(self) -> float:
        """The difference: below 0 where more was spent than saved."""
        return self.full - self.sent


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsRow:
    """Sums over the calls of one key.

    Tersely counted the tokens before and after, of calls that did not fail; the provider reported the others.
    ``summaries`` are the summarizer's calls and tokens, whose cost is part of ``money.sent``. ``money`` is None if no
    call has a price. ``shadows``: what strategies that were only tried out would have sent, by their settings.
    """

    key: str
    calls: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    priced_calls: int = 0
    summary_calls: int = 0
    summary_tokens: int = 0
    money: CostComparison | None = None
    shadows: Mapping[str, ShadowSums] = field(default_factory=dict)

    @property
    def shadow(self) -> ShadowSums | None:
        """The sums over all strategies that were tried out; None without any."""
        return reduce(add, self.shadows.values()) if self.shadows else None

    def describe_shadows(self) -> str:
        """Return what each strategy would have cost, in one sentence: figures of several do not add up."""
        return "; ".join(
            f"with {strategy[:MAX_SETTING]} {sums.describe('these calls')}" for strategy, sums in self.shadows.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingsReport:
    """Savings from ``since`` until ``until``, by key and in all."""

    since: datetime
    until: datetime
    by: GroupBy
    rows: tuple[SavingsRow, ...]
    total: SavingsRow


class Savings:
    """Sums over the calls of a tenant."""

    def __init__(
        self,
        database: Database,
        prices: Prices,
        *,
        clock: Callable[[], datetime],
        summary_price: Callable[[int, int], float | None],
    ) -> None:
        """``summary_price`` gives the configured cost of so many input and output tokens of the summarizer's model."""
        self._database = database
        self._prices = prices
        self._clock = clock
        self._summary_price = summary_price

    async def report(
        self, tenant: str, *, since: datetime | None = None, until: datetime | None = None, by: GroupBy = "day"
    ) -> SavingsReport:
        """Raises `InvalidRequest` where ``until`` is not after ``since``."""
        until = until or self._clock() + timedelta(seconds=1)
        since = since or until - timedelta(days=DAYS)
        if until <= since:
            raise InvalidRequest("until must be after since", field="until")
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            sums = await calls.sums(connection, tenant, since=since, until=until, by=by)
            own = await calls.summary_sums(connection, tenant, since=since.date(), until=until.date(), by=by)
            tried = await shadow_calls.sums(connection, tenant, since=since, until=until, by=by)
        rows = {each.key: _row(each) for each in sums}
        for each in own:
            rows[each.key] = self._with_summaries(rows.get(each.key, SavingsRow(key=each.key)), each)
        for key, each_shadows in tried.items():
            rows[key] = replace(rows.get(key, SavingsRow(key=key)), shadows=each_shadows)
        ordered = tuple(rows[key] for key in sorted(rows))
        return SavingsReport(since=since, until=until, by=by, rows=ordered, total=_total(ordered))

    async def shadow_of(self, tenant: str, session_id: str) -> tuple[str, ShadowSums] | None:
        """Return the strategy that was tried out in a session, and its figures; None without any."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            return await shadow_calls.of_session(connection, tenant, session_id)

    async def shadows_of(self, tenant: str, session_ids: Sequence[str]) -> dict[str, tuple[str, ShadowSums]]:
        """Return the same for those of the sessions that have any."""
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            return await shadow_calls.of_sessions(connection, tenant, session_ids)

    def _with_summaries(self, row: SavingsRow, own: SummarySums) -> SavingsRow:
        cost = self._summary_price(own.input_tokens, own.output_tokens)
        price = self._prices.of(own.model)
        if cost is None and price is not None:
            cost = price.input * own.input_tokens + price.output * own.output_tokens
        money = row.money
        if cost is not None:
            money = CostComparison(sent=(money.sent if money else 0.0) + cost, full=money.full if money else 0.0)
        return replace(
            row,
            summary_calls=row.summary_calls + own.calls,
            summary_tokens=row.summary_tokens + own.input_tokens + own.output_tokens,
            money=money,
        )


def _row(sums: CallSums) -> SavingsRow:
    return SavingsRow(
        key=sums.key,
        calls=sums.calls,
        tokens_before=sums.tokens_before,
        tokens_after=sums.tokens_after,
        input_tokens=sums.input_tokens,
        cached_tokens=sums.cached_tokens,
        output_tokens=sums.output_tokens,
        priced_calls=sums.priced_calls,
        money=CostComparison(sent=sums.cost_sent, full=sums.cost_full) if sums.priced_calls else None,
    )


_COUNTED = (
    "calls", "tokens_before", "tokens_after", "input_tokens", "cached_tokens", "output_tokens", "priced_calls",
    "summary_calls", "summary_tokens",
)  # fmt: skip


def _total(rows: tuple[SavingsRow, ...]) -> SavingsRow:
    money = [row.money for row in rows if row.money is not None]
    counted = {name: sum(getattr(row, name) for row in rows) for name in _COUNTED}
    sent, full = sum(each.sent for each in money), sum(each.full for each in money)
    shadows: dict[str, ShadowSums] = {}
    for row in rows:
        for strategy, sums in row.shadows.items():
            shadows[strategy] = shadows[strategy] + sums if strategy in shadows else sums
    return SavingsRow(
        key="total",
        money=CostComparison(sent=sent, full=full) if money else None,
        shadows=dict(sorted(shadows.items())),
        **counted,
    )
