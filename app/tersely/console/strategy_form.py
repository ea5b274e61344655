"""The form for a strategy: a field for each parameter, and back from the fields to the setting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tersely.strategies.presets import STRATEGIES

PREFIX = "p_"
"""In front of a parameter's name, in forms."""
POLICIES = {
    "": "as it is",
    "auto": "auto: at the limit, or when a cut pays",
    "every_request": "at every call",
    "marks": "between two marks",
    "stride": "every N turns",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterField:
    """A parameter: its default, what was given, and its bounds or its choices."""

    name: str
    given: str
    default: str
    low: int | None = None
    high: int | None = None
    choices: tuple[str, ...] = ()


def parameter_fields(strategy: str, get: Callable[[str], str]) -> list[ParameterField]:
    """Return the fields of a strategy. ``get`` gives the form's values."""
    if strategy not in STRATEGIES:
        return []
    found = []
    for each in fields(STRATEGIES[strategy]):
        low, high = each.metadata.get("bounds", (None, None))
        choices = each.metadata.get("choices", ("true", "false") if isinstance(each.default, bool) else ())
        default = "by the policy" if each.default is None else str(each.default).lower()
        given = get(PREFIX + each.name).strip()
        found.append(
            ParameterField(name=each.name, given=given, default=default, low=low, high=high, choices=tuple(choices))
        )
    return found


def write_strategy(strategy: str, parameters: list[ParameterField]) -> str:
    """Return the setting: a name, or JSON where a parameter was given."""
    given: dict[str, Any] = {each.name: _value(each) for each in parameters if each.given}
    return json.dumps({"name": strategy, **given}) if given else strategy


def write_policy(kind: str, get: Callable[[str], str]) -> str:
    """Return the epoch policy that the form describes; empty where nothing is chosen."""
    names = {"marks": ("high", "low"), "stride": ("stride",)}.get(kind)
    if names is None:
        return kind
    given = {name: _number(get(name)) for name in names if get(name).strip()}
    return json.dumps(given) if given else ""


def _value(field: ParameterField) -> Any:
    if field.choices == ("true", "false"):
        return field.given == "true" if field.given in field.choices else field.given
    return field.given if field.choices else _number(field.given)


def _number(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else text
