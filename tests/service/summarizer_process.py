"""A process that summarises a session until it is killed: ``python summarizer_process.py DSN BASE_URL``."""

from __future__ import annotations

import asyncio
import sys
import time

from tersely.service.common.metrics import Metrics
from tersely.service.summaries.jobs import Job
from tersely.service.summaries.models import Host, Models, SummarizerConfig
from tersely.service.summaries.summarizer import Summarizer
from tersely.store.db.connection import Database
from tersely.upstream.client import Timeouts, Upstream
from tests.service.conftest import START


async def main(dsn: str, base_url: str) -> None:
    database = Database(dsn=dsn)
    await database.open()
    upstream = Upstream(base_url, Timeouts())
    await upstream.open()
    metrics = Metrics()
    models = Models(SummarizerConfig(model="scripted"), own=Host(upstream=upstream), hosts={}, metrics=metrics)
    summarizer = Summarizer(
        database, models, metrics, clock=lambda: START, monotonic=time.monotonic, name="the killed one"
    )
    await summarizer.open()
    summarizer.submit(
        Job(tenant="north", session_id="s1", purpose="checkpoint", first_seq=1, last_seq=8, strategy="compact")
    )
    await asyncio.sleep(60)


asyncio.run(main(*sys.argv[1:]))
