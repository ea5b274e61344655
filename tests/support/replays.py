"""Replays of transcripts without the command, so that a test can change the model or the checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tersely.replay.play import Variant
from tersely.replay.run import ReplayPlan, run_here
from tersely.replay.table import ReplayResult
from tersely.settings import Settings
from tersely.transcripts.files import load_transcript
from tests.conftest import Database


async def play(database: Database, paths: Sequence[Path], *variants: Variant, share: float = 1.0) -> list[ReplayResult]:
    """Play the files under each variant. ``share`` of the final replies get a tag."""
    plan = ReplayPlan(
        transcripts=[load_transcript(path) for path in paths],
        variants=variants,
        share=share,
        model="gpt-4.1",
        window=1_000_000,
        parallel=2,
    )
    settings = Settings(_env_file=None, database_url=database.dsn, database_timeout=20.0)

    def run() -> list[ReplayResult]:
        with asyncio.Runner() as runner:
            return run_here(runner, settings, plan, lambda _: None)

    return await asyncio.to_thread(run)
