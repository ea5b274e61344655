"""The strategies by name: their parameters, what they need, and the stages they are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, assert_never

from app.domain.errors import InvalidRequest
from app.strategies.epochs import Needs, check_number

DEFAULT_REFERENCES = 2_000
MAX_REFERENCES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Everything, always (flo.monster, "Full Mode"). Only an overflow reported by the upstream makes it cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slim:
    """Activity log and recent turns (flo.monster, "Terse Mode").

    ``references`` are the tokens of the reference index; None is the default of the policy: none under
    ``every_request``, whose contexts are literally the document's, else 2,000.
    """

    recent_turns: int = 3
    references: int | None = None
    derive_terse: bool = True


Strategy = Full | Slim

STRATEGIES: Mapping[str, type[Full] | type[Slim]] = {"full": Full, "slim": Slim}
_RANGES: Mapping[str, tuple[float, float]] = {"recent_turns": (1, 10), "references": (0, MAX_REFERENCES)}


def strategy_name(strategy: Strategy) -> str:
    """``full``, ``slim``."""
    match strategy:
        case Full():
            return "full"
        case Slim():
            return "slim"
        case _:
            assert_never(strategy)


def strategy_text(strategy: Strategy) -> str:
    """Name and parameters, for fingerprints and answers: ``slim(derive_terse=True, recent_turns=3, ...)``."""
    values = ", ".join(f"{name}={value}" for name, value in sorted(asdict(strategy).items()))
    return f"{strategy_name(strategy)}({values})"


def strategy_needs(strategy: Strategy) -> Needs:
    """What the decision about epochs has to know."""
    match strategy:
        case Full():
            return Needs(cuts=False, recent_turns=1)
        case Slim(recent_turns=turns):
            return Needs(cuts=True, recent_turns=turns)
        case _:
            assert_never(strategy)


def parse_strategy(value: object, *, references: int | None = None, field: str = "strategy") -> Strategy:
    """``"slim"`` or ``{"name": "slim", "recent_turns": 3}``, or that as JSON text.

    ``references`` stands in where the strategy does not say it itself. Raises `InvalidRequest` with the name,
    the value and the range of what is unknown or out of range.
    """
    given = _read(value, field)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in STRATEGIES:
        raise InvalidRequest(f"{field} must be one of {', '.join(STRATEGIES)}, not {str(name)[:40]!r}", field=field)
    known = [parameter.name for parameter in fields(STRATEGIES[name])]
    for key, parameter in given.items():
        _check(key, parameter, known, f"{field}.{str(key)[:40]}", field)
    strategy = STRATEGIES[name](**given)
    if isinstance(strategy, Slim) and strategy.references is None:
        return replace(strategy, references=references)
    return strategy


def _read(value: object, field: str) -> dict[str, Any]:
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{field} is not valid JSON: {str(value)[:40]!r}", field=field) from error
    if isinstance(value, str):
        return {"name": value.strip()}
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{field} must be a name or an object with one, not {str(value)[:40]!r}", field=field)
    return {str(key): parameter for key, parameter in value.items()}


def _check(key: str, value: object, known: list[str], name: str, field: str) -> None:
    if key not in known:
        allowed = ", ".join(known) or "none"
        raise InvalidRequest(f"{name}: unknown parameter, known are: {allowed}", field=field)
    if key == "derive_terse":
        if not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false, not {str(value)[:40]!r}", field=field)
        return
    if key == "references" and value is None:
        return
    check_number(name, value, _RANGES[key], whole=True, field=field)
