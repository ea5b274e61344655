"""How each model's reported tokens relate to our estimates, learnt from what hosts report."""

from __future__ import annotations

from collections import OrderedDict

from tersely.domain.tokens import Calibration

MAX_MODELS = 512


class Calibrations:
    """One calibration per model, least recently used ones evicted. A worker learns a model within a few calls."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, Calibration] = OrderedDict()

    def ratio(self, model: str) -> float:
        """Reported tokens divided by estimated ones."""
        known = self._models.get(model)
        return known.ratio if known is not None else 1.0

    def observe(self, model: str, *, estimated: int, reported: int) -> None:
        """Learn from one call."""
        known = self._models.pop(model, None) or Calibration()
        self._models[model] = known.observe(estimated=estimated, reported=reported)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
