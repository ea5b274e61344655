"""docs/strategies.md names only tests and modules that exist, and each strategy's parameters as they are."""

from __future__ import annotations

import ast
import re
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tersely.strategies.presets import DEFAULT_FILES, DEFAULT_REFERENCES, STRATEGIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
TESTS = sorted(set(re.findall(r"([\w/]+\.py)::(\w+)", TEXT)))
MODULES = sorted(set(re.findall(r"`((?:domain|store|service|strategies|dialects|api)/[\w/.]*)`", TEXT)))


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("file", sorted({file for file, _ in TESTS}))
def test_tests_that_are_named_exist(file: str) -> None:
    named = {name for each, name in TESTS if each == file}
    assert named <= functions(ROOT / "tests" / file)


def test_modules_that_are_named_exist() -> None:
    assert MODULES
    assert [name for name in MODULES if not (ROOT / "app" / "tersely" / name).exists()] == []


def test_every_rule_names_its_code_and_its_test_or_a_reason() -> None:
    rules = TEXT.partition("## Every rule of the documents")[2].partition("## What holds")[0]
    rows = [line.strip("| ").split(" | ") for line in rules.splitlines() if line.startswith("| ")]
    assert len(rows) > 120
    reasons = ("with tools and commands", "No counterpart", "Not built yet")
    for row in rows[:]:
        assert len(row) >= 2
        assert len(row) == 3 or any(reason in " ".join(row) for reason in reasons), row


def default(field: Field[Any]) -> str:
    if field.default is None:
        return f"0 or {DEFAULT_FILES if field.name == 'files' else DEFAULT_REFERENCES:,}"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:,}" if isinstance(field.default, int) else str(field.default)


def span(field: Field[Any]) -> str:
    if "bounds" in field.metadata:
        return "{:,} to {:,}".format(*field.metadata["bounds"])
    return ", ".join(field.metadata.get("choices", ("true", "false")))


@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_are_listed_with_their_defaults_and_ranges(name: str) -> None:
    section = TEXT.partition(f"\n### {name}\n")[2].partition("\n##")[0]
    listed = [line.rsplit(" | ", 1)[0] for line in section.splitlines() if line.startswith("| `")]
    assert listed == [f"| `{f.name}` | {default(f)} | {span(f)}" for f in fields(STRATEGIES[name])]
