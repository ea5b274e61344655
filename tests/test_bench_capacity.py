"""The calculated sizes follow from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.capacity import Constants, capacity, growth, report

MEASURED = Path(__file__).resolve().parents[1] / "bench" / "capacity.json"
CONSTANTS = Constants(
    calls_per_session=10, messages_per_session=20, content=500, rows=1_000, indexes=500, wal=2_000,
    postgres_us_per_call=864, service_us_per_call=1_728,
)  # fmt: skip


def test_capacity_is_proportional_to_retention() -> None:
    week, month = capacity(CONSTANTS, 1e6, (7, 30))
    assert (week.messages, week.rows, week.indexes) == (1.4e8, 1.4e11, 0.7e11)
    assert month.rows / week.rows == pytest.approx(30 / 7)
    assert week.wal_per_day == month.wal_per_day == 4e10
    assert week.postgres_cores == pytest.approx(0.1)
    assert week.service_cores == pytest.approx(0.2)


def test_nodes_hold_what_is_stored() -> None:
    assert [each.nodes for each in capacity(CONSTANTS, 1e6, (7, 30, 90))] == [1, 1, 3]
    doubled = replace(CONSTANTS, rows=2_500)
    assert [each.nodes for each in capacity(doubled, 1e6, (7, 30, 90))] == [1, 2, 5]


def test_growth_is_linear_in_bytes_and_logarithmic_in_depth() -> None:
    sizes = list(growth(CONSTANTS, (10**6, 10**9)))
    assert sizes[1].rows == 1_000 * sizes[0].rows == 1e12
    assert sizes[1].dead_before_vacuum == pytest.approx(0.2e12)
    assert sizes[0].index_depth + 1 <= sizes[1].index_depth <= sizes[0].index_depth + 2


def test_the_documented_tables_follow_from_the_measured_constants() -> None:
    """`python -m bench.capacity --constants bench/capacity.json` prints what docs/scaling.md shows."""
    page = (MEASURED.parents[1] / "docs" / "scaling.md").read_text()
    lines = report(Constants(**json.loads(MEASURED.read_text())), 1e6).splitlines()
    assert [line for line in lines if line.startswith("| ") and line not in page] == []
