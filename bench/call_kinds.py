"""Measure what the calls of recorded conversations cost, by how they were prepared.

`python -m bench.call_kinds FILE ... [--strategy slim]`: each file is replayed twice through a service, one conversation
at a time; of the second time, the CPU of the service's process from the arrival of a call to that of the next is shown:
of calls that continued a live session, of those that started an epoch from one, and of those whose history was read
whole.
"""

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from bench import servers
from bench.recorded import replay
from tersely.api.transport.protocol import DeadlineProtocol
from tersely.cli.program import main as tersely
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.live_calls.live_calls import LiveCalls
from tersely.service.proxy.preparing.stages import MatchedCall

OUT: Final = "BENCH_CALL_KINDS_OUT"


class Cost(NamedTuple):
    """The kind of a call, and its CPU in milliseconds."""

    kind: str
    cpu: float


class Watch:
    """Notes the cost of each call of a service that serves one at a time; writes the costs when it is asked to."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._costs: list[Cost] = []
        self._since: int | None = None
        self.kind = ""

    def start(self) -> None:
        """Note that a call arrives."""
        self.end()
        self._since, self.kind = time.process_time_ns(), "reads its whole history"

    def end(self) -> None:
        """Note that the last call is done."""
        if self._since is not None:
            self._costs.append(Cost(self.kind, (time.process_time_ns() - self._since) / 1e6))
            self._since = None

    def write(self) -> None:
        """Write the costs so far, and forget them."""
        self.end()
        self._out.write_text(json.dumps(self._costs))
        self._costs.clear()


def serve() -> None:
    """Run the service in this process, and watch it."""
    watch = Watch(Path(os.environ[OUT]))
    begin, prepare = DeadlineProtocol.on_url, LiveCalls.prepare

    def on_url(self: DeadlineProtocol, url: bytes) -> None:
        if url.startswith(b"/v1/"):
            watch.start()
        elif url.startswith(b"/readyz"):
            watch.write()
        begin(self, url)

    async def note(self: LiveCalls, call: Call) -> LiveCall | MatchedCall | None:
        found = await prepare(self, call)
        if isinstance(found, LiveCall):
            watch.kind = "live"
        elif found is not None:
            watch.kind = "starts an epoch from a live session"
        return found

    DeadlineProtocol.on_url = on_url  # type: ignore[method-assign]
    LiveCalls.prepare = note  # type: ignore[method-assign]
    sys.exit(tersely())


def measure(path: Path, strategy: str) -> list[Cost]:
    """Replay a file twice; the costs of the second time."""
    with servers.scratch_dir() as scratch, servers.running([]) as started:
        out, port = scratch / "costs.json", servers.free_port()
        server = servers.tersely(port, scratch, {OUT: str(out)}, module="bench.call_kinds")
        started.append(server)
        for _ in range(2):
            replay(path, server, port, "--parallel", "1", strategy=strategy)
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/readyz", timeout=5).close()
        return [Cost(*each) for each in json.loads(out.read_text())]


def show(name: str, costs: list[Cost]) -> None:
    """Print the costs of a file by kind."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for each in costs:
        by_kind[each.kind].append(each.cpu)
    total = sum(each.cpu for each in costs)
    for kind, found in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        print(f"| {name} | {kind} | {len(found)} | {statistics.median(found):.1f} ms | {sum(found) / total:.0%} |")


def main() -> None:
    """Command line."""
    if OUT in os.environ:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--strategy", default="slim")
    args = parser.parse_args()
    print("| file | call | calls | median | share |")
    print("|---|---|---:|---:|---:|")
    for path in args.files:
        show(path.stem, measure(path, args.strategy))


if __name__ == "__main__":
    main()
