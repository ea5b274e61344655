"""Services as processes that tests may kill."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import TERSELY, quickest_directory
from tests.support.loops import wait_until
from tests.support.processes import ROOT, Launch, Running, children, postgres_of, read_lines
from tests.support.upstreams import Model


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that the server's account can reach; whatever still runs in it is ended."""
    parent = Path(tempfile.mkdtemp(prefix="tersely-crash-", dir=quickest_directory()))
    parent.chmod(0o711)
    directory = parent / "data"
    yield directory
    for process in postgres_of(directory):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(postgres_of(directory), 10)
    shutil.rmtree(parent, ignore_errors=True)


@pytest.fixture
def launch(data_dir: Path, model: Model) -> Iterator[Launch]:
    """Starts services on the data directory, waits until they serve, and ends them with the test."""
    started: list[Running] = []

    def start(*arguments: str, **environment: str) -> Running:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
        process = subprocess.Popen(
            [TERSELY, "serve", *(arguments or ("--port", "0"))],
            cwd=ROOT,
            env={
                **clean,
                "TERSELY_DATA_DIR": str(data_dir),
                "TERSELY_OPENAI_BASE_URL": model.url,
                "TERSELY_FAIL_OPEN": "off",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        running = Running(process)
        started.append(running)
        threading.Thread(target=read_lines, args=(running,), daemon=True).start()
        wait_until(lambda: "stop:" in "".join(running.lines) or process.poll() is not None, 60)
        assert process.poll() is None, "the service ended at once"
        return running

    yield start
    for running in started:
        for child in children(running.process.pid):
            with suppress(psutil.NoSuchProcess):  # a worker ends by itself when its parent is gone
                child.kill()
        running.kill()
