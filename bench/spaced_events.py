"""Measure what the events of streams cost that arrive one by one, as a model writes them.

`python -m bench.spaced_events [--gap 1] [--calls 1000] [--reps 5]`: conversations of 121 KB at 16 connections ask for
streams, and the model host pauses for ``--gap`` milliseconds behind each event. Bare passthrough and Tersely take
turns. Prints the CPU of each for a call and, less that of the same call with a whole reply, for an event.
"""

import argparse
import statistics
from collections import defaultdict
from typing import Final

from bench import servers
from bench.run import play
from bench.servers import Server
from bench.texts import EVENTS_OF_TEXT

PLAN: Final = "agent121k-34"
CONNECTIONS: Final = 16


def cost(server: Server, calls: int, seed: str, *, stream: bool) -> float:
    """Return the microseconds of the server's CPU for a call."""
    before = server.cpu()
    more = ["--stream", "yes" if stream else "no", "--requests", str(calls)]
    figures = play(server, PLAN, connections=CONNECTIONS, seed=seed, more=more)
    if figures["errors"]:
        raise SystemExit(f"{figures['errors']} errors at {server.name}")
    return (server.cpu().server - before.server) / int(figures["requests"]) * 1e6


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gap", type=float, default=1.0, help="milliseconds between two events")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        host = servers.upstream(scratch)
        started.append(host)
        servers.set_gap(host, args.gap)
        started += [servers.bare(host, scratch), servers.tersely(host, scratch)]
        for rep in range(args.reps + 1):
            for server in started[1:]:
                costs = [cost(server, args.calls, f"{rep}{stream}", stream=stream) for stream in (False, True)]
                if rep:  # the first one warms up
                    found[server.name].append((costs[0], costs[1]))
    for name, pairs in found.items():
        streamed = statistics.median(stream for _, stream in pairs)
        event = statistics.median(stream - whole for whole, stream in pairs) / EVENTS_OF_TEXT
        print(f"{name}: {streamed:,.0f} us for a call, {event:.1f} us for an event")
    first, second = found.values()
    ratio = statistics.median(mine[1] / bare[1] for bare, mine in zip(first, second, strict=True))
    print(f"ratio of the calls: {ratio:.2f}")


if __name__ == "__main__":
    main()
