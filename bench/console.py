"""Measure the console: ``python -m bench.console [sessions] [long] [live]`` (needs Chromium).

Figures go to ``bench/console.json``.

The service runs in a process of its own, on an embedded Postgres that is thrown away.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import psutil
from playwright.sync_api import sync_playwright

from tersely.embedded_postgres import open_embedded_postgres

OUTPUT = Path(__file__).with_name("console.json")
COMMAND = Path(sys.executable).with_name("tersely")
SESSIONS = 100_000
MESSAGES = 10_000
BATCH = 500
TIMES = 30
VIEWERS = 10
SECONDS = 20.0
CALL = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Are you there?"}]}
COPIES = """
INSERT INTO sessions
SELECT (jsonb_populate_record(s, jsonb_build_object(
    'id', 'copy-' || n, 'title', 'Session number ' || n, 'last_call_at', s.last_call_at - n * interval '1 minute',
    'created_at', s.created_at - n * interval '1 minute',
    'call_hour', date_trunc('hour', s.last_call_at - n * interval '1 minute'), 'tokens', n * 7 % 400000,
    'tokens_rank', floor(16 * ln(1 + (n * 7 % 400000)::float8))))).*
FROM sessions s, generate_series(1, $1) AS n WHERE s.tenant_id = 'default' AND s.id = 'first'
"""


@contextmanager
def service() -> Iterator[tuple[str, str, int]]:
    """The address of a service with the scripted model, its database, and its process."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o711)
        with open_embedded_postgres(directory) as server:
            environment = {**os.environ, "DATABASE_URL": server.admin_dsn, "TERSELY_DATA_DIR": str(directory / "data")}
            process = subprocess.Popen(
                [COMMAND, "serve", "--port", "0", "--upstream", "scripted"],
                env={**environment, "TERSELY_LOG_LEVEL": "error"},
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert process.stdout is not None
                found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
                assert found is not None
                yield found[0], server.admin_dsn, process.pid
            finally:
                process.terminate()
                process.wait(60)


def fill_sessions(http: httpx.Client, dsn: str) -> None:
    """Make many sessions, copies of one."""
    http.post("/v1/chat/completions", json=CALL, headers={"x-tersely-session": "first"}).raise_for_status()

    async def copy() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute(COPIES, SESSIONS)
        await connection.execute("ANALYZE sessions")
        await connection.close()

    asyncio.run(copy())


def fill_long(http: httpx.Client) -> None:
    """Make a session of many messages, with two calls that cut it and one that sends it whole."""
    for start in range(0, MESSAGES, BATCH):
        result = [
            {"role": ("user", "assistant")[n % 2], "content": f"Message {n}: " + "some words of it " * 12}
            for n in range(start, start + BATCH)
        ]
        http.post("/api/sessions/long/messages", json={"messages": result}).raise_for_status()
    for strategy in ("slim", "slim", "full"):
        headers = {"x-tersely-session": "long", "x-tersely-strategy": strategy}
        http.post("/v1/chat/completions", json=CALL, headers=headers).raise_for_status()


def seconds_of(http: httpx.Client, path: str, times: int = TIMES) -> list[float]:
    """Return the durations of several requests, after one that is not counted."""
    http.get(path).raise_for_status()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        http.get(path).raise_for_status()
        found.append(time.perf_counter() - began)
    return found


def in_ms(found: list[float]) -> dict[str, float]:
    """Median and 90th percentile in milliseconds."""
    ordered = sorted(found)
    return {
        "median": round(1000 * statistics.median(ordered), 1),
        "p90": round(1000 * ordered[int(0.9 * (len(ordered) - 1))], 1),
    }


def first_content(url: str) -> list[float]:
    """Return the time that a browser takes from the click to the first row of the long session."""
    found = []
    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        for _ in range(6):
            page.goto(f"{url}/console/sessions")
            began = time.perf_counter()
            page.goto(f"{url}/console/session?id=long&call=2", wait_until="commit")
            page.locator(".row").first.wait_for()
            found.append(time.perf_counter() - began)
        browser.close()
    return found[1:]


def asset_bytes(http: httpx.Client) -> int:
    """Bytes, as sent, of everything that the heaviest view loads."""
    names = ["console.css", "console.js", "vendor/htmx.min.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css"]
    return sum(int(http.get(f"/console/static/{name}").headers["content-length"]) for name in names)


def live_share(url: str, pid: int) -> float:
    """The share of a CPU that the service spends on one viewer of the live view."""
    process = psutil.Process(pid)

    def used() -> float:
        times = process.cpu_times()
        return times.user + times.system

    time.sleep(3)
    before = used()
    time.sleep(SECONDS)
    idle = used() - before
    is_over = threading.Event()

    def view() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            http.get("/console/live")
            with http.stream("GET", "/console/live/events") as stream:
                for _ in stream.iter_bytes():
                    if is_over.is_set():
                        return

    threads = [threading.Thread(target=view, daemon=True) for _ in range(VIEWERS)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    before = used()
    time.sleep(SECONDS)
    busy = used() - before
    is_over.set()
    for thread in threads:
        thread.join(10)
    return max(0.0, busy - idle) / SECONDS / VIEWERS


def measure_sessions(url: str, http: httpx.Client, dsn: str, pid: int) -> dict[str, Any]:
    """The list of many sessions, and the first page."""
    del url, pid
    fill_sessions(http, dsn)
    return {
        "sessions": SESSIONS,
        "sessions_page_ms": in_ms(seconds_of(http, "/console/sessions")),
        "sessions_by_tokens_ms": in_ms(seconds_of(http, "/console/sessions?sort=tokens")),
        "sessions_by_title_ms": in_ms(seconds_of(http, "/console/sessions?query=number+99")),
        "first_page_ms": in_ms(seconds_of(http, "/console/replay")),
        "asset_bytes": asset_bytes(http),
    }


def measure_long(url: str, http: httpx.Client, dsn: str, pid: int) -> dict[str, Any]:
    """The page of a session of many messages."""
    del dsn, pid
    fill_long(http)
    return {
        "messages": MESSAGES,
        "session_page_ms": in_ms(seconds_of(http, "/console/session?id=long&call=2")),
        "session_rows_ms": in_ms(seconds_of(http, "/console/session/rows?id=long&call=2&start=6000&count=60")),
        "session_sent_whole_ms": in_ms(seconds_of(http, "/console/session?id=long&call=3")),
        "first_content_ms": in_ms(first_content(url)),
    }


def measure_live(url: str, http: httpx.Client, dsn: str, pid: int) -> dict[str, Any]:
    """Measure the cost of viewers of the live view."""
    del dsn
    http.post("/v1/chat/completions", json=CALL).raise_for_status()
    return {"live_cpu_per_viewer": round(live_share(url, pid), 5)}


PARTS = {"sessions": measure_sessions, "long": measure_long, "live": measure_live}


def main() -> None:
    """Measure the parts that are named, or all; put the figures beside the known ones."""
    figures: dict[str, Any] = json.loads(OUTPUT.read_text(encoding="utf-8")) if OUTPUT.exists() else {}
    for name in sys.argv[1:] or PARTS:
        with service() as (url, dsn, pid), httpx.Client(base_url=url, timeout=120) as http:
            http.headers["accept-encoding"] = "gzip"
            figures |= PARTS[name](url, http, dsn, pid)
        OUTPUT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
