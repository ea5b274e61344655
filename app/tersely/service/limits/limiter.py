"""Keep the limits of tenants and keys, exactly across workers, without a question to the database in most requests.

A worker takes portions of a limit from a row in the database before it needs them, in the background. The grants of all
workers never pass a limit; what workers hold and do not use is at most a hundredth of it each, and goes back after two
idle seconds. While the database is away each worker goes on by itself from what it knew last.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from datetime import datetime
from functools import partial
from typing import Any

from tersely.domain.errors import LimitExceeded, StoreUnavailable
from tersely.domain.limits import LimitName, Limits, grant
from tersely.service.common.metrics import Metrics
from tersely.service.limits.accounts import Account, AccountReservation, RequestNeed
from tersely.store.db.connection import Database
from tersely.store.ops import limits
from tersely.store.ops.limits import LimitHolder

_log = logging.getLogger(__name__)

TICK = 0.5
# Limits that were changed by another process count after so many seconds.
REFRESH = 2.0
# A call waits so long for a slot before it is refused: the one before it may just be ending on another worker.
PATIENCE = 0.5
STEP = 0.05
# Bytes are measured again after so many seconds, or so many times the duration of the last measurement.
MEASURE = 10.0
MEASURE_FACTOR = 30.0
# Accounts that are brought up to date at a time.
PARALLEL = 4

TEXTS: dict[LimitName, str] = {
    "requests_per_minute": "requests per minute",
    "concurrent": "concurrent calls",
    "tokens_per_day": "tokens per day",
    "money_per_month": "USD per month",
    "stored_bytes": "stored bytes",
}


class Limiter:
    """Admits requests within the limits."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        *,
        defaults: Limits,
        clock: Callable[[], datetime],
        monotonic: Callable[[], float],
        name: str,
    ) -> None:
        """``defaults`` are those of tenants that have none of their own; ``name`` identifies this worker."""
        self._database = database
        self._metrics = metrics
        self._defaults = defaults
        self._clock = clock
        self._monotonic = monotonic
        self._name = name
        self._limits: dict[LimitHolder, Limits] = {}
        self._accounts: dict[LimitHolder, Account] = {}
        self._refills: dict[LimitHolder, asyncio.Task[None]] = {}
        self._measuring: set[asyncio.Task[None]] = set()
        self._measure_every = MEASURE
        self._refreshed = -math.inf

    @property
    def defaults(self) -> Limits:
        """Return the limits of tenants that have none of their own."""
        return self._defaults

    def limits_of(self, tenant: str, key_id: str = "") -> Limits:
        """Return the limits that hold for a tenant, or those of its key alone."""
        own = self._limits.get(LimitHolder(tenant, key_id), Limits())
        return own if key_id else own.over(self._defaults)

    # A request

    async def admit(self, tenant: str, key_id: str, need: RequestNeed) -> list[AccountReservation]:
        """Reserve the amounts for a request within the limits of its tenant and key. Raises `LimitExceeded`."""
        accounts = self._accounts_of(tenant, key_id)
        if not accounts:
            return []
        patience = None
        while True:
            short = next(((each, names) for each in accounts if (names := each.lacks(need))), None)
            if short is None:
                holds = [each.take(need) for each in accounts]
                for each in accounts:
                    if each.is_short:
                        self._start_refill(each, wants=True)
                return holds
            account, names = short
            account.used_at = self._monotonic()
            used_up = next((name for name in names if account.is_paused(name)), None)
            if used_up is None:
                await self._refill(account)
                continue
            if patience is None:
                patience = self._monotonic() + PATIENCE
            if names != ["concurrent"] or self._monotonic() > patience or self._is_crowded(account):
                raise self._refusal(account, used_up)
            await self._wait_for_slot(account)

    def charge(self, tenant: str, tokens: float, money: float) -> None:
        """Count tokens and USD that were spent for a tenant outside of its requests: on summaries and embeddings."""
        for account in self._accounts_of(tenant, ""):
            account.charge(tokens, money)

    def _accounts_of(self, tenant: str, key_id: str) -> list[Account]:
        if not self._limits and self._defaults.is_empty:
            return []
        found = []
        for subject in (LimitHolder(tenant), LimitHolder(tenant, key_id)) if key_id else (LimitHolder(tenant),):
            effective = self.limits_of(tenant, subject.key_id)
            account = self._accounts.get(subject)
            if account is None and effective.is_empty:
                continue
            if account is None:
                account = self._accounts[subject] = Account(
                    subject,
                    effective,
                    self._name,
                    monotonic=self._monotonic,
                    clock=self._clock,
                    on_release=self._give_back,
                )
            elif account.limits != effective:
                account.limits = effective
                account.paused.clear()
            found.append(account)
        return found

    def _is_crowded(self, account: Account) -> bool:
        """Return whether as many calls wait for a slot as there are slots: another one would wait too long."""
        return account.waiting >= max(4, account.limits.concurrent or 0)

    def _give_back(self, account: Account) -> None:
        """Give slots back at once where other workers may be waiting for them."""
        if account.is_scarce and not self._database.is_away(account.subject.tenant):
            self._start_refill(account, wants=False)

    async def _wait_for_slot(self, account: Account) -> None:
        account.waiting += 1
        account.released.clear()
        try:
            async with asyncio.timeout(STEP):
                await account.released.wait()
        except TimeoutError:
            pass
        finally:
            account.waiting -= 1

    def _refusal(self, account: Account, name: LimitName) -> LimitExceeded:
        self._metrics.limited.labels(name).inc()
        most = getattr(account.limits, name)
        whose = "this key's" if account.subject.key_id else "this tenant's"
        wait = math.ceil(account.wait(name))
        return LimitExceeded(
            f"{whose} limit of {most:,} {TEXTS[name]} is used up: try again in {wait:,} seconds",
            limit=name,
            retry_after=wait,
        )

    # The shared record

    async def _refill(self, account: Account) -> None:
        """Request a portion, one query for all requests that wait for one."""
        account.waiting += 1
        try:
            await asyncio.shield(self._start_refill(account, wants=True))
        finally:
            account.waiting -= 1

    def _start_refill(self, account: Account, *, wants: bool) -> asyncio.Task[None]:
        task = self._refills.get(account.subject)
        # A finished task stays in the table until the loop runs its callbacks. Waiting for it does not yield to the
        # loop: a request that repeats until it has its portion would hold up the whole process.
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._sync(account, wants=wants))
            self._refills[account.subject] = task
            task.add_done_callback(partial(self._remove_refill, account.subject))
        return task

    def _remove_refill(self, subject: LimitHolder, task: asyncio.Task[None]) -> None:
        if self._refills.get(subject) is task:
            del self._refills[subject]

    async def _sync(self, account: Account, *, wants: bool) -> None:
        # One pass of the loop, so that requests that arrive together ask together.
        await asyncio.sleep(0)
        ask = account.ask(wants=wants)
        is_measured = account.limits.stored_bytes is not None and not account.subject.key_id
        try:
            granted, is_due = await limits.take(
                self._database,
                account.subject,
                account.limits,
                ask,
                self._clock(),
                measures=self._measure_every if is_measured else None,
            )
        except StoreUnavailable:
            local = account.revert(ask)
            account.accept(local, grant(account.use, account.limits, local, self._clock()), is_local=True)
        except BaseException:
            account.revert(ask)
            raise
        else:
            account.accept(ask, granted, is_local=False)
            if is_due:
                task = asyncio.get_running_loop().create_task(self._measure(account))
                self._measuring.add(task)
                task.add_done_callback(self._measuring.discard)

    async def _measure(self, account: Account) -> None:
        began = self._monotonic()
        try:
            size = await limits.measure_stored(self._database, account.subject.tenant)
            await limits.note_stored(self._database, account.subject, size, self._clock())
        except StoreUnavailable:
            _log.info("the stored bytes of a tenant were not measured: the database is away")
            return
        account.use.stored = size
        self._measure_every = max(MEASURE, MEASURE_FACTOR * (self._monotonic() - began))

    # In the background

    async def open(self) -> None:
        """Read the limits. While the database is unavailable the defaults apply."""
        try:
            await self.refresh()
        except StoreUnavailable:
            _log.info("the limits were not read: the database is away")

    async def refresh(self) -> None:
        """Read the limits again. Raises `StoreUnavailable`."""
        self._limits = await limits.read_all(self._database)
        self._refreshed = self._monotonic()

    async def keep_current(self) -> None:
        """Keep limits and accounts current, until cancelled."""
        while True:
            await asyncio.sleep(TICK)
            try:
                if self._monotonic() - self._refreshed > REFRESH and not self._database.is_away():
                    await self.refresh()
            except StoreUnavailable:
                self._refreshed = self._monotonic()
            await self._sync_all([each for each in self._accounts.values() if each.is_due()])
            for subject, account in list(self._accounts.items()):
                if account.is_empty and subject not in self._refills:
                    del self._accounts[subject]

    async def _sync_all(self, accounts: list[Account]) -> None:
        slots = asyncio.Semaphore(PARALLEL)

        async def sync(account: Account) -> None:
            async with slots:
                await asyncio.shield(self._start_refill(account, wants=False))

        if accounts:
            await _gather([sync(account) for account in accounts])

    async def close(self) -> None:
        """Return all reserved amounts."""
        for task in (*self._measuring, *self._refills.values()):
            task.cancel()
        for account in self._accounts.values():
            account.used_at = -math.inf
        held = [each for each in self._accounts.values() if not each.is_empty]
        await self._sync_all([each for each in held if not self._database.is_away(each.subject.tenant)])


async def _gather(work: list[Coroutine[Any, Any, None]]) -> None:
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, Exception):
            _log.error("limits were not updated", exc_info=result)
