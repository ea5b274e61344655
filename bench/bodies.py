"""Resident memory of one worker while many large bodies are in flight, and after them.

`python -m bench.bodies [--bodies 64] [--mib 30] [--seconds 2]`: so many new conversations at once, each in one body of
so many MiB, made of messages of different sizes. The model host holds each call for some seconds, so that the bodies
stay in flight together.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench import report, servers
from bench.servers import Server

BUDGET_MIB: Final = 512
SETTLE_S: Final = 10.0
SAMPLE_S: Final = 0.05
SENTENCE: Final = "The worker reads the queue, takes the oldest job and writes its result to the table. "


def body_of(number: int, size: int, message: int) -> bytes:
    """A chat request of ``size`` bytes in messages of ``message`` bytes, whose words no other body has."""
    message = min(message, size)
    text = (f"{number} " + SENTENCE * (message // len(SENTENCE) + 1))[: max(1, message - 60)]
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": f"{index} {text}"}
        for index in range(max(1, size // message) | 1)
    ]
    return json.dumps({"model": "gpt-4o-mini", "messages": messages}).encode()


@contextlib.contextmanager
def slow_host(seconds: float) -> Iterator[int]:
    """A model host in a thread that reads a request and answers after ``seconds``; its port."""
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode("latin-1").lower().split("\r\n")
                left = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
                while left:
                    left -= len(await reader.read(min(left, 1 << 16)) or b"x" * left)
                await asyncio.sleep(seconds)
                message = {"role": "assistant", "content": "Done with that."}
                answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
                head_out = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                writer.write(head_out % len(answer) + answer)
                await writer.drain()
        writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


async def play(server: Server, bodies: int, size: int, message: int) -> tuple[Counter[int], float]:
    """Send all bodies at once; how often each status came, and the peak of the worker's memory in MiB."""
    statuses: Counter[int] = Counter()
    peak = 0.0
    done = asyncio.Event()

    async def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, server.memory()[0])
            await asyncio.sleep(SAMPLE_S)

    # Made before, so that no client stops in the middle of its body.
    made = [body_of(number, size, message) for number in range(bodies)]

    async def call(http: aiohttp.ClientSession, body: bytes) -> None:
        try:
            async with http.post(server.chat_url, data=body) as response:
                await response.read()
                statuses[response.status] += 1
        except aiohttp.ClientError:
            statuses[0] += 1

    watching = asyncio.create_task(watch())
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        await asyncio.gather(*(call(http, body) for body in made))
    done.set()
    await watching
    return statuses, peak


def measure(scratch: Path, bodies: int, mib: float, seconds: float, message: int) -> dict[str, Any]:
    """One run on a service of its own."""
    with slow_host(seconds) as port, servers.running([]) as started:
        host = Server("host", port, None, scratch)  # type: ignore[arg-type]
        started.append(servers.tersely(host, scratch, {"TERSELY_BODY_MEMORY": str(BUDGET_MIB)}))
        server = started[0]
        try:
            asyncio.run(play(server, 4, 16 * 1024, message))
            before = server.memory()[0]
            begun = time.monotonic()
            statuses, peak = asyncio.run(play(server, bodies, int(mib * 2**20), message))
            took = time.monotonic() - begun
            time.sleep(SETTLE_S)
            after = server.memory()[0]
        finally:
            started.remove(server)
            server.stop()
    return {
        "bodies": bodies,
        "mib": mib,
        "message_bytes": message,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "before_mib": before,
        "peak_mib": peak,
        "after_mib": after,
        "seconds": took,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=64)
    parser.add_argument("--mib", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long the model host holds a call")
    parser.add_argument("--messages", type=int, nargs="+", default=[2048, 100 * 1024, 30 * 2**20], help="bytes of one")
    args = parser.parse_args()
    rows = []
    for message in args.messages:
        with servers.scratch_dir() as scratch:
            rows.append(measure(scratch, args.bodies, args.mib, args.seconds, message))
        print(json.dumps(rows[-1]), flush=True)
    data = {"budget_mib": BUDGET_MIB, "rows": rows}
    report.save("bodies", data, command="python -m bench.bodies " + shlex.join(sys.argv[1:]))


if __name__ == "__main__":
    main()
