"""Estimate the size of the database: measured for one message and one call, then calculated for any number of them.

`python -m bench.capacity [--calls 34] [--sessions 32] [--shape grow4k]` plays conversations against a service with an
embedded Postgres, measures the bytes of each table, of its indexes, of the write-ahead log, and processor time, and
prints two tables: one million sessions a day, by retention, and growth to 10^9 messages. With `--constants FILE` it
calculates from an earlier measurement (`--save FILE` writes one). Only the constants are measured: sizes of 10^9
messages were never tried.
"""

import argparse
import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import asyncpg
import psutil

from bench import servers
from bench.pooler import cpu_s
from bench.run import play
from tersely.embedded_postgres import open_embedded_postgres

DAY_S: Final = 86_400
PAGE: Final = 8_192
# Entries of a B-tree's inner page: a key of tenant, session and number is about 60 bytes.
FANOUT: Final = PAGE // 60
# A node's disk is planned to be half full: vacuum, index builds and a base backup need room.
NODE_BYTES: Final = 1.2e12
RETENTIONS: Final = (7, 30, 90, 365)
MESSAGES: Final = tuple(10**exponent for exponent in range(6, 10))
# A table is vacuumed when a fifth of its rows has changed (Postgres' default).
VACUUM_SHARE: Final = 0.2

SIZES: Final = """
SELECT sum(pg_table_size(c.oid))::bigint AS rows, sum(pg_indexes_size(c.oid))::bigint AS indexes
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""
COUNTS: Final = """
SELECT (SELECT count(*) FROM messages) AS messages, (SELECT count(*) FROM sessions) AS sessions,
    (SELECT sum(octet_length(raw))::bigint FROM messages) AS content
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Measured figures, for each message unless named otherwise. Bytes, and microseconds of processor time."""

    calls_per_session: float
    messages_per_session: float
    content: float
    rows: float
    indexes: float
    wal: float
    postgres_us_per_call: float
    service_us_per_call: float

    @property
    def stored(self) -> float:
        return self.rows + self.indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A million sessions a day, kept for ``days``."""

    days: int
    messages: float
    rows: float
    indexes: float
    wal_per_day: float
    postgres_cores: float
    service_cores: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A database of so many ``messages``. ``vacuum_read``: bytes that one vacuum of all tables reads at most."""

    messages: int
    rows: float
    indexes: float
    index_depth: int
    dead_before_vacuum: float
    vacuum_read: float


def capacity(constants: Constants, sessions_per_day: float, retentions: Sequence[int]) -> Iterator[Capacity]:
    """Calculate what that many sessions a day need, for each retention in days."""
    calls = sessions_per_day * constants.calls_per_session
    per_day = sessions_per_day * constants.messages_per_session
    for days in retentions:
        messages = per_day * days
        yield Capacity(
            days=days,
            messages=messages,
            rows=messages * constants.rows,
            indexes=messages * constants.indexes,
            wal_per_day=per_day * constants.wal,
            postgres_cores=calls * constants.postgres_us_per_call / 1e6 / DAY_S,
            service_cores=calls * constants.service_us_per_call / 1e6 / DAY_S,
            nodes=max(1, math.ceil(messages * constants.stored / NODE_BYTES)),
        )


def growth(constants: Constants, counts: Sequence[int]) -> Iterator[Growth]:
    """Calculate the sizes of databases of so many messages."""
    for messages in counts:
        leaves = messages * 60 / (0.7 * PAGE)
        yield Growth(
            messages=messages,
            rows=messages * constants.rows,
            indexes=messages * constants.indexes,
            index_depth=1 + math.ceil(math.log(leaves, FANOUT)),
            dead_before_vacuum=VACUUM_SHARE * messages * constants.rows,
            vacuum_read=messages * constants.stored,
        )


def size(count: float) -> str:
    """Write bytes with three digits and a decimal unit."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def report(constants: Constants, sessions_per_day: float) -> str:
    """Return the measurement and both tables, in Markdown."""
    lines = [
        f"Measured: {constants.messages_per_session:.0f} messages and {constants.calls_per_session:.0f} calls a "
        f"session, {constants.content:.0f} bytes of content a message; stored {constants.rows:.0f} bytes in rows and "
        f"{constants.indexes:.0f} in indexes a message, {constants.wal:.0f} bytes of write-ahead log; "
        f"{constants.postgres_us_per_call:.0f} us of Postgres and {constants.service_us_per_call:.0f} us of Tersely a "
        "call.",
        "",
        f"| retention of {sessions_per_day:,.0f} sessions a day | messages | rows | indexes | log a day | "
        "cores of Postgres | cores of Tersely | nodes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {each.days} days | {each.messages:.2g} | {size(each.rows)} | {size(each.indexes)} | "
        f"{size(each.wal_per_day)} | {each.postgres_cores:.2f} | {each.service_cores:.2f} | {each.nodes} |"
        for each in capacity(constants, sessions_per_day, RETENTIONS)
    ]
    lines += [
        "",
        "| messages | rows | indexes | depth of an index | dead before a vacuum | a vacuum reads at most |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| 10^{round(math.log10(each.messages))} | {size(each.rows)} | {size(each.indexes)} | {each.index_depth} | "
        f"{size(each.dead_before_vacuum)} | {size(each.vacuum_read)} |"
        for each in growth(constants, MESSAGES)
    ]
    return "\n".join(lines)


async def _look(dsn: str) -> tuple[asyncpg.Record, asyncpg.Record, int]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("VACUUM")
        sizes, counts = await connection.fetchrow(SIZES), await connection.fetchrow(COUNTS)
        wal = await connection.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint")
    finally:
        await connection.close()
    assert sizes is not None
    assert counts is not None
    return sizes, counts, int(wal)


def measure(scratch: Path, shape: str, calls: int, sessions: int) -> Constants:
    """Play so many ``sessions`` of so many ``calls`` and measure. A first sixteenth is not counted."""
    with open_embedded_postgres(scratch / "postgres") as postgres, servers.running([]) as started:
        host = servers.upstream(scratch)
        started.append(host)
        dsn = postgres.admin_dsn
        server = servers.tersely(host, scratch, {"DATABASE_URL": dsn})
        started.append(server)
        postmaster = int(next((scratch / "postgres").rglob("postmaster.pid")).read_text().split()[0])
        roots = [psutil.Process(postmaster)]
        more = ["--requests", str(16 * calls)]
        play(server, f"{shape}-{calls}", connections=16, seed="warm", more=more)
        sizes, counts, wal = asyncio.run(_look(dsn))
        before = server.cpu().server, cpu_s(roots)
        for number in range(sessions // 16):
            figures = play(server, f"{shape}-{calls}", connections=16, seed=str(number), more=more)
            if figures["errors"]:
                raise RuntimeError(str(figures["examples"][:2]))
        after = server.cpu().server, cpu_s(roots)
        sizes_after, counts_after, wal_after = asyncio.run(_look(dsn))
    messages = counts_after["messages"] - counts["messages"]
    new = counts_after["sessions"] - counts["sessions"]
    done = sessions // 16 * 16 * calls
    return Constants(
        calls_per_session=done / new,
        messages_per_session=messages / new,
        content=(counts_after["content"] - counts["content"]) / messages,
        rows=(sizes_after["rows"] - sizes["rows"]) / messages,
        indexes=(sizes_after["indexes"] - sizes["indexes"]) / messages,
        wal=(wal_after - wal) / messages,
        postgres_us_per_call=(after[1] - before[1]) / done * 1e6,
        service_us_per_call=(after[0] - before[0]) / done * 1e6,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="grow4k")
    parser.add_argument("--calls", type=int, default=34)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--sessions-per-day", type=float, default=1e6)
    parser.add_argument("--constants", type=Path)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.constants:
        constants = Constants(**json.loads(args.constants.read_text()))
    else:
        with servers.scratch_dir() as scratch:
            constants = measure(scratch, args.shape, args.calls, args.sessions)
    if args.save:
        args.save.write_text(json.dumps(asdict(constants), indent=2) + "\n")
    print(report(constants, args.sessions_per_day))


if __name__ == "__main__":
    main()
