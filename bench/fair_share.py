"""Measure how much a tenant at full load delays another tenant's calls.

``python -m bench.fair_share [--seconds 20] [--reps 6] [--connections 32]``: one tenant asks a question at a time. In
every second stretch another one sends as many calls as it can over so many connections. Replies are streams whose
events have a pause between them, as those of models have. The figures are of the quiet tenant: from its request to the
end of the reply.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench import servers
from bench.servers import Server

ADMIN_KEY: Final = "the-operator-s-own-key"
GAP_MS: Final = 20.0
PAUSE: Final = 0.05


def body(text: str) -> dict[str, Any]:
    """A question of about 4,000 bytes."""
    return {
        "model": "gpt-4o",
        "stream": True,
        "messages": [{"role": "user", "content": f"{text}: " + "some words " * 360}],
    }


async def key_of(http: aiohttp.ClientSession, url: str, tenant: str) -> str:
    """Make a tenant with a key."""
    headers = {"X-Tersely-Key": ADMIN_KEY}
    async with http.post(f"{url}/api/admin/keys", json={"tenant": tenant}, headers=headers) as answer:
        answer.raise_for_status()
        return str((await answer.json())["key"])


async def ask(http: aiohttp.ClientSession, url: str, key: str, text: str) -> float:
    """Ask, read the reply to its end; seconds."""
    began = time.perf_counter()
    headers = {"X-Tersely-Key": key}
    async with http.post(f"{url}/v1/chat/completions", json=body(text), headers=headers) as answer:
        answer.raise_for_status()
        await answer.read()
    return time.perf_counter() - began


async def stretch(
    url: str, quiet: str, loud: str | None, seconds: float, name: str, connections: int
) -> tuple[list[float], int]:
    """The times of the quiet tenant, and the calls of the loud one."""
    end = time.monotonic() + seconds
    times: list[float] = []
    calls = 0

    async def shout(http: aiohttp.ClientSession, number: int) -> None:
        nonlocal calls
        while time.monotonic() < end:
            await ask(http, url, loud or "", f"{name} {number} {calls}")
            calls += 1

    connector = aiohttp.TCPConnector(limit=connections + 1)
    async with aiohttp.ClientSession(connector=connector) as http:
        shouting = [asyncio.create_task(shout(http, n)) for n in range(connections if loud else 0)]
        await asyncio.sleep(min(1.0, seconds / 4))
        while time.monotonic() < end:
            times.append(await ask(http, url, quiet, f"{name} quiet {len(times)}"))
            await asyncio.sleep(PAUSE)
        await asyncio.gather(*shouting)
    return times, calls


async def measure(server: Server, seconds: float, reps: int, connections: int) -> None:
    """Measure and print."""
    url = f"http://127.0.0.1:{server.port}"
    async with aiohttp.ClientSession() as http:
        quiet, loud = await key_of(http, url, "quiet"), await key_of(http, url, "loud")
    await stretch(url, quiet, loud, 3.0, "warm", connections)
    alone: list[float] = []
    beside: list[float] = []
    ratios: list[float] = []
    for rep in range(reps):
        by_itself, _ = await stretch(url, quiet, None, seconds, f"{rep}a", connections)
        loaded, calls = await stretch(url, quiet, loud, seconds, f"{rep}b", connections)
        alone += by_itself
        beside += loaded
        ratios.append(statistics.median(loaded) / statistics.median(by_itself))
        print(
            f"alone {1000 * statistics.median(by_itself):6.1f} ms, beside {calls / seconds:5.0f} calls/s "
            f"{1000 * statistics.median(loaded):6.1f} ms ({ratios[-1] - 1:+.1%})",
            flush=True,
        )
    before, after = statistics.median(alone), statistics.median(beside)
    print(f"p50: alone {1000 * before:.1f} ms, beside {1000 * after:.1f} ms ({after / before - 1:+.1%}); "
          f"median of stretches {statistics.median(ratios) - 1:+.1%}")  # fmt: skip


def run(scratch: Path, seconds: float, reps: int, connections: int) -> None:
    """Start the servers and measure."""
    with servers.running([]) as started:
        host = servers.upstream(scratch)
        started.append(host)
        servers.set_gap(host, GAP_MS)
        server = servers.tersely(host, scratch, {"TERSELY_AUTH": "keys", "TERSELY_ADMIN_KEY": ADMIN_KEY})
        started.append(server)
        asyncio.run(measure(server, seconds, reps, connections))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--reps", type=int, default=6)
    parser.add_argument("--connections", type=int, default=32)
    given = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(scratch, given.seconds, given.reps, given.connections)


if __name__ == "__main__":
    main()
