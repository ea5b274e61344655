"""Policies as CONTRACT.md writes them, and the decision that DESIGN.md's "Epochs" describes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, get_args

import pytest
from msgspec import structs

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.history import Epoch, HeadMessage, Snapshot
from tersely.strategies.epochs.policies import (
    Auto,
    ContinueEpoch,
    CutConditions,
    EpochDecision,
    EveryRequest,
    Policy,
    Reason,
    StartEpoch,
    Stride,
    break_even_calls,
    compute_watermarks,
    decide_epoch,
    fingerprint,
    parse_policy,
)
from tersely.strategies.planning import fingerprint_of
from tersely.strategies.presets import Full, Slim
from tests.strategies.histories import START, chat, load, work

CURRENT = "slim() auto"
NEEDS = CutConditions(cuts=True, recent_turns=3)
SMALL = Auto(high=2_000, low=800)


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("auto", Auto()),
        (" every_request ", EveryRequest()),
        ({"high": 64_000, "low": 24_000}, Auto(high=64_000, low=24_000)),
        ('{"stride": 8}', Stride(stride=8)),
        ({"cache_ttl": 3600, "write_price": 1, "read_price": 0.5}, Auto(cache_ttl=3600, write_price=1, read_price=0.5)),
        ({"high": 8_000}, Auto(high=8_000, low=3_000)),
        ({"low": 20_000}, Auto(low=20_000)),
    ],
)
def test_the_forms_of_the_contract(value: object, policy: Policy) -> None:
    assert parse_policy(value) == policy


@pytest.mark.parametrize(
    ("value", "pieces"),
    [
        ("sometimes", ["epoch", "'sometimes'", "every_request"]),
        ("", ["epoch"]),
        (None, ["epoch", "'None'"]),
        ({}, ["epoch"]),
        ("{broken", ["epoch", "JSON"]),
        ("{" * 100_000, ["JSON"]),
        ({"hihg": 5}, ["'hihg'", "high"]),
        ({"stride": 0}, ["epoch.stride", "'0'", "1 to 1000"]),
        ({"stride": 2.5}, ["epoch.stride", "integer"]),
        ({"stride": True}, ["epoch.stride", "'True'"]),
        ({"stride": 8, "high": 5_000}, ["'high'"]),
        ({"high": "32000"}, ["epoch.high", "'32000'", "1000 to 10000000"]),
        ({"high": 10_000, "low": 10_000}, ["epoch.low", "10000"]),
        ({"low": 40_000}, ["epoch.high", "40000"]),
        ({"read_price": -1}, ["epoch.read_price", "'-1'", "0 to 10"]),
        ({"read_price": float("nan")}, ["epoch.read_price", "'nan'"]),
    ],
)
def test_a_wrong_policy_is_refused_with_name_value_and_range(value: object, pieces: list[str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_policy(value)
    assert refused.value.field == "epoch"
    assert all(piece in refused.value.detail for piece in pieces)


def test_a_fingerprint_tells_configurations_apart() -> None:
    every = [
        fingerprint_of(strategy, policy)
        for strategy in (Full(), Slim(), Slim(recent_turns=4), Slim(references=0), Slim(derive_terse=False))
        for policy in (Auto(), Auto(high=1_234_567), Auto(high=1_234_568), Stride(), Stride(stride=9), EveryRequest())
    ]
    assert len(set(every)) == len(every)
    assert fingerprint("slim()", Auto()) == (
        "slim() auto(high=32000.0, low=9000.0, write_price=1.25, read_price=0.1, cache_ttl=300.0)"
    )


# DESIGN.md: "breaks even after (w*q - r) / (r*(1 - q)) more calls"; the figures of the survey of peers.
@pytest.mark.parametrize(
    ("q", "write", "read", "calls"),
    [
        (0.3, 1.25, 0.1, 3.9),
        (0.5, 1.25, 0.1, 10.5),
        (0.8, 1.25, 0.1, 45),
        (0.5, 1.0, 0.5, 0),
        (1.0, 1.25, 0.1, float("inf")),
    ],
)
def test_a_cut_must_break_even(q: float, write: float, read: float, calls: float) -> None:
    assert break_even_calls(q, write=write, read=read) == pytest.approx(calls, abs=0.1)


def epoch(cut: int = 1, *, head: int = 0) -> Epoch:
    message = HeadMessage(layer="activity_log", role="user", text="log", tokens=head)
    return Epoch(
        number=1,
        cut=cut,
        head=(message,),
        kept=(),
        reason="first",
        fingerprint=CURRENT,
        references=(),
        created_at=START,
    )


def decided(snapshot: Snapshot, policy: Policy = SMALL, needs: CutConditions = NEEDS, **values: object) -> str:
    options: dict[str, Any] = {"now": START, "current": CURRENT} | values
    decision: EpochDecision = decide_epoch(snapshot, policy, needs, **options)
    return decision.reason if isinstance(decision, StartEpoch) else "keep"


LONG = load(chat(60, size=400), epoch(), calls=60)
SHORT = load(chat(3), epoch(), calls=3)


@pytest.mark.parametrize(
    ("snapshot", "policy", "reason"),
    [
        (structs.replace(SHORT, epoch=None), SMALL, "first"),
        (SHORT, SMALL, "keep"),
        (SHORT, EveryRequest(), "every_request"),
        (structs.replace(SHORT, edited=True), SMALL, "edit"),
        (structs.replace(SHORT, epoch=structs.replace(epoch(), fingerprint="other")), SMALL, "config"),
        (LONG, SMALL, "high_watermark"),
        (structs.replace(LONG, window=5_000, fixed_tokens=1_000), SMALL, "window"),
        (structs.replace(LONG, window=5_000, fixed_tokens=1_000), Stride(stride=100), "window"),
        (load(chat(10), epoch()), Stride(stride=8), "keep"),
        (load(chat(11), epoch()), Stride(stride=8), "stride"),
        (load(chat(11), epoch(), last_call_at=START - timedelta(hours=1)), SMALL, "keep"),
    ],
)
def test_epochs_state_their_reason(snapshot: Snapshot, policy: Policy, reason: str) -> None:
    assert decided(snapshot, policy) == reason


def test_every_reason_is_bounded_and_short() -> None:
    assert all(len(reason) <= 20 for reason in get_args(Reason))
    assert decided(SHORT, overflow=True) == "overflow"
    assert decided(structs.replace(SHORT, epoch=None), overflow=True) == "overflow"


def test_full_advances_only_on_request() -> None:
    never = CutConditions(cuts=False)
    assert decided(structs.replace(LONG, window=10), needs=never) == "keep"
    assert decided(LONG, needs=never, overflow=True) == "overflow"


def test_a_strategys_own_limit_takes_the_place_of_the_watermark() -> None:
    snapshot = load(chat(20, size=400), epoch(), calls=1)
    assert decided(snapshot, Auto(), CutConditions(cuts=True, high=1_500)) == "high_watermark"
    assert decided(snapshot, Auto()) == "keep"


def test_a_head_counts_towards_the_watermark() -> None:
    snapshot = load(chat(12, size=400), epoch(head=900), calls=1)
    assert decided(snapshot, SMALL) == "high_watermark"
    assert decided(structs.replace(snapshot, epoch=epoch()), SMALL) == "keep"


def test_the_rule_of_break_even_needs_a_long_session_to_be_likely() -> None:
    policy = Auto(high=40_000, low=3_000)
    history = work(40, size=400)
    young = load(history, epoch(), calls=2)
    old = load(history, epoch(), calls=2_000, older_tokens=400_000)
    assert decided(young, policy) == "keep"
    assert decided(old, policy) == "break_even"
    assert decided(old, replace(policy, read_price=0.0)) == "keep"


def test_without_progress_there_is_no_epoch() -> None:
    stuck = load(work(2, size=20_000), epoch(), calls=1)
    assert sum(entry.tokens for entry in stuck.entries) > SMALL.high
    assert decided(stuck) == "keep"


def test_watermarks_lie_between_the_fixed_part_and_the_window() -> None:
    assert compute_watermarks(SHORT, Auto(), NEEDS).high == 32_000
    tight = compute_watermarks(structs.replace(SHORT, window=9_000, fixed_tokens=1_000), Auto(), NEEDS)
    assert (tight.high, tight.low, tight.room) == (8_000, 4_000, 8_000)
    task = load(work(3, turn="x" * 160_000), epoch())
    marks = compute_watermarks(task, Auto(), NEEDS)
    assert 40_000 < marks.low < marks.high
    assert isinstance(decide_epoch(task, Auto(), NEEDS, now=START, current=CURRENT), ContinueEpoch)
