"""Measure the calls of recorded conversations: how many are live, and what a call costs with live sessions and without.

`python -m bench.recorded FILE ... [--strategies slim,full] [--reps 3]`: each file is replayed under each strategy, in
this process, and then under `slim` through a service of its own, with live sessions and without in turn. Prints two
tables: the share of the calls that were live, and the CPU time of the worker and of its Postgres for a call. The replay
streams the replies of half of the conversations in pieces of a few characters, as model hosts do.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import uvloop

from bench import servers
from bench.servers import Server
from tersely.replay.play import Variant
from tersely.replay.run import ReplayPlan, run_here
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.live_calls.live_calls import LiveCalls
from tersely.service.proxy.preparing.stages import MatchedCall
from tersely.settings import Settings
from tersely.transcripts.conversations import Transcript
from tersely.transcripts.files import load_transcript

STRATEGIES: Final = "slim,full,compact,window,tiered,trim"
MODEL: Final = "gpt-4o"
WINDOW: Final = 1_047_576


@dataclass(slots=True)
class Share:
    """The calls of a replay, and those of them that were live."""

    calls: int = 0
    live: int = 0


@contextmanager
def counted() -> Iterator[Share]:
    """Count the calls of the services in this process."""
    share = Share()
    prepare = LiveCalls.prepare

    async def count(self: LiveCalls, call: Call) -> LiveCall | MatchedCall | None:
        found = await prepare(self, call)
        share.calls += 1
        share.live += isinstance(found, LiveCall)
        return found

    LiveCalls.prepare = count  # type: ignore[method-assign]
    try:
        yield share
    finally:
        LiveCalls.prepare = prepare  # type: ignore[method-assign]


def measure(transcript: Transcript, strategy: str) -> Share:
    """Replay a file under a strategy."""
    plan = ReplayPlan(
        transcripts=[transcript],
        variants=[Variant(strategy=strategy, epoch="auto")],
        share=0.7,
        model=MODEL,
        window=WINDOW,
        parallel=4,
    )
    with counted() as share, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = run_here(runner, Settings(_env_file=None), plan, lambda _: None)
    if failures := [failure for result in results for failure in result.failures]:
        raise RuntimeError(str(failures[0]))
    return share


class CallCost(NamedTuple):
    """CPU time of one call, in milliseconds."""

    worker: float
    postgres: float


def replay(path: Path, server: Server, upstream_port: int, *more: str, strategy: str = "slim") -> int:
    """Replay a file through a service whose model host is to listen on ``upstream_port``; the number of calls."""
    command = [sys.executable, "-m", "tersely", "replay", str(path), "--model", MODEL, "--strategy", strategy, *more]
    command += ["--json", "--proxy", f"http://127.0.0.1:{server.port}", "--upstream-port", str(upstream_port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TERSELY_")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return int(json.loads(done.stdout)[0]["calls"])


def cost(path: Path, live: str) -> CallCost:
    """Replay a file twice through a service with this setting of live sessions; the cost of a call of the second."""
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        port = servers.free_port()
        server = servers.tersely(port, scratch, {"TERSELY_LIVE_SESSIONS": live})
        started.append(server)
        replay(path, server, port)
        before = server.cpu()
        calls = replay(path, server, port)
        after = server.cpu()
    return CallCost((after.server - before.server) / calls * 1e3, (after.postgres - before.postgres) / calls * 1e3)


def show_shares(paths: Sequence[Path], strategies: Sequence[str]) -> None:
    """Print the first table."""
    print(f"| file | calls | {' | '.join(f'`{name}`' for name in strategies)} |")
    print("|---|---:|" + "---:|" * len(strategies))
    for path in paths:
        transcript = load_transcript(path)
        shares = [measure(transcript, strategy) for strategy in strategies]
        cells = [f"{share.live / share.calls:.0%}" for share in shares]
        print(f"| {path.stem} | {shares[0].calls:,} | {' | '.join(cells)} |", flush=True)


def show_costs(paths: Sequence[Path], reps: int) -> None:
    """Print the second table, of medians."""
    print("| file | worker, live | without | Postgres, live | without |")
    print("|---|---:|---:|---:|---:|")
    for path in paths:
        found: dict[str, list[CallCost]] = {"256": [], "off": []}
        for _ in range(reps):
            for live, costs in found.items():
                costs.append(cost(path, live))
        cells = [
            f"{statistics.median([getattr(each, name) for each in found[live]]):.1f} ms"
            for name in CallCost._fields
            for live in ("256", "off")
        ]
        print(f"| {path.stem} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    show_shares(args.files, args.strategies.split(","))
    print()
    show_costs(args.files, args.reps)


if __name__ == "__main__":
    main()
