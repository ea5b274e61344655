"""Measure a shadow: CPU and time of a call with `TERSELY_SHADOW`, beside the same service without.

`python -m bench.shadow [--plan agent121k-34] [--delay 100] [--calls 272] [--reps 5]` (Linux): the services take turns
at the same conversations, over 8 connections. The mock model host answers after so many milliseconds (0: at once, so
that the queue of the shadow is full). `off` sends the same requests by strategy `full`. The event loop's thread serves
the calls, the other threads judge them.
"""

import argparse
import re
import urllib.request
from pathlib import Path
from typing import Final

from bench import servers, side_by_side
from bench.servers import Server
from bench.side_by_side import CallCost

OFF: Final = {"TERSELY_STRATEGY": "full"}
ENVIRONMENTS: Final = {
    "off": OFF,
    "again": OFF,
    "meter": {"TERSELY_SHADOW": "meter"},
    "slim": {"TERSELY_SHADOW": "slim"},
}


def results(server: Server) -> dict[str, int]:
    """Return how many calls were judged, dropped and so on."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r'^tersely_shadow_calls_total\{result="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {result: int(float(value)) for result, value in found if float(value)}


def run(scratch: Path, plan: str, delay: float, calls: int, reps: int) -> None:
    """Measure and print."""
    with side_by_side.running(scratch, ENVIRONMENTS) as (host, services):
        servers.set_delay(host, delay)
        for name, server in services.items():
            side_by_side.cost(server, plan, calls // 3, f"warm{name}")

        def measure(name: str, rep: int) -> CallCost:
            return side_by_side.cost(services[name], plan, calls, f"{name}{rep}")

        found = side_by_side.take_turns(tuple(services), reps, measure)
        judged = {name: results(server) for name, server in services.items()}
    side_by_side.print_changes(found, "off")
    print(f"of {calls * reps + calls // 3} calls: {judged}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", default="agent121k-34")
    parser.add_argument("--delay", type=float, default=100.0)
    parser.add_argument("--calls", type=int, default=272)
    parser.add_argument("--reps", type=int, default=5)
    given = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(scratch, given.plan, given.delay, given.calls, given.reps)


if __name__ == "__main__":
    main()
