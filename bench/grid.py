"""Measure later calls of conversations, in every combination that agents make: `make bench`.

`python -m bench [--cells 121k,delta] [--reps 5] [--minutes 11] [--litellm]`

A repetition goes through all cells, the variants of a cell in turn. Each connection plays a conversation of its own
that no server has seen: some calls to warm up, then a fixed number of counted ones, each with the last reply and one
new message more. CPU time is that of the processes' own clocks over the counted calls; ratios are to the bare
passthrough in the same repetition, and the table has their medians. No repetition begins after ``--minutes``. Search
pages are not built meanwhile (`bench.unindexed`); `bench.search_pages` measures what they cost.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import report, servers
from bench.servers import Server

SIZES: Final = ("4k", "42k", "121k", "221k")
CONNECTIONS: Final = (1, 16, 64)
# Calls of each connection: to warm up, and counted.
WARM_UP: Final = 4
CALLS: Final = {1: 24, 16: 8, 64: 4}
# Tersely's variants are told apart by a header: one process serves them all.
HEADERS: Final = {
    "slim": "x-tersely-strategy: slim",
    "full": "x-tersely-strategy: full",
    "bypass": "x-tersely-bypass: true",
    "delta": "x-tersely-strategy: slim",
}
VARIANTS: Final = ("bare", "slim", "full", "bypass")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One kind of calls. ``kind``: ``later`` calls of conversations, such with a model that takes 20 ms (``delay``),
    such that carry new messages alone (``delta``), or the first calls of ``new`` conversations.
    """

    dialect: str
    size: str
    stream: bool
    connections: int
    kind: str = "later"

    @property
    def name(self) -> str:
        """`OpenAI, 121 KB, 16 connections, streamed`."""
        parts = [{"openai": "OpenAI", "anthropic": "Anthropic"}[self.dialect], self.size.replace("k", " KB")]
        parts.append("1 connection" if self.connections == 1 else f"{self.connections} connections")
        parts += ["streamed"] if self.stream else []
        more = {"delay": "the model takes 20 ms", "delta": "new messages alone", "new": "new conversation each call"}
        return ", ".join([*parts, more[self.kind]] if self.kind in more else parts)

    @property
    def variants(self) -> tuple[str, ...]:
        """The measured variants."""
        if self.kind == "delta":
            return "bare", "delta"
        return ("bare", "slim", "full") if self.kind == "new" else VARIANTS


CELLS: Final = (
    *(
        GridCell(dialect=dialect, size=size, stream=stream, connections=connections)
        for dialect in ("openai", "anthropic")
        for size in SIZES
        for stream in (False, True)
        for connections in CONNECTIONS
    ),
    *(GridCell(dialect="openai", size="121k", stream=False, connections=c, kind="delay") for c in (1, 16)),
    *(
        GridCell(dialect="openai", size=s, stream=False, connections=c, kind="delta")
        for s in ("4k", "121k")
        for c in (1, 16)
    ),
    *(GridCell(dialect="openai", size="4k", stream=False, connections=c, kind="new") for c in (1, 16)),
)
# LiteLLM is measured in these, beside going direct.
LITELLM_CELLS: Final = tuple(
    GridCell(dialect="openai", size=size, stream=False, connections=c) for size in ("4k", "121k") for c in (1, 16)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A limit for a figure of cells: all that have the given attributes."""

    what: str
    figure: str
    limit: float
    cells: tuple[GridCell, ...]
    variant: str = "slim"
    is_floor: bool = False


def _cells(**attributes: object) -> tuple[GridCell, ...]:
    wanted = {"kind": "later"} | attributes
    return tuple(cell for cell in CELLS if all(getattr(cell, name) == value for name, value in wanted.items()))


AGENT: Final[dict[str, object]] = {"size": "121k", "connections": 16}
GOALS: Final = (
    *(
        Goal(
            what=f"CPU / bare: {name}121 KB, 16 connections{', streamed' if stream else ''}",
            figure="cpu_to_bare",
            limit=1.8 if stream else 2.0,
            cells=_cells(dialect=dialect, stream=stream, **AGENT),
        )
        for dialect, name in (("openai", ""), ("anthropic", "Anthropic, moving cache_control, "))
        for stream in (False, True)
    ),
    Goal(
        what="CPU / bare: 4 KB, 16 connections",
        figure="cpu_to_bare",
        limit=2.2,
        cells=_cells(dialect="openai", size="4k", connections=16, stream=False),
    ),
    Goal(
        what="CPU / bare: 121 KB, 1 connection",
        figure="cpu_to_bare",
        limit=3.0,
        cells=_cells(dialect="openai", size="121k", connections=1, stream=False),
    ),
    Goal(
        what="CPU / bare: delta, 1 connection",
        figure="cpu_to_bare",
        limit=3.0,
        cells=_cells(kind="delta", connections=1),
        variant="delta",
    ),
    Goal(
        what="CPU / bare: the model takes 20 ms, 121 KB, 16 connections",
        figure="cpu_to_bare",
        limit=2.0,
        cells=_cells(kind="delay", connections=16),
    ),
    Goal(
        what="CPU / bare: new conversation each call, 4 KB",
        figure="cpu_to_bare",
        limit=5.0,
        cells=_cells(kind="new"),
    ),
    Goal(
        what="first byte over bare, ms: 121 KB, streamed, 1 connection",
        figure="first_byte_over_bare_ms",
        limit=0.3,
        cells=_cells(size="121k", stream=True, connections=1),
    ),
    Goal(
        what="Postgres CPU per call, us: 16 connections",
        figure="postgres_us",
        limit=100.0,
        cells=_cells(connections=16),
    ),
    Goal(
        what="CPU / that of full: 121 KB, 16 connections",
        figure="cpu_to_full",
        limit=1.1,
        cells=_cells(**AGENT),
    ),
    Goal(
        what="requests/s, times LiteLLM's",
        figure="rps_to_litellm",
        limit=20.0,
        cells=LITELLM_CELLS,
        is_floor=True,
    ),
    Goal(what="added p50, share of LiteLLM's", figure="added_to_litellm", limit=0.05, cells=LITELLM_CELLS),
)

Sample = dict[str, float]


class Load:
    """The load process, which plays one plan after another."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load", "--serve"],
            cwd=servers.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        servers.pin(self._process.pid, servers.OTHER_CORES)

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the load ended")
        return line

    def play(self, server: Server, cell: GridCell, *, headers: str, seed: str) -> Sample:
        """One cell against one server: the load's figures, and the CPU time of the counted calls."""
        plan = {
            "url": server.messages_url if cell.dialect == "anthropic" else server.chat_url,
            "shapes": f"grid{cell.size}{'-new' if cell.kind == 'new' else ''}",
            "streams": [cell.stream],
            "connections": cell.connections,
            "seed": seed,
            "seconds": 0.0,
            "requests": 0,
            "timeout_s": 60.0,
            "limit_s": 300.0,
            "warm_up": WARM_UP,
            "calls": CALLS[cell.connections],
            "headers": headers,
            "delta": cell.kind == "delta",
        }
        self._tell(json.dumps(plan))
        assert self._hear() == "warm\n"
        before = server.cpu()
        self._tell("go")
        figures = json.loads(self._hear())
        after = server.cpu()
        for example in figures["examples"]:
            print(f"  {server.name}: {example}", file=sys.stderr)
        done = max(figures["requests"], 1)
        keys = ("rps", "p50_ms", "p99_ms", "first_byte_p50_ms", "body_bytes", "requests", "errors")
        return {key: float(figures[key]) for key in keys} | {
            "cpu_us": (after.server - before.server) / done * 1e6,
            "postgres_us": (after.postgres - before.postgres) / done * 1e6,
        }


def variants_of(cell: GridCell, chosen: Sequence[str]) -> list[str]:
    """Return the variants that are measured in a cell. ``chosen``: the servers that there are."""
    beside = [name for name in ("direct", "litellm") if name in chosen and cell in LITELLM_CELLS]
    return [*beside, *cell.variants]


Samples = dict[tuple[GridCell, str], list[Sample]]


def run(load: Load, running: dict[str, Server], cells: Sequence[GridCell], *, reps: int, minutes: float) -> Samples:
    """All cells, `reps` times or until the time is over. Only whole repetitions count."""
    samples: Samples = defaultdict(list)
    began = time.monotonic()
    longest = 0.0
    for rep in range(reps):
        started = time.monotonic()
        if rep and started + longest - began > minutes * 60:
            print(f"the time is over after {rep} repetitions")
            break
        found: dict[tuple[GridCell, str], Sample] = {}
        for cell in cells:
            servers.set_delay(running["direct"], 20.0 if cell.kind == "delay" else 0.0)
            names = variants_of(cell, [*running] if "litellm" in running else [])
            for name in names[rep % len(names) :] + names[: rep % len(names)]:
                server = running.get(name) or running["tersely"]
                seed = f"{rep} {name} {cell.name}"
                found[cell, name] = load.play(server, cell, headers=HEADERS.get(name, ""), seed=seed)
        for key, sample in found.items():
            samples[key].append(sample)
        longest = max(longest, time.monotonic() - started)
        print(f"repetition {rep + 1} took {time.monotonic() - started:.0f} s", flush=True)
    servers.set_delay(running["direct"], 0.0)
    return samples


def rows_of(samples: Samples) -> list[report.Row]:
    """One row for each cell and variant: medians, and medians of the ratios within each repetition."""
    rows = []
    for (cell, name), own in samples.items():
        row: report.Row = {**asdict(cell), "cell": cell.name, "variant": name}
        row |= {key: statistics.median(s[key] for s in own) for key in own[0]}
        row["errors"] = int(sum(s["errors"] for s in own))
        others = {other: samples.get((cell, other)) for other in ("bare", "full", "direct", "litellm")}

        def ratio(key: str, under: list[Sample] | None, own: list[Sample] = own) -> float | None:
            pairs = zip(own, under or (), strict=False)
            return statistics.median([a[key] / b[key] for a, b in pairs if b[key]]) if under else None

        def over(key: str, under: list[Sample] | None, own: list[Sample] = own) -> float | None:
            pairs = zip(own, under or (), strict=False)
            return statistics.median([a[key] - b[key] for a, b in pairs]) if under else None

        row["cpu_to_bare"] = ratio("cpu_us", others["bare"])
        row["cpu_to_full"] = ratio("cpu_us", others["full"])
        row["first_byte_over_bare_ms"] = over("first_byte_p50_ms", others["bare"])
        row["rps_to_litellm"] = ratio("rps", others["litellm"])
        row["added_p50_ms"] = over("p50_ms", others["direct"])
        lite, direct = others["litellm"], others["direct"]
        theirs = (
            statistics.median(a["p50_ms"] - b["p50_ms"] for a, b in zip(lite, direct, strict=True))
            if lite and direct
            else None
        )
        row["added_to_litellm"] = row["added_p50_ms"] / theirs if theirs and row["added_p50_ms"] is not None else None
        rows.append(row)
    return rows


def goals_of(rows: Sequence[report.Row]) -> list[dict[str, Any]]:
    """The goals with the worst figure for each."""
    found = []
    for goal in GOALS:
        names = {cell.name for cell in goal.cells}
        known = [
            row
            for row in rows
            if row["cell"] in names and row["variant"] == goal.variant and row[goal.figure] is not None
        ]
        if not known:
            continue
        worst = (min if goal.is_floor else max)(known, key=lambda row, figure=goal.figure: row[figure])
        value = worst[goal.figure]
        found.append(
            {
                "what": goal.what,
                "limit": f"at {'least' if goal.is_floor else 'most'} {goal.limit:g}",
                "value": value,
                "reached": value >= goal.limit if goal.is_floor else value <= goal.limit,
                "where": worst["cell"],
            }
        )
    return found


def start(started: list[Server], scratch: Path, *, with_litellm: bool) -> dict[str, Server]:
    """All servers; `started` owns them."""
    started.append(servers.upstream(scratch))
    running = {"direct": started[0]}
    undisturbed = partial(servers.tersely, module="bench.unindexed")
    for name, starter in (("bare", servers.bare), ("tersely", undisturbed), ("litellm", servers.litellm)):
        if name != "litellm" or with_litellm:
            running[name] = starter(started[0], scratch)
            started.append(running[name])
    return running


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cells", default="", help="only cells whose names or kinds have one of these words, by commas"
    )
    parser.add_argument("--reps", type=int, default=5, help="repetitions at most")
    parser.add_argument("--minutes", type=float, default=11.0, help="after which no repetition begins")
    parser.add_argument("--litellm", action="store_true", help="LiteLLM's proxy beside, installed on first use")
    args = parser.parse_args()
    words = [word.replace("k", " KB") if word[:-1].isdigit() else word for word in args.cells.split(",") if word]
    cells = [c for c in CELLS if not words or any(word in f"{c.name} {c.kind}" for word in words)]
    with ExitStack() as stack:
        scratch = stack.enter_context(servers.scratch_dir())
        started = stack.enter_context(servers.running([]))
        running = start(started, scratch, with_litellm=args.litellm)
        load = stack.enter_context(Load())
        for name in (*running, *HEADERS):
            server = running.get(name) or running["tersely"]
            load.play(server, CELLS[1], headers=HEADERS.get(name, ""), seed=f"warm {name}")
        samples = run(load, running, cells, reps=args.reps, minutes=args.minutes)
    rows = rows_of(samples)
    goals = goals_of(rows)
    for goal in goals:
        verdict = "reached" if goal["reached"] else "NOT reached"
        print(f"{goal['what']}: {goal['value']:.2f} ({goal['limit']}): {verdict}; worst of {goal['where']}")
    if words:
        for row in rows:
            print(
                f"{row['cell']:60} {row['variant']:8} {row['cpu_us']:7.0f} us {row['cpu_to_bare'] or 0:6.2f} "
                f"Postgres {row['postgres_us']:5.0f} us, p50 {row['p50_ms']:.2f} ms, {row['errors']} errors"
            )
        return
    reps = len(next(iter(samples.values())))
    data: dict[str, Any] = {"reps": reps, "rows": rows, "summary": goals, "warm_up": WARM_UP}
    data["calls"] = {str(connections): count for connections, count in CALLS.items()}
    data["servers"] = {"LiteLLM": servers.LITELLM} if args.litellm else {}
    report.save("grid", data, command="python -m bench " + shlex.join(sys.argv[1:]))


if __name__ == "__main__":
    main()
