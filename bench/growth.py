"""Measure a call that adds two messages to a conversation, beside the bare passthrough.

`python -m bench.growth [--cells agent121k:no:16,grow4k:no:16] [--reps 3]`: conversations of 34 calls and of 4 calls;
the difference of their CPU time is that of 30 later calls of each. Variants take turns.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import servers
from bench.run import play
from bench.servers import Server

SHORT: Final = 4
LONG: Final = 34
CELLS: Final = "agent121k:no:16,agent121k:yes:16,a-agent121k:no:16,a-agent121k:yes:16,grow4k:no:16,agent121k:no:1"


def cpu_of(server: Server, shape: str, turns: int, *, connections: int, stream: str, seed: str) -> tuple[float, float]:
    """CPU seconds of the server and of its Postgres for one conversation of so many calls on each connection."""
    before = server.cpu()
    count = connections * turns
    more = ["--stream", stream, "--requests", str(count)]
    figures = play(server, f"{shape}-{turns}", connections=connections, seed=seed, more=more)
    after = server.cpu()
    if figures["errors"]:
        raise RuntimeError(f"{server.name}: {figures['examples'][:2]}")
    return after.server - before.server, after.postgres - before.postgres


def marginal(server: Server, cell: str, seed: str) -> tuple[float, float]:
    """Microseconds per later call, of the server and of its Postgres."""
    shape, stream, connections = cell.split(":")
    number = int(connections)
    short = cpu_of(server, shape, SHORT, connections=number, stream=stream, seed=f"s{seed}")
    long = cpu_of(server, shape, LONG, connections=number, stream=stream, seed=f"l{seed}")
    calls = number * (LONG - SHORT)
    return (long[0] - short[0]) / calls * 1e6, (long[1] - short[1]) / calls * 1e6


def run(scratch: Path, cells: Sequence[str], reps: int, variants: Sequence[str]) -> None:
    """Measure and print."""
    started: list[Server] = []
    try:
        host = servers.upstream(scratch)
        started.append(host)
        chosen = {}
        for name in variants:
            if name == "bare":
                chosen[name] = servers.bare(host, scratch)
            else:
                home = scratch / name
                home.mkdir()
                home.chmod(0o755)
                chosen[name] = servers.tersely(host, home, {"TERSELY_LIVE_SESSIONS": name})
            started.append(chosen[name])
        for server in chosen.values():
            cpu_of(server, "grow4k", LONG, connections=8, stream="no", seed="warm")
        for cell in cells:
            found: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for rep in range(reps):
                for name, server in chosen.items():
                    found[name].append(marginal(server, cell, f"{rep}"))
            base = statistics.median(own for own, _ in found["bare"]) if "bare" in found else 0.0
            for name, samples in found.items():
                own = statistics.median(each for each, _ in samples)
                database = statistics.median(each for _, each in samples)
                ratio = f"{own / base:6.2f}" if base else ""
                print(f"{cell:20} {name:6} {own:8.0f} us {ratio}  Postgres {database:6.0f} us", flush=True)
    finally:
        for server in reversed(started):
            server.stop()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--variants", default="bare,off,256")
    args = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(scratch, args.cells.split(","), args.reps, args.variants.split(","))


if __name__ == "__main__":
    main()
