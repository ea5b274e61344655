"""A service in miniature for the crash tests: uses the embedded Postgres until it is told to stop.

Prints one line of JSON when it is up; then, asked to with ``write``, one line for each row that it has committed.
Arguments: the data directory; ``wait`` or ``write``; optionally a user id to become first.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 -- after the change of user its file may be closed to us
import json
import os
import signal
import sys
from pathlib import Path

import asyncpg

from tersely.embedded_postgres import EmbeddedPostgres, embedded_postgres


async def serve(data_dir: Path, *, write: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with embedded_postgres(data_dir) as postgres:
        print(json.dumps({"dsn": postgres.admin_dsn, "started": postgres.started}), flush=True)
        if write:
            await write_rows(postgres)
        await stop.wait()


async def write_rows(postgres: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(postgres.admin_dsn)
    await connection.execute("CREATE TABLE IF NOT EXISTS acknowledged (n bigint PRIMARY KEY)")
    number = await connection.fetchval("SELECT coalesce(max(n), 0) FROM acknowledged")
    while True:
        number += 1
        await connection.execute("INSERT INTO acknowledged VALUES ($1)", number)
        print(number, flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        user = int(sys.argv[3])
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    asyncio.run(serve(Path(sys.argv[1]), write=sys.argv[2] == "write"))
