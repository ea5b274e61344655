"""Measure what building the search pages of a message costs, in the background, after the commits that fill them.

`python -m bench.search_pages [--sessions 16] [--reps 5]`: messages are appended through REST to sessions of three
pages, which the service builds when it has left them alone for a while. Prints the CPU time of the worker and of its
Postgres for a message, less what both take in as many seconds without work.
"""

import argparse
import statistics
import time
from typing import Final

from bench import servers
from bench.context_flat import Api, fill
from bench.servers import Server
from tersely.service.search.page_builder import PAGES, QUIET
from tersely.store.search.pages import PAGE

# One page less than what is built at once.
SESSION_SIZE: Final = (PAGES - 1) * PAGE
# Seconds in which the pages of all sessions are built, and nothing else is done.
BUILDING_S: Final = QUIET + 20.0


def append(server: Server, sessions: int, seed: str) -> None:
    """Append the messages of all sessions. The server has closed the last connection by now."""
    api = Api(server.port)
    for number in range(sessions):
        fill(api, f"{seed}-{number}", SESSION_SIZE)


def cpu_of_wait(server: Server) -> tuple[float, float]:
    """Return the CPU seconds of the worker and of its Postgres while nobody calls."""
    before = server.cpu()
    time.sleep(BUILDING_S)
    after = server.cpu()
    return after.server - before.server, after.postgres - before.postgres


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--reps", type=int, default=5)
    args = parser.parse_args()
    found = []
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        started.append(servers.upstream(scratch))
        started.append(servers.tersely(started[0], scratch))
        server = started[1]
        append(server, 1, "warm")
        cpu_of_wait(server)
        idle = cpu_of_wait(server)
        for rep in range(args.reps):
            append(server, args.sessions, f"counted{rep}")
            messages = args.sessions * SESSION_SIZE
            found.append([(busy - rest) / messages * 1e6 for busy, rest in zip(cpu_of_wait(server), idle, strict=True)])
    worker, postgres = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"{worker:.0f} us of the worker and {postgres:.0f} us of Postgres for a message of some 550 bytes")


if __name__ == "__main__":
    main()
