"""A soak: what one worker holds over many proxied calls, and how long they take. All of it must stay flat.

`python -m bench.memory [--calls 100000] [--live 64]`: many short conversations, one in fifty of 200 KB, half of them
streamed, over a few connections. Memory, descriptors, connections to Postgres and latency are read after 20, 50 and
100 % of the calls. Live sessions have so little memory that it is full by the first of these.
"""

import argparse
import shlex
import sys
import time
from typing import Any, Final

from bench import report, servers
from bench.load import parse_shapes
from bench.run import play
from bench.servers import Server

WARM_UP_CALLS: Final = 500
SHARES: Final = (0.2, 0.5, 1.0)
PLAN: Final = "4k:49,200k"
FLAT_SHARE: Final = 0.05
"""Growth after the first stage that still counts as flat; allocators wander by a few per cent."""
SETTLE_S: Final = 1.0


def sessions_of(calls: int) -> int:
    """About how many conversations so many calls make."""
    shapes = parse_shapes(PLAN)
    return round(calls / (sum(shape.turns for shape in shapes) / len(shapes)))


def sample(server: Server, calls: int, errors: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Measure the memory after so many calls; ``figures`` are those of the load since the sample before."""
    time.sleep(SETTLE_S)
    own, database = server.memory()
    descriptors, connections = server.held()
    found = {
        "calls": calls,
        "sessions": sessions_of(calls),
        "rss_mib": own,
        "postgres_mib": database,
        "errors": errors,
        "descriptors": descriptors,
        "connections": connections,
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
    }
    print(
        f"{calls:>8,} calls  worker {own:7.1f} MiB  Postgres {database:7.1f} MiB  {descriptors} descriptors  "
        f"{connections} connections to Postgres  p50 {figures['p50_ms']:.1f} ms  p99 {figures['p99_ms']:.1f} ms  "
        f"{errors} errors",
        flush=True,
    )
    return found


def run_stages(server: Server, calls: int, connections: int) -> list[dict[str, Any]]:
    """All calls, with a sample before the first and after each stage."""
    done = WARM_UP_CALLS
    errors = 0
    more = ["--stream", "both", "--requests", str(done)]
    figures = play(server, PLAN, connections=connections, seed="memory-warm", more=more)
    samples = [sample(server, done, errors, figures)]
    for share in SHARES:
        more = ["--stream", "both", "--requests", str(round(calls * share) - done), "--limit", "7200"]
        figures = play(server, PLAN, connections=connections, seed=f"memory-{share}", more=more)
        for example in figures["examples"]:
            print(f"  {example}", file=sys.stderr)
        done = round(calls * share)
        errors += figures["errors"]
        samples.append(sample(server, done, errors, figures))
    return samples


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--live", type=int, default=64, help="MiB for live sessions")
    parser.add_argument("--variant", choices=["tersely", "bare"], default="tersely")
    args = parser.parse_args()
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        started.append(servers.upstream(scratch))
        if args.variant == "bare":
            started.append(servers.bare(started[0], scratch))
        else:
            started.append(servers.tersely(started[0], scratch, {"TERSELY_LIVE_SESSIONS": str(args.live)}))
        samples = run_stages(started[1], args.calls, args.connections)
    first, last = samples[1]["rss_mib"], samples[-1]["rss_mib"]
    data = {
        "samples": samples,
        "from_calls": samples[1]["calls"],
        "growth_mib": last - first,
        "growth_share": (last - first) / first,
        "flat": last <= first * (1 + FLAT_SHARE),
        "mix": "One conversation in fifty begins with 200 KB of history, the others with their first message; "
        f"half are streamed; {args.connections} connections; {args.live} MiB for live sessions.",
    }
    print("flat" if data["flat"] else "NOT flat")
    if args.variant == "tersely":
        report.save("memory", data, command="python -m bench.memory " + shlex.join(sys.argv[1:]))


if __name__ == "__main__":
    main()
