"""The installed ``tersely`` is what users call, so it is what tests call."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tersely import __version__
from tersely.cli.program import app
from tests.conftest import TERSELY

ROOT = Path(__file__).resolve().parents[2]


def commands(command: Any = None, *names: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    group: Any = command or typer.main.get_command(app)
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from commands(each, *names, name)
        else:
            yield (*names, name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([TERSELY, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_installed_command_explains_itself(words: tuple[str, ...]) -> None:
    done = run(*words, "--help")
    assert done.returncode == 0, done.stderr
    assert f"tersely {' '.join(words)}" in done.stdout


def test_installed_command_prints_its_version() -> None:
    assert run("--version").stdout.strip() == __version__


def test_installed_command_refuses_unknown_commands_with_exit_code_2() -> None:
    assert run("no-such-command").returncode == 2


def test_tests_start_the_installed_command_and_not_the_module() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"\"-m\",\s*\"tersely\"", path.read_text(encoding="utf-8"))
    ]
    assert found == []
