"""The service as a process of its own, and the processes of its database."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.conftest import TERSELY

ROOT = Path(__file__).resolve().parents[2]
AWAY = "postgresql://nobody@127.0.0.1:1/none"


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
    return subprocess.Popen(
        [TERSELY, "serve", *arguments],
        cwd=ROOT,
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def greeting(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline() + process.stdout.readline()


@dataclass(slots=True)
class Running:
    """A service process and what it said so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        found = re.search(r"serves on (http://\S+)", "".join(self.lines))
        return found[1] if found else ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


Launch = Callable[..., Running]


def children(pid: int) -> list[psutil.Process]:
    try:
        return [c for c in psutil.Process(pid).children(recursive=True) if "python" in c.name()]
    except psutil.NoSuchProcess:
        return []


def read_lines(running: Running) -> None:
    assert running.process.stdout is not None
    with running.process.stdout as out:
        for line in out:
            running.lines.append(line)


def postgres_of(data_dir: Path) -> list[psutil.Process]:
    """Every process of the directory's server, found by its working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and Path(process.cwd()).is_relative_to(data_dir.resolve()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def postmaster(data_dir: Path) -> psutil.Process:
    (pid_file,) = data_dir.glob("postgres/*/postmaster.pid")
    return psutil.Process(int(pid_file.read_text().split()[0]))
