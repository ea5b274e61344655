"""Measure how many bytes Postgres holds for a message, besides the message itself.

`python -m bench.stored_bytes [--messages 6000]`: messages are appended through REST, then calls go through the proxy
that add as many, in three dialects. The bytes of all tables and their indexes are counted before and after; empty
tables and the files' beginnings are in both counts. The search index is counted apart: it is built in the background.
"""

import argparse
import asyncio
import shlex
import sys
import time
from functools import partial
from typing import Any, Final, NamedTuple

import asyncpg

from bench import report, servers
from bench.context_flat import BATCH, Api, message
from bench.run import play
from bench.servers import Server

SESSION_SIZE: Final = 500
CONNECTIONS: Final = 16
# Seconds: the search index has been built when the tables have not grown for so long: it waits for quiet.
SETTLE_S: Final = 40.0
SETTLE_LIMIT_S: Final = 300.0
GOAL: Final = 400
SEARCH_GOAL: Final = 600
SEARCH_TABLES: Final = ("search_pages", "search_words", "term_pages")
SIZES: Final = """
SELECT c.relname AS name, pg_total_relation_size(c.oid) AS size
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'public' AND c.relkind = 'r'
"""
MESSAGES: Final = "SELECT count(*) AS count, coalesce(sum(length(raw)), 0) AS raw FROM messages"


class Stored(NamedTuple):
    """The messages in the database, their bytes, and those of each table with its indexes."""

    messages: int
    raw: int
    tables: dict[str, int]


async def read_stored(server: Server) -> Stored:
    """Ask the server's embedded Postgres, past row-level security."""
    assert server.postgres_dir is not None
    (pid_file,) = server.postgres_dir.rglob("postmaster.pid")
    lines = pid_file.read_text().splitlines()
    connection = await asyncpg.connect(host=lines[4], port=int(lines[3]), user="tersely", database="tersely")
    try:
        count = await connection.fetchrow(MESSAGES)
        assert count is not None
        sizes = {row["name"]: row["size"] for row in await connection.fetch(SIZES)}
        return Stored(count["count"], int(count["raw"]), sizes)
    finally:
        await connection.close()


def read_settled(server: Server) -> Stored:
    """Wait until nothing is written any more."""
    deadline = time.monotonic() + SETTLE_LIMIT_S
    found = asyncio.run(read_stored(server))
    while time.monotonic() < deadline:
        time.sleep(SETTLE_S)
        last, found = found, asyncio.run(read_stored(server))
        if last == found:
            break
    return found


def append(server: Server, count: int, seed: str) -> None:
    """Append messages through REST, to sessions of `SESSION_SIZE`."""
    api = Api(server.port)
    for number in range(count // SESSION_SIZE):
        session = f"{seed}-{number}"
        for start in range(0, SESSION_SIZE, BATCH):
            batch = [message(session, n, rare=False) for n in range(start, min(start + BATCH, SESSION_SIZE))]
            api.post(f"/api/sessions/{session}/messages", {"dialect": "openai_chat", "messages": batch})


def call(server: Server, count: int, seed: str, *, plan: str = "grid4k") -> None:
    """Make calls of a few long conversations; each adds a question and a reply. ``plan``: see `bench.run.play`."""
    more = ["--stream", "no", "--requests", str(count // 2)]
    figures = play(server, plan, connections=CONNECTIONS, seed=seed, more=more)
    if figures["errors"]:
        raise RuntimeError(str(figures["examples"]))


KINDS: Final = {
    "appended through REST": append,
    "calls through the proxy": call,
    "calls in Anthropic's format": partial(call, plan="a-grid4k"),
    "calls that name the last response": partial(call, plan="r-grid4k"),
}


def row(what: str, before: Stored, after: Stored) -> dict[str, Any]:
    """Return the bytes for each message that came between two looks, besides its own."""
    count = after.messages - before.messages
    grown = {name: (after.tables[name] - before.tables[name]) / count for name in after.tables}
    search = sum(grown.pop(name, 0.0) for name in SEARCH_TABLES)
    raw = (after.raw - before.raw) / count
    largest = sorted(grown.items(), key=lambda each: each[1], reverse=True)[:5]
    return {
        "what": what,
        "messages": count,
        "raw": raw,
        "beside": sum(grown.values()) - raw,
        "search": search,
        "tables": {name: size for name, size in largest if size >= 1},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=6_000)
    args = parser.parse_args()
    rows = []
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        started.append(servers.upstream(scratch))
        started.append(servers.tersely(started[0], scratch))
        server = started[1]
        for what, work in KINDS.items():
            work(server, args.messages, "warm")
            before = read_settled(server)
            work(server, args.messages, "counted")
            rows.append(row(what, before, read_settled(server)))
            print(rows[-1], flush=True)
    command = f"python -m bench.stored_bytes {shlex.join(sys.argv[1:])}".strip()
    report.save("stored", {"rows": rows, "goal": GOAL, "search_goal": SEARCH_GOAL}, command=command)


if __name__ == "__main__":
    main()
