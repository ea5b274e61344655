"""Print line coverage by package, from the data that ``make coverage`` collected. It sets no quota."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "app"


def lines_by_package(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the number of statements and of those that ran, for each package and for all together."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in report["files"].items():
        path = Path(name).resolve()
        summary = file["summary"]
        package = ".".join(path.relative_to(SOURCES).parts[:-1]) if path.is_relative_to(SOURCES) else "other"
        for key in (package, "all"):
            sums[key][0] += summary["num_statements"]
            sums[key][1] += summary["covered_lines"]
    return {package: (statements, covered) for package, (statements, covered) in sorted(sums.items())}


def as_table(packages: dict[str, tuple[int, int]]) -> str:
    """Return the figures as a Markdown table."""
    lines = ["| package | lines | run | coverage |", "|---|---:|---:|---:|"]
    for package, (statements, covered) in packages.items():
        share = f"{covered / statements:.1%}" if statements else "-"
        lines.append(f"| {package} | {statements:,} | {covered:,} | {share} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(as_table(lines_by_package(json.loads(file.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
