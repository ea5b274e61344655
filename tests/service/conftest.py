"""Sessions in the database, and summarizers at work on them in front of a scripted model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from tersely.fakellm.scripted import ScriptedModel, ScriptedServer, run_scripted
from tersely.service.common.metrics import Metrics
from tersely.service.summaries.models import Host, Models, SummarizerConfig
from tersely.service.summaries.summarizer import Summarizer
from tersely.store.db import connection as store
from tersely.upstream.client import Timeouts, Upstream
from tests.conftest import Database

START = datetime(2026, 1, 1, 12, tzinfo=UTC)

SESSION = """
INSERT INTO sessions (tenant_id, id, parent, client_id, strategy, epoch_policy, metadata, last_seq, turns, tokens,
    version, edits, edited, calls, epoch, cut, plan, open_chain, last_call_at, created_at, updated_at)
VALUES ($1, $2, NULL, NULL, NULL, NULL, '{}', $3, $4, 0, 1, 0, false, 0, 0, 1, NULL, NULL, NULL, $5, $5)
"""
MESSAGE = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, finish, call, digest, chain, created_at, raw, model_raw)
VALUES ($1, $2, $3, $4, $5, $6, $7, 'live', 'openai_chat', true, true, false, NULL, 0, '', NULL, $8, $9, NULL)
"""


class Clock:
    """A time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> datetime:
        return self.now

    def forward(self, **spans: float) -> None:
        self.now += timedelta(**spans)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def admin(database: Database) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A look behind row security."""
    connection = await asyncpg.connect(database.admin_dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def pool(database: Database) -> AsyncIterator[store.Database]:
    """The store, as the service sees it."""
    opened = store.Database(dsn=database.dsn, size=6)
    await opened.open()
    yield opened
    await opened.close()


Fill = Callable[..., Awaitable[str]]


@pytest.fixture
def fill(admin: asyncpg.Connection[asyncpg.Record]) -> Fill:
    """Make a session of turns with two messages each, 200 tokens or so a message."""

    async def make(session_id: str = "s1", turns: int = 5, *, tenant: str = "north", word: str = "alpha") -> str:
        await admin.execute(SESSION, tenant, session_id, 2 * turns, turns, START)
        for seq in range(1, 2 * turns + 1):
            role = "user" if seq % 2 else "assistant"
            turn = (seq + 1) // 2
            text = f"{word} {role} {turn}: see src/{word}_{turn}.py. " + "and so on " * 70
            raw = json.dumps({"role": role, "content": text}).encode()
            await admin.execute(
                MESSAGE, tenant, session_id, seq, turn, 200, float(seq), role, START + timedelta(minutes=seq), raw
            )
        return session_id

    return make


@pytest.fixture
async def host() -> AsyncIterator[ScriptedServer]:
    """A model that says whatever its script says."""
    async with run_scripted(model=ScriptedModel()) as running:
        yield running


Start = Callable[..., Awaitable[Summarizer]]


@pytest.fixture
async def start(pool: store.Database, host: ScriptedServer, clock: Clock) -> AsyncIterator[Start]:
    """Start summarizers, by default with a model of their own at ``host``. Each one is a replica."""
    async with AsyncExitStack() as stack:

        async def run(*, name: str = "here", own: bool = True, key: str | None = None, **config: Any) -> Summarizer:
            upstream = Upstream(host.base_url, Timeouts(connect=2, first_byte=30, idle=30))
            await upstream.open()
            stack.push_async_callback(upstream.close)
            metrics = Metrics()
            models = Models(
                SummarizerConfig(**{"model": "scripted", "output": 1_000, **config}),
                own=Host(upstream=upstream, api_key=key) if own else None,
                hosts={"openai_chat": Host(upstream=upstream)},
                metrics=metrics,
            )
            summarizer = Summarizer(pool, models, metrics, clock=clock, monotonic=lambda: 0.0, name=name)
            await summarizer.open()
            stack.push_async_callback(summarizer.close)
            return summarizer

        yield run
