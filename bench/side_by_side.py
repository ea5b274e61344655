"""Services with different settings that take turns at the same conversations."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from bench import servers
from bench.run import play
from bench.servers import Server

CONNECTIONS: Final = 8


class CallCost(NamedTuple):
    """Of one call: CPU of the event loop's thread and of the other threads of the worker in microseconds, and the
    median time until the reply in milliseconds.
    """

    loop: float
    threads: float
    p50: float

    @property
    def total(self) -> float:
        """CPU in microseconds."""
        return self.loop + self.threads


@contextlib.contextmanager
def running(scratch: Path, environments: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Server, dict[str, Server]]]:
    """A mock model host, and a service with each of the environments."""
    with servers.running([]) as started:
        host = servers.upstream(scratch)
        started.append(host)
        services: dict[str, Server] = {}
        for name, environment in environments.items():
            own = scratch / name
            own.mkdir()
            own.chmod(0o755)
            services[name] = servers.tersely(host, own, environment)
            started.append(services[name])
        yield host, services


def cost(server: Server, plan: str, calls: int, seed: str, *, connections: int = CONNECTIONS) -> CallCost:
    """Play conversations."""
    loop, threads = _cpu_ns(server)
    figures = play(server, plan, connections=connections, seed=seed, more=["--stream", "no", "--requests", str(calls)])
    if figures["errors"]:
        raise RuntimeError(f"{server.name}: {figures['examples'][:2]}")
    loop_after, threads_after = _cpu_ns(server)
    done = int(figures["requests"])
    return CallCost((loop_after - loop) / done / 1e3, (threads_after - threads) / done / 1e3, float(figures["p50_ms"]))


def take_turns(names: Sequence[str], reps: int, measure: Callable[[str, int], CallCost]) -> dict[str, list[CallCost]]:
    """Measure each by its name and the round, in an order that changes."""
    found: dict[str, list[CallCost]] = {name: [] for name in names}
    for rep in range(reps):
        for name in names if rep % 2 else reversed(names):
            found[name].append(measure(name, rep))
        print("  ".join(f"{name} {found[name][-1].total:.0f} us" for name in names), flush=True)
    return found


def print_changes(found: Mapping[str, Sequence[CallCost]], base: str) -> None:
    """Print medians, and the change of CPU against ``base``."""
    for name, costs in found.items():
        loop, threads, p50 = (statistics.median(column) for column in zip(*costs, strict=True))
        pairs = [each.total / other.total for each, other in zip(costs, found[base], strict=True)]
        loops = [each.loop / other.loop for each, other in zip(costs, found[base], strict=True)]
        total = statistics.median(each.total for each in costs)
        print(f"{name}: loop {loop:.0f} us ({statistics.median(loops) - 1:+.1%} against {base}), threads {threads:.0f} "
              f"us, both {total:.0f} us ({statistics.median(pairs) - 1:+.1%}), p50 {p50:.2f} ms")  # fmt: skip


def _cpu_ns(server: Server) -> tuple[int, int]:
    """CPU of the first thread and of the other threads of the worker."""
    first = others = 0
    root = psutil.Process(server.process.pid)
    database = {each.pid for master in server.postmasters() for each in (master, *master.children(recursive=True))}
    for process in (root, *root.children(recursive=True)):
        if process.pid in database:
            continue
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                spent = int((thread / "schedstat").read_text().split()[0])
                if thread.name == str(process.pid):
                    first += spent
                else:
                    others += spent
    return first, others
