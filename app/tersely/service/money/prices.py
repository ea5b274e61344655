"""Prices of models and the cost of a call, in USD.

Prices come from the table of the ``genai-prices`` package, which works offline, and from a file of the operator's that
overrides it. A model without a price costs None, never 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from genai_prices import Usage, calc_price

from tersely.dialects.dialect import HOUR_WRITES
from tersely.domain.errors import TerselyError

MILLION = 1_000_000
_PROVIDERS = {
    "openai_chat": "openai",
    "openai_responses": "openai",
    "anthropic": "anthropic",
    "gemini": "google",
    "gemini_gca": "google",
}
_MEMBERS = ("input", "cached", "write", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPrice:
    """USD for one token: of plain input, of input read from the cache and written to it, and of output."""

    input: float
    cached: float
    write: float
    output: float

    def cost(self, *, input_tokens: int, cached: int, output: int, written: float | None = None) -> float:
        """The cost of a call. ``written``: see `Usage` of the dialects; None: all that was not read from the cache."""
        fresh = max(0, input_tokens - cached)
        writes = fresh if written is None else min(written, HOUR_WRITES * fresh)
        plain = fresh * self.input + min(cached, input_tokens) * self.cached + output * self.output
        return plain + writes * (self.write - self.input)


def scale_writes(written: float, *, fresh: int, to: float) -> float:
    """Return the tokens that a request writes to the cache if it has ``to`` tokens that the cache does not hold, and
    writes the same share of them as a call that wrote ``written`` of ``fresh``.
    """
    return written * max(0.0, to) / fresh if fresh > 0 else 0.0


class PriceFileInvalid(TerselyError):
    """The file of prices cannot be used; the text says why."""


class Prices:
    """Looks up prices; each model once."""

    def __init__(self, overrides: Mapping[str, ModelPrice] | None = None) -> None:
        """``overrides``: model -> price, before the table. A name that ends in ``*`` stands for a prefix."""
        self._overrides = dict(overrides or {})
        self._find = lru_cache(maxsize=1024)(self._look_up)
        # The package reads its table at the first look, which would be in a call, on the event loop.
        _from_table("gpt-4o-mini", "openai")

    def of(self, model: str, dialect: str = "") -> ModelPrice | None:
        """Return the price of ``model``; None if it is unknown."""
        return self._find(model, dialect)

    def of_call(self, requested: str, answered: str, dialect: str) -> ModelPrice | None:
        """Return the price of a call's model; None if it is unknown.

        The model that the request names comes first: clients and operators know that one. The reply may name another,
        a dated version, or the model behind a deployment.
        """
        return self._find(requested, dialect) or self._find(answered, dialect)

    def _look_up(self, model: str, dialect: str) -> ModelPrice | None:
        if (own := self._overrides.get(model)) is not None:
            return own
        for name, price in self._overrides.items():
            if name.endswith("*") and model.startswith(name[:-1]):
                return price
        if not model:
            return None
        for name in dict.fromkeys((model, model.rpartition("/")[2])):
            for provider in (_PROVIDERS.get(dialect), None):
                try:
                    return _from_table(name, provider)
                except (LookupError, ValueError):
                    continue
        return None


def _from_table(model: str, provider: str | None) -> ModelPrice:
    """Raises `LookupError` where the table has no such model."""

    def price(**tokens: int) -> float:
        found: Any = calc_price(Usage(**tokens), model_ref=model, provider_id=provider)
        return float(found.total_price)

    plain = price(input_tokens=1000) / 1000
    cached = price(input_tokens=1000, cache_read_tokens=1000) / 1000
    write = price(input_tokens=1000, cache_write_tokens=1000) / 1000
    output = price(output_tokens=1000) / 1000
    if not (plain or output):
        raise LookupError(model)
    return ModelPrice(input=plain, cached=cached or plain, write=write or plain, output=output)


def read_prices(path: Path) -> dict[str, ModelPrice]:
    """Read a file of prices. Raises `PriceFileInvalid`.

    JSON: ``{"model": {"input": n, "output": n, "cached": n, "write": n}}`` in USD per million tokens; ``cached`` and
    ``write`` default to ``input``.
    """
    try:
        given: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PriceFileInvalid(f"TERSELY_PRICES: {path} cannot be read as JSON: {error}") from error
    if not isinstance(given, dict):
        raise PriceFileInvalid(f"TERSELY_PRICES: {path} must hold an object of model to price")
    return {str(model): _read_price(str(model), price) for model, price in given.items()}


def _read_price(model: str, given: object) -> ModelPrice:
    if not isinstance(given, dict) or "input" not in given or "output" not in given:
        raise PriceFileInvalid(f'TERSELY_PRICES: {model!r} needs "input" and "output", in USD per million tokens')
    unknown = sorted(set(given) - set(_MEMBERS))
    if unknown:
        raise PriceFileInvalid(f"TERSELY_PRICES: {model!r} has no {unknown[0]!r}; known are {', '.join(_MEMBERS)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MILLION:
            raise PriceFileInvalid(f"TERSELY_PRICES: {model!r}: {name} must be a number from 0 to {MILLION}")
    each = {name: float(given[name if name in given else "input"]) / MILLION for name in _MEMBERS}
    return ModelPrice(**each)
