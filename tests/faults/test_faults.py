"""A short form of ``make faults``: some rounds of faults, after which the store holds what every client read."""

from __future__ import annotations

import random

import pytest

from tests.faults.rig import NGINX, open_rig
from tests.faults.rounds import run_rounds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: apt-get install nginx-light)"),
]

# Faults that need no start of a process, which takes long on a busy machine; Postgres and PgBouncer start quickly.
QUICK = (
    "exhaust connections",
    "fill disk, no database",
    "kill backend",
    "kill nginx",
    "kill pgbouncer",
    "kill postmaster",
    "kill replica",
    "kill worker",
    "lock table",
    "model garbage",
    "model reset",
    "stop replica",
    "summarizer hang",
    "terminate backends",
)
ROUNDS = 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_nothing_acknowledged_is_lost_whatever_fails() -> None:
    async with open_rig(random.Random(1)) as rig:
        summary, compared = await run_rounds(rig, rounds=ROUNDS, seed=1, only=QUICK)
    assert [each.line() for each in summary.rounds if each.errors] == []
    assert compared.is_right, compared
    assert compared.acknowledged > 10 * ROUNDS
