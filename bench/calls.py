"""Count the Python functions that one call of a conversation goes through, and their files.

`python -m bench.calls [--shape agent121k] [--live 256] [--stream] [--traced 1] [--list 40]`: one connection plays a
conversation; the functions that its sixth request calls on the worker's main thread are counted, until the next request
arrives. A shape `a-agent121k` is in Anthropic's format; `r-agent121k` names the last reply instead of its history. With
`--traced` this share of the calls is exported to a collector of OpenTelemetry.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench import servers
from bench.run import play
from tersely.api.transport.protocol import DeadlineProtocol
from tersely.cli.program import main as tersely
from tests.support.otlp import receiver

COUNTED: Final = 6
OUT: Final = "BENCH_CALLS_OUT"


def count_calls(out: Path) -> None:
    """Count Python calls from now on, request by request; write those of the counted request to ``out``."""
    requests = 0
    found: Counter[tuple[str, str]] = Counter()

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal requests
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "on_url" and code.co_filename.endswith("transport/protocol.py"):
            requests += 1
            if requests == COUNTED + 1:
                sys.setprofile(None)
                rows = [[file, name, count] for (file, name), count in found.most_common()]
                out.write_text(json.dumps(rows))
                return
            found.clear()
        name = code.co_qualname
        if code.co_filename == "<string>" and "self" in frame.f_locals:  # a method that a dataclass has generated
            name = f"{type(frame.f_locals['self']).__name__}.{code.co_name}"
        found[code.co_filename, name] += 1

    sys.setprofile(on_event)


def serve() -> None:
    """Run the service in this process, and count."""
    begin = DeadlineProtocol.on_url
    out = Path(os.environ[OUT])

    def on_url(self: DeadlineProtocol, url: bytes) -> None:
        if url.startswith(b"/v1/") and sys.getprofile() is None and not out.exists():
            count_calls(out)
        begin(self, url)

    DeadlineProtocol.on_url = on_url  # type: ignore[method-assign]
    sys.exit(tersely())


def measure(
    scratch: Path, shape: str, live: str, *, stream: bool, traced: float | None = None
) -> list[tuple[str, str, int]]:
    """Return file, function and number of calls of the sixth request of a conversation."""
    out = scratch / "calls.json"
    settings = {"TERSELY_LIVE_SESSIONS": live, OUT: str(out)}
    with servers.running([]) as started, receiver() as collector:
        if traced is not None:
            settings["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
            settings["OTEL_TRACES_SAMPLER"] = "parentbased_traceidratio"
            settings["OTEL_TRACES_SAMPLER_ARG"] = str(traced)
        started.append(servers.upstream(scratch))
        started.append(servers.tersely(started[0], scratch, settings, module="bench.calls"))
        count = COUNTED + 1
        more = ["--stream", "yes" if stream else "no", "--requests", str(count)]
        figures = play(started[1], f"{shape}-34", connections=1, seed="calls", more=more)
        if figures["errors"]:
            raise RuntimeError(str(figures["examples"]))
    return [(file, name, count) for file, name, count in json.loads(out.read_text())]


def main() -> None:
    """Command line."""
    if OUT in os.environ:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="agent121k")
    parser.add_argument("--live", default="256")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--traced", type=float, help="trace this share of the calls: 0 to 1")
    parser.add_argument("--list", type=int, default=0, help="show so many functions")
    args = parser.parse_args()
    with servers.scratch_dir() as scratch:
        rows = measure(scratch, args.shape, args.live, stream=args.stream, traced=args.traced)
    print(f"{sum(count for _, _, count in rows)} Python calls in {len({file for file, _, _ in rows})} files")
    own = [row for row in rows if "/tersely/" in row[0]]
    print(f"of Tersely: {sum(count for _, _, count in own)} calls in {len({file for file, _, _ in own})} files")
    for file, name, count in rows[: args.list]:
        print(f"{count:5} {name:60} {file.rpartition('site-packages/')[2].rpartition('/app/')[2]}")


if __name__ == "__main__":
    main()
