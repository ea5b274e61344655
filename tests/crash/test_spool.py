"""The real service and its Postgres, killed again and again: every acknowledged exchange is stored once, in order."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tersely.embedded_postgres import open_embedded_postgres
from tests.support.conversations import KINDS, Conversation, compare, converse, script, waits_for_spool
from tests.support.locks import locked
from tests.support.processes import Launch, Running, postmaster
from tests.support.upstreams import Model, scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# More for a longer run: kills of Postgres, and questions that are asked at least.
KILLS = int(os.environ.get("TERSELY_TEST_KILLS", "3"))
QUESTIONS = int(os.environ.get("TERSELY_TEST_QUESTIONS", "90"))
OPTIONS = {"TERSELY_FAIL_OPEN": "on", "TERSELY_DATABASE_TIMEOUT": "2", "TERSELY_STRATEGY": "window"}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with scripted() as running:
        running.state.script = script
        yield running


def start(launch: Launch, model: Model) -> Running:
    root = model.url.removesuffix("/v1")
    names = ("ANTHROPIC", "GEMINI", "GEMINI_GCA")
    return launch(**OPTIONS, **{f"TERSELY_{name}_BASE_URL": root for name in names})


def records(data_dir: Path) -> int:
    return sum(path.stat().st_size for path in data_dir.glob("spool/*/*.spool"))


async def test_the_service_is_killed_with_a_spool_and_while_it_replays(
    launch: Launch,
    data_dir: Path,
    model: Model,
) -> None:
    service = start(launch, model)
    made = [Conversation(service.url, kind) for kind in KINDS * 2]
    await asyncio.gather(*(converse(each, 1) for each in made))
    with open_embedded_postgres(data_dir) as postgres:
        async with locked(postgres.admin_dsn):
            await asyncio.gather(*(converse(each, 2) for each in made if not each.is_delta))
            service.kill()
        size = records(data_dir)
        assert size > 0
        again = start(launch, model)
        end = time.monotonic() + 10
        while time.monotonic() < end and records(data_dir) == size:
            await asyncio.sleep(0.005)
        again.kill()
        last = start(launch, model)
        await waits_for_spool(last.url)
        for each in made:
            each.url = last.url
        await asyncio.gather(*(converse(each, 1) for each in made))
        compared = await compare(postgres.admin_dsn, made)
    assert compared.is_right, compared
    assert compared.acknowledged >= len(made) + 3 * sum(not each.is_delta for each in made)
    assert list(data_dir.glob("spool/*/*.refused")) == []


async def test_postgres_is_killed_again_and_again(
    launch: Launch,
    data_dir: Path,
    model: Model,
) -> None:
    service = start(launch, model)
    made: list[Conversation] = []
    stopping = False

    async def talk(kind: str) -> None:
        while not stopping:
            conversation = Conversation(service.url, kind)
            made.append(conversation)
            await converse(conversation, 6)

    def acknowledged() -> int:
        return sum(len(each.acknowledged) for each in made)

    began = time.monotonic()
    talking = [asyncio.create_task(talk(kind)) for kind in KINDS]
    for number in range(1, KILLS + 1):
        aim = QUESTIONS * number // (KILLS + 1)
        while acknowledged() < aim:
            await asyncio.sleep(0.02)
        try:
            postmaster(data_dir).kill()
        except (psutil.NoSuchProcess, ValueError, OSError):
            await asyncio.sleep(0.2)
    while acknowledged() < QUESTIONS:
        await asyncio.sleep(0.05)
    stopping = True
    await asyncio.gather(*talking)
    await waits_for_spool(service.url, 120)
    assert service.process.poll() is None
    with open_embedded_postgres(data_dir) as postgres:
        compared = await compare(postgres.admin_dsn, made)
    requests = sum(each.requests for each in made)
    print(f"{KILLS} kills, {requests} asked, {compared.acknowledged} acknowledged, {time.monotonic() - began:.0f} s")
    assert compared.is_right, compared
    assert list(data_dir.glob("spool/*/*.refused")) == []
