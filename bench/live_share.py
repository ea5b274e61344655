"""Count the calls of recorded conversations that are live: those that work out only what is new in them.

`python -m bench.live_share FILE ... [--strategies slim,full]`: each file is replayed under each strategy, through a
service of its own. Prints a row for each file: the share of its calls that were live.
"""

import argparse
import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from tersely.replay.play import Variant
from tersely.replay.run import ReplayPlan, run_here
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.live_calls.live_calls import LiveCalls
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

    async def count(self: LiveCalls, call: Call) -> LiveCall | None:
        found = await prepare(self, call)
        share.calls += 1
        share.live += found is not None
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--strategies", default=STRATEGIES)
    args = parser.parse_args()
    strategies = args.strategies.split(",")
    print(f"| file | calls | {' | '.join(f'`{name}`' for name in strategies)} |")
    print("|---|---:|" + "---:|" * len(strategies))
    for path in args.files:
        transcript = load_transcript(path)
        shares = [measure(transcript, strategy) for strategy in strategies]
        cells = [f"{share.live / share.calls:.0%}" for share in shares]
        print(f"| {path.stem} | {shares[0].calls:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
