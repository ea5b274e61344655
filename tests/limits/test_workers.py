"""Limits with ``serve --workers 2``, set from the command line beside the running service."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from tersely.cli import program as commands
from tests.conftest import Database
from tests.support.http import body_of
from tests.support.processes import greeting, start
from tests.support.upstreams import Model

LIMIT = 120


def run(*arguments: str) -> str:
    done = CliRunner().invoke(commands.app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
async def test_limit_set_by_command_holds_over_two_workers(
    store: Database, model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATABASE_URL", store.dsn)
    monkeypatch.setenv("TERSELY_DATA_DIR", str(tmp_path))
    key = (await asyncio.to_thread(run, "keys", "create", "--tenant", "two-workers")).split()[-1]
    assert key.startswith("tsk_")
    shown = await asyncio.to_thread(run, "tenants", "limits", "two-workers", "--requests-per-minute", str(LIMIT))
    assert "requests_per_minute" in shown
    process = start(
        "--port", "0", "--workers", "2", DATABASE_URL=store.dsn, TERSELY_OPENAI_BASE_URL=model.url,
        TERSELY_AUTH="keys", TERSELY_LOG_LEVEL="error", TERSELY_DATA_DIR=str(tmp_path),
    )  # fmt: skip
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", await asyncio.to_thread(greeting, process))
        assert found is not None
        headers = {"X-Tersely-Key": key, "Connection": "close"}
        places = asyncio.Semaphore(8)
        statuses: list[int] = []
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(n: int) -> None:
                path = f"{found[0]}/v1/chat/completions"
                async with places, http.post(path, data=body_of(f"question {n}")) as answer:
                    statuses.append(answer.status)

            began = time.monotonic()
            await asyncio.gather(*(ask(n) for n in range(LIMIT + 60)))
            took = time.monotonic() - began
            # Requests of the first seconds leave the minute only after it.
            assert took < 55, took
            assert statuses.count(200) <= LIMIT
            assert statuses.count(200) >= 0.95 * LIMIT
            assert statuses.count(429) == LIMIT + 60 - statuses.count(200)
            listed = await asyncio.to_thread(run, "tenants", "limits", "two-workers")
            assert re.search(rf"requests_per_minute\D+{LIMIT}", listed)
            await asyncio.to_thread(run, "tenants", "limits", "two-workers", "--unset", "requests-per-minute")
            async with asyncio.timeout(15):
                while True:
                    statuses.clear()
                    await ask(0)
                    if statuses == [200]:
                        break
                    await asyncio.sleep(0.3)
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate, timeout=60)


def test_unknown_limits_and_tenants_are_told(store: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DATABASE_URL", store.dsn)
    monkeypatch.setenv("TERSELY_DATA_DIR", str(tmp_path))
    for arguments in (("nobody",), ("nobody", "--concurrent", "3"), ("two-workers", "--unset", "nonsense")):
        done = CliRunner().invoke(commands.app, ["tenants", "limits", *arguments])
        assert done.exit_code != 0, arguments
        assert "Traceback" not in done.output
