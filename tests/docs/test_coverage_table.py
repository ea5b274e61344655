"""``make coverage``: the table of line coverage by package."""

from __future__ import annotations

from bench.coverage_table import SOURCES, as_table, lines_by_package


def test_coverage_table_adds_up_files_by_package() -> None:
    report = {
        "files": {
            str(SOURCES / "tersely" / "settings.py"): {"summary": {"num_statements": 10, "covered_lines": 5}},
            str(SOURCES / "tersely" / "api" / "a.py"): {"summary": {"num_statements": 4, "covered_lines": 4}},
            str(SOURCES / "tersely" / "api" / "b.py"): {"summary": {"num_statements": 6, "covered_lines": 2}},
        }
    }
    packages = lines_by_package(report)
    assert packages == {"all": (20, 11), "tersely": (10, 5), "tersely.api": (10, 6)}
    assert "| tersely.api | 10 | 6 | 60.0% |" in as_table(packages)


def test_coverage_table_shows_packages_without_statements() -> None:
    assert as_table({"tersely.store": (0, 0)}).endswith("| tersely.store | 0 | 0 | - |")
