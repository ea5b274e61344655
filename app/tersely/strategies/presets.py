"""The strategies by name, with their parameters: each document's own defaults under names that can be recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from typing import Any, Literal

from tersely.domain.errors import InvalidRequest
from tersely.domain.text.tool_output import LEAST_SPILLED
from tersely.strategies.epochs.policies import check_number

DEFAULT_REFERENCES = 2_000
DEFAULT_FILES = 4_200
MAX_REFERENCES = 100_000
_MANY = 10_000_000


def _number(default: int, low: int, high: int) -> Any:
    return field(default=default, metadata={"bounds": (low, high)})


def _choice(default: str, *others: str) -> Any:
    return field(default=default, metadata={"choices": (default, *others)})


def _index() -> Any:
    """Return the tokens of the reference index. None: the policy's default, 0 under ``every_request``, else
    2,000, and at most an eighth of the low watermark.
    """
    return field(default=None, metadata={"bounds": (0, MAX_REFERENCES)})


def _files() -> Any:
    """Return the tokens of excerpts of files. None: the policy's default, 0 under ``every_request``, else 4,200."""
    return field(default=None, metadata={"bounds": (0, MAX_REFERENCES)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Full:
    """Keep everything (flo.monster, "Full Mode"). Only an overflow reported by the upstream causes a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slim:
    """Activity log and recent turns (flo.monster, "Terse Mode"). ``files``: tokens of excerpts of files."""

    recent_turns: int = _number(3, 1, 10)
    references: int | None = _index()
    derive_terse: bool = True
    files: int | None = _files()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The last ``context_size`` turns (0: all), state block, scratchpad and memos (std::slop).

    Characters of tool results: of the ``recent_results`` newest of the active turn, of its older ones, of those of
    inactive turns.
    """

    context_size: int = _number(10, 0, 1_000)
    recent_results: int = _number(5, 0, 1_000)
    recent_chars: int = _number(5_000, 100, _MANY)
    older_chars: int = _number(1_000, 100, _MANY)
    inactive_chars: int = _number(300, 100, _MANY)
    memos: int = _number(5, 0, 50)
    references: int | None = _index()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trim:
    """Drops halves of the history when turns or tokens exceed their limits (CowAgent).

    ``max_context_tokens`` includes instructions and tools. After ``max_steps`` tool steps of one turn the model is
    asked to answer. ``resume_idle`` seconds without a call count as the document's restart.
    """

    max_context_tokens: int = _number(50_000, 1_000, _MANY)
    max_context_turns: int = _number(20, 1, 1_000)
    max_steps: int = _number(15, 1, 10_000)
    max_result_chars: int = _number(20_000, 100, _MANY)
    resume_idle: int = _number(14_400, 60, 31_536_000)
    references: int | None = _index()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """A prefix is replaced by a structured checkpoint (tiancaiamao/ai).

    Tokens but for ``max_messages``, ``keep_recent`` (messages), ``tool_call_cutoff`` (results) and the limits of tool
    output (lines, bytes, characters). ``max_tokens`` 0: no such threshold.
    """

    max_messages: int = _number(50, 2, 100_000)
    max_tokens: int = _number(8_000, 0, _MANY)
    keep_recent: int = _number(5, 1, 100_000)
    keep_recent_tokens: int = _number(20_000, 0, _MANY)
    reserve_tokens: int = _number(16_384, 0, _MANY)
    tool_call_cutoff: int = _number(10, 1, 100_000)
    tool_summary_strategy: str = _choice("llm", "heuristic", "off")
    auto_compact: bool = True
    max_lines: int = _number(2_000, 1, _MANY)
    max_bytes: int = _number(50 * 1024, 100, 1 << 30)
    max_chars: int = _number(200 * 1024, 100, 1 << 30)
    large_output_threshold: int = _number(200 * 1024, LEAST_SPILLED, 1 << 30)
    truncate_mode: str = _choice("head_tail", "head")
    references: int | None = _index()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """Four memory levels with budgets in tokens (Fifth); ages in seconds, ``capacity_trigger`` in percent."""

    permanent_budget: int = _number(2_000, 0, _MANY)
    session_budget: int = _number(4_000, 0, _MANY)
    working_budget: int = _number(8_000, 500, _MANY)
    total_budget: int = _number(16_000, 1_000, _MANY)
    working_age: int = _number(300, 0, 31_536_000)
    session_age: int = _number(1_800, 0, 31_536_000)
    capacity_trigger: int = _number(80, 1, 100)
    references: int | None = _index()


Strategy = Full | Slim | Window | Trim | Compact | Tiered
StrategyName = Literal["full", "slim", "window", "trim", "compact", "tiered"]

STRATEGIES: Mapping[str, type[Strategy]] = {
    "full": Full,
    "slim": Slim,
    "window": Window,
    "trim": Trim,
    "compact": Compact,
    "tiered": Tiered,
}
# Parameters that stored fingerprints of earlier releases do not name: with 0 their epochs go on.
_LATER = frozenset({"files"})
_NAMES = {kind: name for name, kind in STRATEGIES.items()}


def strategy_name(strategy: Strategy) -> str:
    """``full``, ``slim``, ``window``, ..."""
    return _NAMES[type(strategy)]


def strategy_text(strategy: Strategy) -> str:
    """Name and parameters, for fingerprints and answers: ``slim(derive_terse=True, recent_turns=3, ...)``."""
    given = {name: value for name, value in asdict(strategy).items() if value != 0 or name not in _LATER}
    values = ", ".join(f"{name}={value}" for name, value in sorted(given.items()))
    return f"{strategy_name(strategy)}({values})"


def parse_strategy(value: object, *, references: int | None = None, field: str = "strategy") -> Strategy:
    """Parse a strategy: ``"slim"``, ``{"name": "slim", "recent_turns": 3}``, or that as JSON text.

    ``references`` is the default of that parameter. Raises `InvalidRequest` with the name, value and range of an
    unknown or out-of-range parameter.
    """
    given = _read(value, field)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in STRATEGIES:
        raise InvalidRequest(f"{field} must be one of {', '.join(STRATEGIES)}, not {str(name)[:40]!r}", field=field)
    known = {parameter.name: parameter for parameter in fields(STRATEGIES[name])}
    for key, parameter in given.items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise InvalidRequest(f"{field}.{key[:40]}: unknown parameter, known are: {allowed}", field=field)
        _check(known[key], parameter, f"{field}.{key}", field)
    strategy = STRATEGIES[name](**given)
    if not isinstance(strategy, Full) and strategy.references is None:
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


def _check(parameter: Field[Any], value: object, name: str, field: str) -> None:
    if value is None and parameter.default is None:
        return
    if "bounds" in parameter.metadata:
        check_number(name, value, parameter.metadata["bounds"], whole=True, field=field)
    elif "choices" in parameter.metadata:
        choices = parameter.metadata["choices"]
        if value not in choices:
            raise InvalidRequest(f"{name} must be one of {', '.join(choices)}, not {str(value)[:40]!r}", field=field)
    elif not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, not {str(value)[:40]!r}", field=field)
