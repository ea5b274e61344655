"""Run the programs and print what came of it. Names choose among them; without names all run."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.clients.agents import AGENTS
from tests.clients.checks import Outcome
from tests.clients.frameworks import FRAMEWORKS
from tests.clients.program import Program
from tests.clients.running import install, run

PROGRAMS = {program.name: program for program in (*AGENTS, *FRAMEWORKS)}
COLUMNS = (
    "program", "version", "epoch", "calls", "streamed", "turns", "sessions", "subagents", "side calls", "refusals",
    "shortened", "verdict",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PROGRAMS))
    parser.add_argument(
        "--scratch", type=Path, help="where to install and run; kept (default: a folder that is removed)"
    )
    parser.add_argument("--newest", action="store_true", help="the newest versions instead of those tried before")
    parser.add_argument("--only", choices=["auto", "small"], help="one of the two runs: default window, small window")
    arguments = parser.parse_args()
    chosen = [PROGRAMS[name] for name in arguments.names] or list(PROGRAMS.values())
    variants = [arguments.only] if arguments.only else ["auto", "small"]
    if arguments.newest:
        chosen = [program.with_newest() for program in chosen]
    outcomes: list[Outcome] = []
    failed: list[str] = []
    for program in chosen:
        scratch = arguments.scratch or _make_scratch()
        try:
            outcomes += asyncio.run(try_program(program, scratch, variants))
        except RuntimeError as error:
            failed.append(program.name)
            print(f"{program.name} could not be tried: {error}", file=sys.stderr, flush=True)
        finally:
            if arguments.scratch is None:
                shutil.rmtree(scratch, ignore_errors=True)
    print(table(outcomes))
    return 1 if failed or any(each.faults for each in outcomes) else 0


def _make_scratch() -> Path:
    """Make a folder that others may enter: the embedded Postgres of root runs as another user."""
    scratch = Path(tempfile.mkdtemp(prefix="programs-"))
    scratch.chmod(0o755)
    return scratch


async def try_program(program: Program, scratch: Path, variants: Sequence[str]) -> list[Outcome]:
    """Install a program unless it is there, and run it once per variant."""
    installed = scratch / (program.of or program.name) / "lib"
    if not (installed / ".installed").exists():
        install(program, installed)
        (installed / ".installed").touch()
    outcomes = []
    for variant in (each for each in program.epochs if each in variants):
        outcome = await run(program, installed, scratch / program.name / variant, is_small=variant == "small")
        for fault in outcome.faults:
            print(f"{program.name} ({variant}): {fault}", file=sys.stderr, flush=True)
        outcomes.append(outcome)
    return outcomes


def table(outcomes: Iterable[Outcome]) -> str:
    """As Markdown."""
    rows = [COLUMNS, ("---",) * len(COLUMNS)]
    for each in outcomes:
        figures = (
            each.calls, each.streamed, each.turns, each.sessions, each.children, each.sides, each.refusals, each.cuts
        )  # fmt: skip
        verdict = f"{len(each.faults)} faults" if each.faults else "as it should"
        rows.append((each.program, each.version, each.variant, *map(str, figures), verdict))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
