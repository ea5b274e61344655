"""No function takes a parameter only to delete it: the linter takes that for a use."""

from __future__ import annotations

import ast
from pathlib import Path

import tersely

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROOT = Path(tersely.__file__).parent


def deleted_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    names = {
        each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if each
    }
    deleted = (target for node in ast.walk(function) if isinstance(node, ast.Delete) for target in node.targets)
    return names & {target.id for target in deleted if isinstance(target, ast.Name)}


def faults(path: Path) -> list[str]:
    functions = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, FUNCTIONS))
    found = ((node, deleted_parameters(node)) for node in functions)
    return [f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {sorted(names)}" for node, names in found if names]


def test_no_function_deletes_its_own_parameters() -> None:
    assert [fault for path in sorted(ROOT.rglob("*.py")) for fault in faults(path)] == []


def test_a_deleted_parameter_is_found() -> None:
    (function,) = ast.parse("def f(a, *, b):\n    del b\n    return a").body
    assert isinstance(function, ast.FunctionDef)
    assert deleted_parameters(function) == {"b"}
