"""Measure how many idle sessions the cleaner deletes in a second: `python -m bench.cleanup [--sessions 20000]`.

Every session is a copy of one with three calls: its rows in all tables.
"""

import argparse
import asyncio
import time
from datetime import UTC, datetime

import asyncpg
import httpx

from bench.console import CALL, service
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.sessions.cleanup import Cleanup
from tersely.store.db.connection import Database

IDLE_DAYS = 60
TABLES = """
SELECT c.table_name FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name)
WHERE c.column_name = 'session_id' AND c.table_schema = 'public' AND t.table_type = 'BASE TABLE' ORDER BY 1
"""
SESSIONS = f"""
INSERT INTO sessions
SELECT (jsonb_populate_record(s, jsonb_build_object(
    'id', 'copy-' || n, 'created_at', s.created_at - interval '{IDLE_DAYS} days',
    'updated_at', s.updated_at - interval '{IDLE_DAYS} days',
    'last_call_at', s.last_call_at - interval '{IDLE_DAYS} days'))).*
FROM sessions s, generate_series(1, $1) AS n WHERE s.id = 'first'
"""
ROWS = """
INSERT INTO {0} SELECT (jsonb_populate_record(t, jsonb_build_object('session_id', 'copy-' || n))).*
FROM {0} t, generate_series(1, $1) AS n WHERE t.session_id = 'first'
"""


async def fill(dsn: str, count: int) -> int:
    """Copy the session ``first`` so many times. Return the rows of each copy."""
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(SESSIONS, count)
        rows = 1
        for record in await connection.fetch(TABLES):
            done = await connection.execute(ROWS.format(record["table_name"]), count)
            rows += int(done.split()[-1]) // count
        await connection.execute("ANALYZE")
    finally:
        await connection.close()
    return rows


async def clean(dsn: str) -> tuple[int, float]:
    """Delete the idle sessions as the service does. Return their number, and the seconds."""
    configs = ContextConfigs(strategy="slim", epoch="auto", references=None, instructions=True, derive_terse=True)
    database = Database(dsn=dsn, size=2)
    await database.open()
    try:
        cleanup = Cleanup(database, configs, clock=lambda: datetime.now(UTC), days=IDLE_DAYS // 2)
        began = time.perf_counter()
        return await cleanup.run(), time.perf_counter() - began
    finally:
        await database.close()


async def count_sessions(dsn: str) -> int:
    """Return how many sessions there are."""
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("SELECT count(*) FROM sessions"))
    finally:
        await connection.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20_000)
    count = parser.parse_args().sessions
    with service() as (url, dsn, _):
        history = list(CALL["messages"])
        with httpx.Client(base_url=url, timeout=60) as http:
            for number in range(3):
                body = {**CALL, "messages": history}
                answer = http.post("/v1/chat/completions", json=body, headers={"x-tersely-session": "first"})
                answer.raise_for_status()
                history += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And then {number}?"}]
        rows = asyncio.run(fill(dsn, count))
        deleted, took = asyncio.run(clean(dsn))
        left = asyncio.run(count_sessions(dsn))
        if left != 1:
            raise RuntimeError(f"{left - 1} of {count} idle sessions are still there")
        print(f"{deleted} sessions of {rows} rows in {took:.1f} s: {deleted / took:.0f} a second")


if __name__ == "__main__":
    main()
