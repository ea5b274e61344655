"""The ratio of each model's reported tokens to our estimates, learnt from what hosts report, and shared by all workers.

A worker learns from its own calls at once. Every few seconds it stores what it learnt, and takes over what others did.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from datetime import datetime, timedelta

from tersely.domain.errors import StoreRefused, StoreUnavailable
from tersely.domain.tokens import Calibration
from tersely.store.db.connection import Database
from tersely.store.ops import calibrations
from tersely.store.ops.calibrations import StoredCalibration

_log = logging.getLogger(__name__)

MAX_MODELS = 512
# Longer names are not shared.
MAX_NAME = 200
# Seconds between two exchanges with the store.
SHARE_EVERY = 3.0
# What was learnt longer ago is not taken over at the start.
REMEMBERED = timedelta(days=30)
# How far the clocks of two machines may be apart.
SKEW = timedelta(seconds=30)
# A change that others need to know.
CHANGE = 0.01
# More samples than these weigh no more when two calibrations are joined.
FULL_WEIGHT = 5


class Calibrations:
    """One calibration per model, least recently used ones evicted."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Calibration] = OrderedDict()
        # What is to be stored, and the last that was stored or taken over, by tenant and model.
        self._learnt: dict[tuple[str, str], Calibration] = {}
        self._known: OrderedDict[tuple[str, str], Calibration] = OrderedDict()

    def ratio(self, model: str) -> float:
        """Reported tokens divided by estimated ones."""
        known = self._models.get(model)
        return known.ratio if known is not None else 1.0

    def observe(self, model: str, *, tenant: str, estimated: int, reported: int) -> None:
        """Learn from one call."""
        before = self._models.pop(model, None) or Calibration()
        after = self._models[model] = before.observe(estimated=estimated, reported=reported)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        if after is before or len(model) > MAX_NAME or len(self._learnt) >= MAX_MODELS:
            return
        stored = self._known.get((tenant, model))
        if stored is None or abs(stored.ratio - after.ratio) > CHANGE:
            self._learnt[tenant, model] = after

    async def keep_shared(self, database: Database, clock: Callable[[], datetime]) -> None:
        """Exchange what was learnt with the store, until cancelled."""
        since = clock() - REMEMBERED
        while True:
            now = clock()
            try:
                if not database.is_away():
                    await self.share(database, now, since)
                    since = now - SKEW
            except (StoreUnavailable, StoreRefused) as error:
                _log.info("calibrations were not shared: %s", type(error).__name__)
            await asyncio.sleep(SHARE_EVERY)

    async def share(self, database: Database, now: datetime, since: datetime) -> None:
        """Store what was learnt, and take over what others stored since then. Raises `StoreUnavailable`."""
        learnt, self._learnt = self._learnt, {}
        by_tenant: dict[str, list[StoredCalibration]] = {}
        for (tenant, model), each in learnt.items():
            row = StoredCalibration(tenant=tenant, model=model, ratio=each.ratio, samples=each.samples, updated_at=now)
            by_tenant.setdefault(tenant, []).append(row)
        for tenant, rows in by_tenant.items():
            await calibrations.save(database, tenant, rows, now)
            for row in rows:
                self._note(row)
        for row in reversed(await calibrations.changed_since(database, since, limit=MAX_MODELS)):
            if self._known.get((row.tenant, row.model)) != Calibration(ratio=row.ratio, samples=row.samples):
                self._note(row)
                self._join(row)

    def _note(self, row: StoredCalibration) -> None:
        self._known[row.tenant, row.model] = Calibration(ratio=row.ratio, samples=row.samples)
        self._known.move_to_end((row.tenant, row.model))
        if len(self._known) > MAX_MODELS:
            self._known.popitem(last=False)

    def _join(self, row: StoredCalibration) -> None:
        """Move a model's calibration towards another worker's, each weighed by its samples."""
        own = self._models.get(row.model) or Calibration()
        mine, theirs = min(own.samples, FULL_WEIGHT), min(row.samples, FULL_WEIGHT)
        if mine + theirs:
            ratio = (own.ratio * mine + row.ratio * theirs) / (mine + theirs)
            self._models[row.model] = Calibration(ratio=ratio, samples=max(own.samples, row.samples))
