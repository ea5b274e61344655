"""Limits with ``serve --workers 2``, set from the command line beside the running service."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from tersely.cli import program as commands
from tersely.domain.errors import TerselyError
from tersely.server.errors import CommandError
from tests.conftest import Database
from tests.support.http import body_of
from tests.support.processes import greeting, start
from tests.support.upstreams import Model

LIMIT = 120
Invoke = Callable[..., tuple[int, str]]


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


@pytest.fixture
def invoke(store: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    """Return a function that runs a command on the store's database, and returns its exit code and its output."""
    monkeypatch.setenv("DATABASE_URL", store.dsn)
    monkeypatch.setenv("TERSELY_DATA_DIR", str(tmp_path))

    def run_command(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(commands.app, list(arguments))
        if not isinstance(done.exception, SystemExit | TerselyError | CommandError | None):
            raise done.exception
        return done.exit_code, f"{done.output} {done.exception}"

    return run_command


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("limits", "nobody"), "no tenant 'nobody'"),
        (("limits", "nobody", "--concurrent", "3"), "no tenant 'nobody'"),
        (("limits", "default", "--unset", "nonsense"), "no limit 'nonsense'"),
        (("limits", "default", "--tokens-per-day", "99999999999999999999"), "9007199254740992"),
        (("limits", "default", "--money-per-month", "inf"), "9007199254740992"),
        (("limits", "default", "--money-per-month", "nan"), "0"),
        (("limits", "default", "--concurrent", "3", "--unset", "concurrent"), "both set and unset"),
        (("limits", "default", "--key", "0123456789abcdef"), "at least one"),
        (("limits", "default", "--key", "0123456789abcdef", "--concurrent", "1"), "no key"),
        (("limits", "--concurrent", "3"), "name the tenant"),
        (("retention", "nobody", "--days", "3"), "no tenant 'nobody'"),
        (("retention", "nobody"), "no tenant 'nobody'"),
        (("retention", "default", "--days", "99999999999"), "36500"),
        (("retention", "default", "--days", "3", "--default"), "--days or --default"),
        (("retention", "--days", "3"), "name the tenant"),
    ],
)
def test_wrong_limits_and_retentions_are_refused(invoke: Invoke, arguments: tuple[str, ...], error: str) -> None:
    code, output = invoke("tenants", *arguments)
    assert code != 0
    assert error in " ".join(output.split())


def test_a_key_is_limited_only_under_its_own_tenant(invoke: Invoke) -> None:
    keys = {name: invoke("keys", "create", "--tenant", name)[1].split("_")[1] for name in ("east", "west")}
    code, output = invoke("tenants", "limits", "east", "--key", keys["west"], "--concurrent", "1")
    assert (code, f"east has no key '{keys['west']}'" in output) == (1, True)
    assert keys["west"] not in invoke("tenants", "limits", "west")[1]
    assert invoke("tenants", "limits", "west", "--key", keys["west"], "--concurrent", "1")[0] == 0
    assert keys["west"] in invoke("tenants", "limits", "west")[1]


def test_retention_without_an_option_prints_it(invoke: Invoke) -> None:
    assert invoke("keys", "create", "--tenant", "monthly")[0] == 0
    assert "monthly: as configured." in invoke("tenants", "retention", "monthly")[1]
    assert "monthly: 30 days." in invoke("tenants", "retention", "monthly", "--days", "30")[1]
    assert "monthly: 30 days." in invoke("tenants", "retention", "monthly")[1]
    assert "monthly: as configured." in invoke("tenants", "retention", "monthly", "--default")[1]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--name", "x" * 201), "at most 200 characters"),
        (("--client", "Claude Code"), "a client's name"),
        (("--client", ""), "a client's name"),
        (("--client", "x" * 33), "a client's name"),
    ],
)
def test_a_key_that_nobody_could_use_is_refused(invoke: Invoke, arguments: tuple[str, ...], error: str) -> None:
    code, output = invoke("keys", "create", "--tenant", "narrow", *arguments)
    assert (code, error in output) == (1, True)
    assert "narrow" not in invoke("keys", "list")[1]


def test_forgetting_an_empty_name_is_refused_before_it_asks(invoke: Invoke) -> None:
    for option in ("--session", "--user"):
        code, output = invoke("forget", "--tenant", "default", option, "")
        assert (code, "the name is empty" in output) == (2, True)
