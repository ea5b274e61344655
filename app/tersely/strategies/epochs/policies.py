"""Decide when a new epoch starts: the policies, their JSON forms, and the decision.

Under ``auto`` a cached prefix is given up only if it must be, or if that pays. Prices are relative to plain input.
After a cut to a fraction ``q`` the remaining prefix costs ``w*q`` instead of ``r`` once, and each later call saves
``r*(1-q)``. So a cut breaks even after ``(w*q - r) / (r*(1-q))`` more calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Literal, NamedTuple, assert_never, get_args

import msgspec
from msgspec.structs import replace

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Snapshot
from tersely.strategies.epochs.cutting import TURN_CUT_FILL, Cut, CutDistances, cut_to_tokens, must_stay
from tersely.strategies.pipeline import count_entries

Reason = Literal[
    "first",
    "high_watermark",
    "window",
    "overflow",
    "edit",
    "config",
    "stride",
    "cold_cache",
    "break_even",
    "every_request",
    "turns",
    "messages",
    "resume",
    "compact",
    "clear",
    "instructions",
]
REASONS: tuple[Reason, ...] = get_args(Reason)

# Characters of a model's name in a policy.
MAX_MODEL = 200
# A cut must bring the content below this share of its size. Otherwise a single message above the watermark would start
# an epoch at every call.
PROGRESS = 0.85
# With a cold cache a new prefix costs nothing extra, but a cut still loses detail: it is worth that only clearly above
# `low`.
COLD_MARGIN = 1.5
# How many more calls there will be is a guess; the saving has to be so many times the price.
BREAK_EVEN_MARGIN = 2.0
# And should the session end with this very call, the re-write may cost so much of what the session would have cost
# with everything sent.
REGRET = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryRequest:
    """A new epoch at each call: the literal behaviour of the reference documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """Start a new epoch when the tail holds ``stride`` turns more than the strategy keeps."""

    stride: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """Watermarks in tokens without instructions and tools; prices relative to plain input; lifetimes in seconds.

    ``instructions_at``: from this share of the high watermark on requests carry Tersely's own instructions.
    """

    high: int = 32_000
    low: int = 9_000
    write_price: float = 1.25
    read_price: float = 0.1
    cache_ttl: int = 300
    instructions_at: float = 0.5


Policy = EveryRequest | Stride | Auto

_RANGES: Mapping[str, tuple[float, float]] = {
    "stride": (1, 1_000),
    "high": (1_000, 10_000_000),
    "low": (500, 10_000_000),
    "write_price": (0.0, 10.0),
    "read_price": (0.0, 10.0),
    "cache_ttl": (0, 604_800),
    "instructions_at": (0.0, 1.0),
}
# What the beginning of an epoch does not depend on.
_NOT_IN_FINGERPRINT = frozenset({"instructions_at"})


class CutConditions(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a strategy for the decision: whether it cuts at all, and how many last turns it keeps in full.

    ``high`` is the strategy's own limit instead of the policy's watermark, in tokens of content. ``is_over_limit``
    names another limit that the history exceeds and that a cut would help. ``resume_idle`` seconds without a call end
    an epoch. ``by_turns``: the strategy is a window of turns, which a stride can move. ``saves``: the strategy also
    cuts without need if that is cheaper.
    """

    cuts: bool
    recent_turns: int = 1
    high: int | None = None
    is_over_limit: Reason | None = None
    resume_idle: int | None = None
    by_turns: bool = True
    saves: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinueEpoch:
    """Continue the current epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEpoch:
    """Start a new epoch, for this reason."""

    reason: Reason


EpochDecision = ContinueEpoch | StartEpoch


class TokenSums(NamedTuple):
    """Tokens of a snapshot's messages: of those ``kept`` from before the cut, of the ``tail``, and of what no cut
    removes (``required``: see `must_stay`); ``steps`` counts the replies in the tail.
    """

    kept: int
    tail: int
    required: int
    steps: int


class Watermarks(msgspec.Struct, frozen=True, kw_only=True):
    """The watermarks of one snapshot. ``room``: the part of the window that is left beside the fixed tokens."""

    high: int
    low: int
    room: int | None


def parse_policy(
    value: object, *, field: str = "epoch", policy_for_model: Callable[[str], Auto] | None = None
) -> Policy:
    """``"auto"``, ``"every_request"``, ``{"high": 32000, "low": 12000}``, ``{"model": "gpt-4o"}`` or ``{"stride": 8}``,
    or such as JSON text.

    ``policy_for_model`` returns the watermarks and prices for the name in ``model``; other members override them.
    Raises `InvalidRequest`, which names the invalid member, its value and the allowed range.
    """
    if isinstance(value, str):
        value = _read_policy_text(value, field)
    if value == "auto":
        return Auto()
    if value == "every_request":
        return EveryRequest()
    if not isinstance(value, Mapping) or not value:
        raise InvalidRequest(_expected_policy(value, field), field=field)
    if "model" in value:
        value = _for_model(value, policy_for_model, field)
    kind: type[Stride] | type[Auto] = Stride if "stride" in value else Auto
    known = {known.name: known.type for known in fields(kind)}
    for name, given in value.items():
        if name not in known:
            raise InvalidRequest(f"{field}: unknown {str(name)[:40]!r}, known are {', '.join(known)}", field=field)
        check_number(f"{field}.{name}", given, _RANGES[name], whole=known[name] == "int", field=field)
    policy = kind(**value)
    if isinstance(policy, Auto):
        _check_marks(policy, value, field)
        if isinstance(value, Mapping) and "low" not in value and policy.low >= policy.high:
            return Auto(**{**value, "low": policy.high * 3 // 8})
    return policy


def check_number(name: str, value: object, bounds: tuple[float, float], *, whole: bool, field: str) -> None:
    """Raise `InvalidRequest` unless ``value`` is a number within ``bounds`` (inclusive), whole if asked."""
    low, high = bounds
    number = value if isinstance(value, int if whole else int | float) and not isinstance(value, bool) else None
    if not isinstance(number, int | float) or not low <= number <= high:
        kind = "an integer" if whole else "a number"
        span = " to ".join(str(int(bound)) if float(bound).is_integer() else str(bound) for bound in bounds)
        raise InvalidRequest(f"{name} must be {kind} from {span}, not {str(value)[:40]!r}", field=field)


def fingerprint(strategy_text: str, policy: Policy) -> str:
    """Return strategy, parameters and policy as one short text. A different text means a new epoch."""
    match policy:
        case EveryRequest():
            return f"{strategy_text} every_request"
        case Stride():
            return f"{strategy_text} stride({policy.stride})"
        case Auto():
            values = ", ".join(
                f"{name}={float(value)!r}" for name, value in asdict(policy).items() if name not in _NOT_IN_FINGERPRINT
            )
            return f"{strategy_text} auto({values})"
        case _:
            assert_never(policy)


def compute_watermarks(snapshot: Snapshot, policy: Policy, needs: CutConditions, *, halved: bool = False) -> Watermarks:
    """Return the watermarks of this snapshot: the policy's, raised above what cannot be cut, and limited by the window.

    ``halved``: the context must shrink to at most half of its size, whatever the policy.
    """
    watermarks = _watermarks(snapshot, policy, needs, count_entries(must_stay(snapshot.kept, snapshot.entries)))
    return replace(watermarks, low=min(watermarks.low, content_tokens(snapshot) // 2)) if halved else watermarks


def _watermarks(snapshot: Snapshot, policy: Policy, needs: CutConditions, required: int) -> Watermarks:
    room = None if snapshot.window is None else max(0, snapshot.window - snapshot.fixed_tokens)
    wanted = policy if isinstance(policy, Auto) else Auto()
    high = needs.high or wanted.high
    low = min(wanted.low, high * 3 // 4)
    # What must stay does not count as room for work: without this, a long task would leave no steps at all.
    span = high - low
    low = max(low, required + low // 2)
    high = max(high, low + span // 2)
    if room is not None:
        high, low = min(high, room), min(low, room // 2)
    return Watermarks(high=high, low=low, room=room)


def content_tokens(snapshot: Snapshot) -> int:
    """Count head, kept messages and tail as the current epoch sends them: the part that a cut can change."""
    head = snapshot.epoch.head_tokens if snapshot.epoch else 0
    return head + count_entries(snapshot.kept) + count_entries(snapshot.entries)


def decide_epoch(
    snapshot: Snapshot, policy: Policy, needs: CutConditions, *, now: datetime, current: str, overflow: bool = False
) -> EpochDecision:
    """Return whether the next context starts a new epoch, and why.

    ``current`` is the fingerprint of strategy and policy in force; ``overflow`` says that the upstream has
    just refused the context of the current epoch as too long.
    """
    if snapshot.epoch is None:
        return StartEpoch(reason="overflow" if overflow else "first")
    if overflow or snapshot.ran_out:
        return StartEpoch(reason="overflow")
    if isinstance(policy, EveryRequest):
        return StartEpoch(reason="resume" if _resumes(snapshot, needs, now) else "every_request")
    if snapshot.edited:
        return StartEpoch(reason="edit")
    if snapshot.epoch.fingerprint != current:
        return StartEpoch(reason="config")
    if not needs.cuts:
        return ContinueEpoch()
    if _resumes(snapshot, needs, now):
        return StartEpoch(reason="resume")
    if needs.is_over_limit:
        return StartEpoch(reason=needs.is_over_limit)
    return _decide_cut(snapshot, policy, needs, now)


def _resumes(snapshot: Snapshot, needs: CutConditions, now: datetime) -> bool:
    return needs.resume_idle is not None and _idle(snapshot, now) > needs.resume_idle


def _decide_cut(snapshot: Snapshot, policy: Stride | Auto, needs: CutConditions, now: datetime) -> EpochDecision:
    content = content_tokens(snapshot)
    if isinstance(policy, Auto) and _is_small(snapshot, policy, needs, content):
        return ContinueEpoch()
    watermarks = compute_watermarks(snapshot, policy, needs)
    if watermarks.room is not None and content > watermarks.room:
        return StartEpoch(reason="window")
    if isinstance(policy, Auto) or not needs.by_turns:
        return _decide_auto(snapshot, policy, needs, watermarks, now)
    turns = len({entry.turn for entry in snapshot.entries})
    return StartEpoch(reason="stride") if turns >= needs.recent_turns + policy.stride else ContinueEpoch()


def _is_small(snapshot: Snapshot, policy: Auto, needs: CutConditions, content: int) -> bool:
    """Return whether nothing could ask for a cut: the answer for most calls, without looking at the messages."""
    high = needs.high or policy.high
    fits = snapshot.window is None or snapshot.fixed_tokens + content <= snapshot.window
    return fits and content <= min(policy.low, high * 3 // 4)


def _decide_auto(
    snapshot: Snapshot, policy: Stride | Auto, needs: CutConditions, watermarks: Watermarks, now: datetime
) -> EpochDecision:
    content = content_tokens(snapshot)
    if content <= watermarks.low * COLD_MARGIN and content <= watermarks.high:
        return ContinueEpoch()
    left = _planned_tokens(snapshot, watermarks, needs)
    if left > PROGRESS * content:
        return ContinueEpoch()
    if content > watermarks.high:
        return StartEpoch(reason="high_watermark")
    if not needs.saves or not isinstance(policy, Auto):
        return ContinueEpoch()
    if _is_cold(snapshot, policy, now):
        return StartEpoch(reason="cold_cache")
    if _pays(snapshot, policy, watermarks, _sums_of(snapshot), content, left):
        return StartEpoch(reason="break_even")
    return ContinueEpoch()


def _sums_of(snapshot: Snapshot) -> TokenSums:
    return TokenSums(
        kept=count_entries(snapshot.kept),
        tail=count_entries(snapshot.entries),
        required=count_entries(must_stay(snapshot.kept, snapshot.entries)),
        steps=sum(entry.message.role == "assistant" for entry in snapshot.entries),
    )


def keeps_by_sums(
    snapshot: Snapshot, policy: Policy, needs: CutConditions, *, sums: TokenSums, distances: CutDistances, now: datetime
) -> bool:
    """Return True only where `decide_epoch` finds no reason to cut. Do not read the messages.

    The snapshot's epoch must be in force and unedited. ``distances``: those of the tail, or larger ones.
    """
    if not needs.cuts:
        return True
    if not isinstance(policy, Auto) or needs.is_over_limit or needs.resume_idle is not None:
        return False
    head = snapshot.epoch.head_tokens if snapshot.epoch else 0
    content = head + sums.kept + sums.tail
    if _is_small(snapshot, policy, needs, content):
        return True
    watermarks = _watermarks(snapshot, policy, needs, sums.required)
    if content > watermarks.high or (watermarks.room is not None and content > watermarks.room):
        return False
    if content <= watermarks.low * COLD_MARGIN or not needs.saves:
        return True
    if _is_cold(snapshot, policy, now):
        return False
    # A cut leaves at least this much, since it leaves the longest tail that fits. The more it leaves, the less it pays.
    target = max(0, watermarks.low - head)
    by_turn = max(TURN_CUT_FILL * target, target - distances.turn)
    left = head + max(0, int(min(by_turn, target - distances.step, sums.tail)))
    return not _pays(snapshot, policy, watermarks, sums, content, left)


def _planned_tokens(snapshot: Snapshot, watermarks: Watermarks, needs: CutConditions) -> int:
    """Content after a cut now, with a head as large as the current one."""
    head = snapshot.epoch.head_tokens if snapshot.epoch else 0
    cut: Cut = cut_to_tokens(
        snapshot.kept,
        snapshot.entries,
        target=max(0, watermarks.low - head),
        recent_turns=needs.recent_turns,
        hard=watermarks.room,
    )
    return head + cut.tokens


def _is_cold(snapshot: Snapshot, policy: Auto, now: datetime) -> bool:
    return _idle(snapshot, now) > policy.cache_ttl


def _idle(snapshot: Snapshot, now: datetime) -> float:
    """Seconds since the upstream was last called; 0 when it never was."""
    return 0.0 if snapshot.last_call_at is None else (now - snapshot.last_call_at).total_seconds()


def break_even_calls(q: float, *, write: float, read: float) -> float:
    """After how many more calls cutting a cached prefix to the fraction ``q`` (0 to 1) has paid for itself."""
    if q >= 1:
        return float("inf")
    if write * q <= read:
        return 0.0
    return (write * q - read) / (read * (1 - q)) if read > 0 else float("inf")


def _pays(snapshot: Snapshot, policy: Auto, watermarks: Watermarks, sums: TokenSums, content: int, left: int) -> bool:
    """Return whether the saving is likely to cover the re-write, and a wrong guess would hardly be felt."""
    price = policy.write_price * left - policy.read_price * content
    if price > REGRET * _price_of_full(snapshot, policy, sums):
        return False
    needed = break_even_calls(left / content, write=policy.write_price, read=policy.read_price)
    return _remaining_calls(snapshot, watermarks, sums, content) >= BREAK_EVEN_MARGIN * needed


def _price_of_full(snapshot: Snapshot, policy: Auto, sums: TokenSums) -> float:
    """About what sending everything would have cost so far: each token written once, then read at half the calls."""
    total = max(snapshot.older_tokens, sums.kept) + sums.tail
    return policy.write_price * total + policy.read_price * snapshot.calls * (snapshot.fixed_tokens + total / 2)


def _remaining_calls(snapshot: Snapshot, watermarks: Watermarks, sums: TokenSums, content: int) -> float:
    """Return a cautious estimate of the calls that a cut made now would still serve.

    A session is likely to continue for as long as it has lasted; half of its calls so far is a cautious guess. The high
    watermark would force a cut anyway after ``(high - content) / growth`` calls, with the growth per call measured in
    the tail. The savings of an early cut end there.
    """
    growth = sums.tail / max(1, sums.steps)
    return min(max(snapshot.calls, sums.steps) / 2, max(0, watermarks.high - content) / max(1.0, growth))


def _for_model(
    value: Mapping[str, object], policy_for_model: Callable[[str], Auto] | None, field: str
) -> dict[str, object]:
    """Return ``value`` with the watermarks and prices of the model instead of its name."""
    model = value["model"]
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL:
        raise InvalidRequest(f"{field}.model must be a model's name, not {str(model)[:40]!r}", field=field)
    chosen = policy_for_model(model) if policy_for_model is not None else Auto()
    rest = {name: given for name, given in value.items() if name != "model"}
    return {
        "high": chosen.high,
        "low": chosen.low,
        "write_price": chosen.write_price,
        "read_price": chosen.read_price,
        **rest,
    }


def _read_policy_text(text: str, field: str) -> object:
    bare = text.strip()
    if not bare.startswith("{"):
        return bare
    try:
        return json.loads(bare)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {bare[:40]!r}", field=field) from error


def _expected_policy(value: object, field: str) -> str:
    forms = '\'auto\', \'every_request\', {"high": 32000, "low": 12000} or {"stride": 8}'
    return f"{field} must be {forms}, not {str(value)[:40]!r}"


def _check_marks(policy: Auto, given: Mapping[str, object], field: str) -> None:
    if policy.low >= policy.high and "low" in given:
        raise InvalidRequest(f"{field}.low must be below {field}.high ({policy.high}), not {policy.low}", field=field)
    if policy.low >= policy.high and "high" not in given:
        raise InvalidRequest(f"{field}.high must be above {field}.low ({policy.low}), not {policy.high}", field=field)
