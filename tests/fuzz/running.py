"""Run random conversations through one service and count what is wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import asyncpg

from tests.conftest import Database
from tests.fuzz.talks import Talk, script
from tests.support.services import serve
from tests.support.upstreams import scripted

REQUESTS_OF_ONE = 16


@dataclass(slots=True)
class Found:
    """Figures of a run. ``refused`` are requests that the strict model refused."""

    requests: int = 0
    talks: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


async def run_talks(
    database: Database,
    dialect: str,
    *,
    requests: int,
    seed: int,
    at_once: int = 4,
    tell: Callable[[str], None] | None = None,
) -> Found:
    """Run conversations of a dialect until they made so many requests."""
    found = Found()
    numbers = iter(range(10**9))
    with scripted() as model, serve(database, model.url, database_timeout=30.0) as service:
        model.state.script = script
        check = model.state._check

        def counted(*arguments: Any) -> Any:
            refusal = check(*arguments)
            found.refused += refusal is not None
            return refusal

        model.state._check = counted  # type: ignore[method-assign, assignment]
        connections = await asyncpg.create_pool(database.admin_dsn, min_size=1, max_size=2)

        async def work(http: aiohttp.ClientSession) -> None:
            while found.requests < requests:
                talk = Talk(service.url, dialect, random.Random(f"{seed}:{dialect}:{next(numbers)}"))
                await talk.converse(http, REQUESTS_OF_ONE)
                if not talk.faults:
                    await talk.compare(connections)
                found.requests += talk.requests
                found.talks += 1
                found.faults += talk.faults
                if tell is not None and found.talks % 100 == 0:
                    tell(f"{dialect}: {found.requests} requests, {found.refused} refused, {len(found.faults)} faults")

        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
                await asyncio.gather(*(work(http) for _ in range(at_once)))
        finally:
            await connections.close()
    return found
