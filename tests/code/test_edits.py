"""Edits of sessions begin with `Database.edit`, which first writes what waits for replies."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tersely

ROOT = Path(tersely.__file__).parent
PACKAGE = ROOT / "service" / "sessions"
# They only read, or make a session.
OTHERS = {
    "exports.py _take_copy",
    "exports.py import_session",
    "messages.py _read_state",
    "sessions.py create",
    "sessions.py get",
    "sessions.py turn",
    "sessions.py turns",
}
# What the store does in edits.
STEPS = {("turns", "lock"), ("sessions", "mark_edited"), ("epochs", "start")}


def calls_in(node: ast.AST) -> Iterator[ast.Attribute]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
            yield each.func


def functions_with(attribute: str) -> set[str]:
    return {
        f"{path.name} {function.name}"
        for path in PACKAGE.glob("*.py")
        for function in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(function, ast.AsyncFunctionDef) and any(called.attr == attribute for called in calls_in(function))
    }


def test_edits_of_sessions_are_no_plain_transactions() -> None:
    assert functions_with("transaction") == OTHERS


def test_only_the_use_cases_of_sessions_edit_them() -> None:
    editing = {
        path
        for path in (ROOT / "service").rglob("*.py")
        for called in calls_in(ast.parse(path.read_bytes()))
        if isinstance(called.value, ast.Name) and (called.value.id, called.attr) in STEPS
    }
    assert editing
    assert {path.parent for path in editing} == {PACKAGE}
