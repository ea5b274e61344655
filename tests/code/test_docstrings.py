"""Docstrings begin with the thing or with an imperative verb, never with a question word."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tersely

ROOT = Path(tersely.__file__).parents[2]
OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RIDDLES = {"What", "Whether", "That", "Those", "Which", "How", "Where", "When", "Who", "Whose", "If"}


def riddles(source: str) -> list[str]:
    """Return the first lines of docstrings that begin with a question word."""
    owners = (node for node in ast.walk(ast.parse(source)) if isinstance(node, OWNERS))
    texts = (ast.get_docstring(node) or "" for node in owners)
    return [text.splitlines()[0] for text in texts if text.split(" ", 1)[0].strip(",:\n") in RIDDLES]


@pytest.mark.parametrize("folder", ["app", "bench", "tests"])
def test_docstrings_begin_with_the_thing_or_a_verb(folder: str) -> None:
    found = {str(path): faults for path in (ROOT / folder).rglob("*.py") if (faults := riddles(path.read_text()))}
    assert found == {}


def test_docstring_that_begins_with_a_question_word_is_found() -> None:
    assert riddles('"""A page."""\ndef f():\n    """What it gives."""') == ["What it gives."]
