"""The speed table: direct, bare passthrough, Tersely and LiteLLM's proxy in one interleaved run.

`python -m bench [--quick] [--only direct,bare] [--skip litellm] [--reps 5] [--seconds 1]`
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import report, servers
from bench.servers import Server

VARIANTS: Final = ("direct", "bare", "tersely", "litellm")
_STARTERS: Final[dict[str, Callable[[Server, Path], Server]]] = {
    "bare": servers.bare,
    "tersely": servers.tersely,
    "litellm": servers.litellm,
}
WARM_UP_S: Final = 1.0
MAX_ERRORS_PRINTED: Final = 3


class LoadCell(NamedTuple):
    """One kind of load."""

    plan: str
    stream: bool
    connections: int
    gap_ms: float = 0.0
    """Pause between the events of a stream, in milliseconds."""


CELLS: Final = (
    *(LoadCell(plan, stream, c) for plan in ("4k", "200k") for stream in (False, True) for c in (1, 16, 64)),
    LoadCell("4k", stream=True, connections=16, gap_ms=2.0),
    LoadCell("200k-first", stream=False, connections=1),
    LoadCell("200k-later", stream=False, connections=1),
)
QUICK_CELLS: Final = (
    LoadCell("4k", stream=False, connections=1),
    LoadCell("4k", stream=False, connections=16),
    LoadCell("4k", stream=True, connections=16),
    LoadCell("200k", stream=False, connections=16),
)

Sample = dict[str, float]


def play(server: Server, plan: str, *, connections: int, seed: str, more: Sequence[str]) -> dict[str, Any]:
    """Run the load in a process of its own; its report. ``plan``: in Anthropic's format where it begins with ``a-``, as
    responses that name the last one where it begins with ``r-``; these are not streamed.
    """
    urls = {"a-": server.messages_url, "r-": server.responses_url}
    url, plan = (urls[plan[:2]], plan[2:]) if plan[:2] in urls else (server.chat_url, plan)
    command = [sys.executable, "-m", "bench.load", "--url", url, "--plan", plan]
    command += ["--connections", str(connections), "--seed", seed, *more]
    with subprocess.Popen(command, cwd=servers.ROOT, stdout=subprocess.PIPE) as process:
        servers.pin(process.pid, servers.OTHER_CORES)
        out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load against {server.name} failed")
    report: dict[str, Any] = json.loads(out)
    return report


def measure(server: Server, cell: LoadCell, *, seed: str, seconds: float) -> Sample:
    """One cell against one server: the load's figures and the CPU time they cost."""
    before = server.cpu()
    stream = "yes" if cell.stream else "no"
    figures = play(
        server,
        cell.plan,
        connections=cell.connections,
        seed=seed,
        more=["--stream", stream, "--seconds", str(seconds)],
    )
    after = server.cpu()
    if figures["errors"]:
        for example in figures["examples"][:MAX_ERRORS_PRINTED]:
            print(f"  {server.name}: {example}", file=sys.stderr)
    done = max(figures["requests"], 1)
    own = (after.server - before.server) / done * 1e6
    database = (after.postgres - before.postgres) / done * 1e6
    keys = ("rps", "p50_ms", "p99_ms", "first_byte_p50_ms", "opening_p50_ms", "requests", "errors")
    figures |= {"cpu_us": own, "cpu_all_us": own + database}
    return {key: float(figures[key]) for key in (*keys, "cpu_us", "cpu_all_us", "reads_per_reply", "body_bytes")}


def start(variants: Sequence[str], started: list[Server], scratch: Path) -> dict[str, Server]:
    """The model host and the chosen servers, warmed up; `started` owns them at once."""
    host = servers.upstream(scratch)
    started.append(host)
    chosen = {}
    for name in variants:
        if name == "direct":
            chosen[name] = host
            continue
        server = _STARTERS[name](host, scratch)
        started.append(server)
        chosen[name] = server
    for name, server in chosen.items():
        for cell in (LoadCell("4k", stream=False, connections=8), LoadCell("4k", stream=True, connections=8)):
            measure(server, cell, seed=f"warm-{name}-{cell.stream}", seconds=WARM_UP_S)
        print(f"{name}: ready", flush=True)
    return chosen


def run_all(
    chosen: dict[str, Server], host: Server, cells: Sequence[LoadCell], *, reps: int, seconds: float
) -> dict[tuple[LoadCell, str], list[Sample]]:
    """All cells, `reps` times, the variants taking turns and changing places."""
    samples: dict[tuple[LoadCell, str], list[Sample]] = {}
    names = list(chosen)
    for rep in range(reps):
        for cell in cells:
            servers.set_gap(host, cell.gap_ms)
            for name in names[rep % len(names) :] + names[: rep % len(names)]:
                sample = measure(chosen[name], cell, seed=f"{rep}", seconds=seconds)
                samples.setdefault((cell, name), []).append(sample)
                print(
                    f"{rep + 1}/{reps} {cell.plan:10} {'stream' if cell.stream else 'json':6} c{cell.connections:<2} "
                    f"{name:8} {sample['rps']:8.0f}/s  p50 {sample['p50_ms']:8.2f} ms  "
                    f"CPU {sample['cpu_us']:8.0f} us (all {sample['cpu_all_us']:8.0f})",
                    flush=True,
                )
    return samples


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _ratio(over: Sequence[Sample], under: Sequence[Sample] | None, key: str) -> float | None:
    """Median of the ratios within each repetition."""
    if not under:
        return None
    return _median([a[key] / b[key] for a, b in zip(over, under, strict=True) if b[key]] or [0.0])


def _added(own: Sequence[Sample], direct: Sequence[Sample] | None, key: str) -> float | None:
    """Median of what was added within each repetition."""
    return _median([a[key] - b[key] for a, b in zip(own, direct, strict=True)]) if direct else None


def rows_of(samples: dict[tuple[LoadCell, str], list[Sample]]) -> list[report.Row]:
    """One row for each cell and variant."""
    rows = []
    for (cell, name), own in samples.items():
        direct, bare, lite = (samples.get((cell, other)) for other in ("direct", "bare", "litellm"))
        row: report.Row = {**cell._asdict(), "variant": name}
        row |= {key: _median([s[key] for s in own]) for key in own[0]}
        row["errors"] = int(sum(s["errors"] for s in own))
        if name != "direct":
            row["added_p50_ms"] = _added(own, direct, "p50_ms")
            row["added_p99_ms"] = _added(own, direct, "p99_ms")
            row["cpu_to_bare"] = _ratio(own, bare, "cpu_us")
            row["cpu_all_to_bare"] = _ratio(own, bare, "cpu_all_us")
            row["rps_to_litellm"] = _ratio(own, lite, "rps")
            theirs = _added(lite, direct, "p50_ms") if lite else None
            row["added_to_litellm"] = row["added_p50_ms"] / theirs if theirs and direct else None
        rows.append(row)
    order = {name: n for n, name in enumerate(VARIANTS)}
    cells = list(dict.fromkeys(cell for cell, _ in samples))
    rows.sort(key=lambda r: (cells.index(LoadCell(*(r[f] for f in LoadCell._fields))), order[r["variant"]]))
    return rows


def summary_of(rows: Sequence[report.Row]) -> list[dict[str, Any]]:
    """The goals at 4 KB and the worst figure for each."""
    ours = [r for r in rows if r["variant"] == "tersely" and r["plan"] == "4k" and not r["gap_ms"]]
    goals = (
        ("requests/s, times LiteLLM's", "rps_to_litellm", "at least 10", 10.0, min),
        ("added p50, share of LiteLLM's", "added_to_litellm", "at most 0.1", 0.1, max),
        ("CPU of the worker, times the bare passthrough's", "cpu_to_bare", "at most 2.5", 2.5, max),
        ("the same with Postgres", "cpu_all_to_bare", "at most 2.5", 2.5, max),
    )
    summary = []
    for what, key, limit, bound, worst in goals:
        known = [r for r in ours if r.get(key) is not None]
        if not known:
            continue
        row = worst(known, key=itemgetter(key))
        reached = row[key] >= bound if worst is min else row[key] <= bound
        summary.append(
            {
                "what": what,
                "limit": limit,
                "value": row[key],
                "reached": reached,
                "where": report.cell_name(row),
            }
        )
    return summary


def choose(only: str, skip: str) -> list[str]:
    """The variants to run, in table order."""
    wanted = set(only.split(",")) if only else set(VARIANTS)
    unwanted = set(skip.split(",")) - {""}
    unknown = (wanted | unwanted) - set(VARIANTS)
    if unknown:
        raise SystemExit(f"unknown variant {', '.join(sorted(unknown))}: there are {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name in wanted - unwanted]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four cells, short; does not write the results")
    parser.add_argument("--only", default="", help=f"variants, of {','.join(VARIANTS)}")
    parser.add_argument("--skip", default="", help="variants to leave out")
    parser.add_argument("--reps", type=int, default=0, help="repetitions (5; quick: 1)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement (1)")
    parser.add_argument("--write", action="store_true", help="write the results of a quick or partial run, too")
    args = parser.parse_args()
    variants = choose(args.only, args.skip)
    reps, seconds = args.reps or (1 if args.quick else 5), args.seconds
    begun = time.monotonic()
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        chosen = start(variants, started, scratch)
        cells = QUICK_CELLS if args.quick else CELLS
        samples = run_all(chosen, started[0], cells, reps=reps, seconds=seconds)
    rows = rows_of(samples)
    summary = summary_of(rows)
    print(f"took {time.monotonic() - begun:.0f} s")
    for goal in summary:
        verdict = "reached" if goal["reached"] else "NOT reached"
        print(f"{goal['what']}: {goal['value']:.2f} ({goal['limit']}): {verdict}; worst of {goal['where']}")
    data = {"reps": reps, "seconds": seconds, "rows": rows, "summary": summary}
    data["servers"] = {"LiteLLM": servers.LITELLM} if "litellm" in chosen else {}
    if args.write or not (args.quick or args.only or args.skip):
        report.save("speed", data, command="python -m bench " + shlex.join(sys.argv[1:]))


if __name__ == "__main__":
    main()
