"""What tracing costs: CPU of a call with the spans of a share of the calls exported, beside the same service without.

`python -m bench.tracing [--share 0.1] [--calls 1632] [--reps 7]`: the services take turns at the same conversations;
the collector is one that reads each export and answers. Two services run without tracing: their difference is the
noise.
"""

import argparse
import statistics
from pathlib import Path
from typing import Final

from bench import servers
from bench.run import play
from bench.servers import Server
from tests.support.otlp import receiver

PLAN: Final = "grow4k-34"
CONNECTIONS: Final = 8
SERVICES: Final = ("off", "again", "on")


def cost(server: Server, calls: int, seed: str) -> float:
    """CPU of the worker in microseconds per call."""
    before = server.cpu().server
    figures = play(server, PLAN, connections=CONNECTIONS, seed=seed, more=["--stream", "no", "--requests", str(calls)])
    if figures["errors"]:
        raise RuntimeError(f"{server.name}: {figures['examples'][:2]}")
    return (server.cpu().server - before) / calls * 1e6


def run(scratch: Path, share: float, calls: int, reps: int) -> None:
    """Measure and print."""
    started: list[Server] = []
    with receiver() as collector:
        tracing = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(share),
        }
        try:
            host = servers.upstream(scratch)
            started.append(host)
            chosen: dict[str, Server] = {}
            for name in SERVICES:
                own = scratch / name
                own.mkdir()
                own.chmod(0o755)
                chosen[name] = servers.tersely(host, own, tracing if name == "on" else {})
                started.append(chosen[name])
            for name, server in chosen.items():
                cost(server, calls // 3, f"warm{name}")
            found: dict[str, list[float]] = {name: [] for name in SERVICES}
            for rep in range(reps):
                for name in SERVICES if rep % 2 else reversed(SERVICES):
                    found[name].append(cost(chosen[name], calls, f"{name}{rep}"))
                print("  ".join(f"{name} {found[name][-1]:.0f} us" for name in SERVICES), flush=True)
        finally:
            for server in reversed(started):
                server.stop()
    for name in SERVICES[1:]:
        median = statistics.median(found[name])
        pairs = [each / other for each, other in zip(found[name], found["off"], strict=True)]
        change = median / statistics.median(found["off"]) - 1
        print(
            f"{name}: median {median:.0f} us, {change:+.1%} against off; of pairs {statistics.median(pairs) - 1:+.1%}"
        )
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
