"""``tersely serve`` as a process: how it greets, refuses and ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.crash.test_kill import postgres_of

ROOT = Path(__file__).resolve().parents[2]
AWAY = "postgresql://nobody@127.0.0.1:1/none"


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
    return subprocess.Popen(
        [sys.executable, "-m", "app", "serve", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def greeting(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tersely-serving-", dir="/tmp", ignore_cleanup_errors=True) as parent:
        Path(parent).chmod(0o711)
        directory = Path(parent) / "data"
        yield directory
        for process in postgres_of(directory):
            process.kill()


def test_a_closed_terminal_ends_the_database_too(data_dir: Path) -> None:
    process = start("--port", "0", TERSELY_DATA_DIR=str(data_dir))
    try:
        assert "Tersely serves on" in greeting(process)
        servers = postgres_of(data_dir)
        assert servers
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
        assert psutil.wait_procs(servers, 10)[1] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_greeting_names_the_port_and_stands_alone(workers: str) -> None:
    process = start("--port", "0", "--workers", workers, DATABASE_URL=AWAY)
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(process))
        assert found is not None
        assert found[1] != "0"
        assert httpx.get(f"{found[0]}/healthz", timeout=60).status_code == 200
        process.send_signal(signal.SIGHUP if workers == "2" else signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "uvicorn" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("--port", port, "--workers", workers, DATABASE_URL=AWAY)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert errors.splitlines() == [f"tersely: port {port} of 127.0.0.1 is in use: choose another one with --port"]
