"""Measure tracing: CPU of a call with the spans of a share of the calls exported, beside the same service without.

`python -m bench.tracing [--share 0.1] [--calls 1632] [--reps 7]` (Linux): the services take turns at the same
conversations; the collector is one that reads each export and answers. Two services run without tracing: their
difference is the noise.
"""

import argparse
from pathlib import Path
from typing import Final

from bench import servers, side_by_side
from bench.side_by_side import CallCost
from tests.support.otlp import receiver

PLAN: Final = "grow4k-34"


def run(scratch: Path, share: float, calls: int, reps: int) -> None:
    """Measure and print."""
    with receiver() as collector:
        tracing = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(share),
        }
        with side_by_side.running(scratch, {"off": {}, "again": {}, "on": tracing}) as (_, services):
            for name, server in services.items():
                side_by_side.cost(server, PLAN, calls // 3, f"warm{name}")

            def measure(name: str, rep: int) -> CallCost:
                return side_by_side.cost(services[name], PLAN, calls, f"{name}{rep}")

            found = side_by_side.take_turns(tuple(services), reps, measure)
    side_by_side.print_changes(found, "off")
    print(f"{len(collector.calls())} calls of {calls * reps + calls // 3} exported, {len(collector.spans)} spans")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--calls", type=int, default=1632)
    parser.add_argument("--reps", type=int, default=7)
    given = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(scratch, given.share, given.calls, given.reps)


if __name__ == "__main__":
    main()
