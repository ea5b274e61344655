"""Run rounds of faults and print what came of them: ``python -m tests.faults --rounds 1000 --seed 1``.

A signal ends it after the round that is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from tests.faults.rig import NGINX, open_rig
from tests.faults.rounds import run_rounds


async def _run(arguments: argparse.Namespace) -> int:
    began, stopping = time.monotonic(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    async with open_rig(random.Random(arguments.seed)) as rig:
        print(f"logs in {rig.home}; disk {'of its own' if rig.disk else 'NOT covered'}, ", end="")
        print(f"pgbouncer {'there' if rig.pgbouncer else 'NOT covered'}", flush=True)
        summary, compared = await run_rounds(
            rig,
            rounds=arguments.rounds,
            seed=arguments.seed,
            first=arguments.first,
            only=arguments.only,
            tell=lambda line: print(line, flush=True),
            keep=arguments.keep,
            stopping=stopping,
        )
        found = [each for each in summary.rounds if each.errors]
        if found and arguments.keep:
            for log in rig.home.glob("*.log"):
                shutil.copy(log, arguments.keep)
    print(summary.table())
    print(f"whole store: {compared.acknowledged} acknowledged, {'right' if compared.is_right else compared}")
    print(f"seed {arguments.seed}, {time.monotonic() - began:.0f} s")
    return 1 if found or not compared.is_right else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=1, help="number of the first round; a round depends on seed and number"
    )
    parser.add_argument("--only", action="append", default=[], metavar="FAULT", help="this fault only (repeatable)")
    parser.add_argument(
        "--keep",
        type=Path,
        help="a folder for the logs if something was found, and for what happened in rounds that took long",
    )
    arguments = parser.parse_args()
    if NGINX is None:
        print("nginx is not installed (Debian: apt-get install nginx-light)", file=sys.stderr)
        return 2
    return asyncio.run(_run(arguments))


if __name__ == "__main__":
    sys.exit(main())
