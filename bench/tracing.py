"""What tracing costs: CPU of a call with spans of every tenth call exported, beside the same service without.

`python -m bench.tracing [--calls 1632] [--reps 7]`: both services take turns at the same conversations; the collector
is one that reads each export and answers.
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
SHARE: Final = "0.1"


def cost(server: Server, calls: int, seed: str) -> float:
    """CPU of the worker in microseconds per call."""
    before = server.cpu().server
    figures = play(server, PLAN, connections=CONNECTIONS, seed=seed, more=["--stream", "no", "--requests", str(calls)])
    if figures["errors"]:
        raise RuntimeError(f"{server.name}: {figures['examples'][:2]}")
    return (server.cpu().server - before) / calls * 1e6


def run(scratch: Path, calls: int, reps: int) -> None:
    """Measure and print."""
    started: list[Server] = []
    with receiver() as collector:
        tracing = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": SHARE,
        }
        try:
            host = servers.upstream(scratch)
            started.append(host)
            chosen: dict[str, Server] = {}
            for name, environment in (("off", {}), ("on", tracing)):
                own = scratch / name
                own.mkdir()
                own.chmod(0o755)
                chosen[name] = servers.tersely(host, own, environment)
                started.append(chosen[name])
            for name, server in chosen.items():
                cost(server, calls // 3, f"warm{name}")
            found: dict[str, list[float]] = {"off": [], "on": []}
            for rep in range(reps):
                for name in ("off", "on") if rep % 2 else ("on", "off"):
                    found[name].append(cost(chosen[name], calls, f"{name}{rep}"))
                    print(f"{name:4} {found[name][-1]:8.0f} us", flush=True)
        finally:
            for server in reversed(started):
                server.stop()
    off, on = statistics.median(found["off"]), statistics.median(found["on"])
    paired = statistics.median(each / other for each, other in zip(found["on"], found["off"], strict=True))
    print(f"median: off {off:.0f} us, on {on:.0f} us ({on / off - 1:+.1%}; of pairs {paired - 1:+.1%})")
    print(f"{len(collector.calls())} calls of {calls * reps + calls // 3} exported, {len(collector.spans)} spans")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=1632)
    parser.add_argument("--reps", type=int, default=7)
    given = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(scratch, given.calls, given.reps)


if __name__ == "__main__":
    main()
