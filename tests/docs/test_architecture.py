"""The map of the packages, the tour and the generated tables agree with the code."""

from __future__ import annotations

import re
import tomllib

import pytest

import tersely
from bench.pictures import documents
from tests.docs.pages import ROOT, read

CONTRACTS = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
MAPS = {
    contract["containers"][0]: contract["layers"] for contract in CONTRACTS if contract["type"] == "layers"
}  # fmt: skip


def rows_of_table(heading: str) -> list[str]:
    """Return the first column of the table under a heading of the architecture page."""
    section = re.split(rf"(?m)^#+ {re.escape(heading)}$", read("docs/architecture.md"))[1]
    table = section.split("\n## ")[0].split("\n### ")[0]
    return [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    ("heading", "container"),
    [
        ("The packages", "tersely"),
        ("Packages of the service", "tersely.service"),
        ("Packages of the proxy", "tersely.service.proxy"),
        ("Packages of the store", "tersely.store"),
    ],
)
def test_map_of_packages_is_that_of_the_import_contracts(heading: str, container: str) -> None:
    drawn = [re.findall(r"`(\w+)`", row) for row in rows_of_table(heading)]
    assert drawn == [[name.strip() for name in line.split("|")] for line in MAPS[container]]


def test_every_package_is_on_the_map() -> None:
    mapped = {name.strip() for line in MAPS["tersely"] for name in line.split("|")}
    packages = {path.parent.name for path in (ROOT / "app" / "tersely").glob("*/__init__.py")}
    assert packages <= mapped


def test_package_points_to_the_map() -> None:
    assert "docs/architecture.md" in (tersely.__doc__ or "")


def test_tour_names_files_and_functions_that_exist() -> None:
    tour = read("CONTRIBUTING.md").split("## The tour")[1].split("\n## ")[0]
    rows = [line for line in tour.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == 7
    for row in rows:
        (target,) = set(re.findall(r"\]\((app/[^)#]+)\)", row)) or {""}
        assert (ROOT / target).exists(), row
        names = re.findall(r"`([\w.]+)\(?\)?`(?!\])", row)
        source = "".join(
            path.read_text(encoding="utf-8")
            for path in ([ROOT / target] if (ROOT / target).is_file() else (ROOT / target).glob("*.py"))
        )
        assert names, row
        for name in names:
            assert re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", source), (row, name)


def test_glossary_names_classes_where_they_are() -> None:
    section = read("docs/glossary.md").split("## Names in the code")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| `(\w+)` \| \[[^\]]+\]\(\.\./([^)]+)\)", section)
    assert rows
    wrong = [
        (name, file)
        for name, file in rows
        if not re.search(rf"(?m)^class {name}\b|^{name} = ", (ROOT / file).read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_pictures_and_tables_are_the_generated_ones() -> None:
    stale = [str(path.relative_to(ROOT)) for path, content in documents().items() if path.read_text() != content]
    assert stale == [], "run: make pictures"
