"""Start, watch and stop the servers that are measured.

Every server is started by this process, listens on the loopback, is pinned to the first core that this process may
use, and is stopped by its process id. Everything else (mock model host, load, Postgres) gets the remaining cores.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from bench.tool_environments import ensure_installed

BENCH: Final = Path(__file__).resolve().parent
ROOT: Final = BENCH.parent
LITELLM: Final = "litellm[proxy]==1.106.2"
START_LIMIT_S: Final = 120.0
STOP_LIMIT_S: Final = 20.0


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


CORES: Final = _cores()
SERVER_CORES: Final = CORES[:1]
OTHER_CORES: Final = CORES[1:] or CORES


def pin(pid: int, cores: Sequence[int]) -> None:
    """Bind a process to cores where the system can."""
    if cores and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(pid, cores)


class Cpu(NamedTuple):
    """CPU seconds used so far, user and system, with reaped children."""

    server: float
    postgres: float


@dataclass
class Server:
    """One started server."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    postgres_dir: Path | None = None
    """Where to look for the `postmaster.pid` of an embedded Postgres."""
    postgres: list[int] = field(default_factory=list)

    @property
    def chat_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/chat/completions"

    @property
    def messages_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/messages"

    @property
    def responses_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1/responses"

    def postmasters(self) -> list[psutil.Process]:
        """The embedded Postgres's own parent processes; none without one."""
        if self.postgres_dir is None:
            return []
        found = []
        for path in self.postgres_dir.rglob("postmaster.pid"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                process = psutil.Process(int(path.read_text().split()[0]))
                if "postgres" in process.name():
                    found.append(process)
        return found

    def cpu(self) -> Cpu:
        """CPU used by the server's own processes, and by its Postgres."""
        database = _family(self.postmasters())
        with contextlib.suppress(psutil.Error):
            own = _family([psutil.Process(self.process.pid)])
            return Cpu(
                sum(_cpu_s(p) for pid, p in own.items() if pid not in database),
                sum(_cpu_s(p) for p in database.values()),
            )
        return Cpu(0.0, 0.0)

    def memory(self) -> tuple[float, float]:
        """Resident MiB of the server's own processes, and proportional MiB of its Postgres."""
        database = _family(self.postmasters())
        own = _family([psutil.Process(self.process.pid)])
        return (
            sum(_rss_mib(p) for pid, p in own.items() if pid not in database),
            sum(_pss_mib(p) for p in database.values()),
        )

    def held(self) -> tuple[int, int]:
        """Open descriptors of the server's own processes, and backends of its Postgres that serve a client."""
        database = _family(self.postmasters())
        own = _family([psutil.Process(self.process.pid)])
        descriptors = backends = 0
        for pid, process in own.items():
            if pid not in database:
                with contextlib.suppress(psutil.Error):
                    descriptors += process.num_fds()
        for process in database.values():
            with contextlib.suppress(psutil.Error):
                backends += "[local]" in " ".join(process.cmdline()) or "127.0.0.1(" in " ".join(process.cmdline())
        return descriptors, backends

    def pin(self) -> None:
        """The server on its core, its Postgres on the others."""
        database = _family(self.postmasters())
        for pid in _family([psutil.Process(self.process.pid)]):
            pin(pid, OTHER_CORES if pid in database else SERVER_CORES)
        for pid in database:
            pin(pid, OTHER_CORES)

    def stop(self) -> None:
        """Ask politely, then insist; only this process and what it started."""
        family = []
        with contextlib.suppress(psutil.Error):
            family = list(_family([psutil.Process(self.process.pid), *self.postmasters()]).values())
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in psutil.wait_procs(family, timeout=STOP_LIMIT_S / 4)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()


def _family(roots: Sequence[psutil.Process]) -> dict[int, psutil.Process]:
    """Processes and all their living descendants, by id."""
    found: dict[int, psutil.Process] = {}
    for root in roots:
        with contextlib.suppress(psutil.Error):
            for process in (root, *root.children(recursive=True)):
                found[process.pid] = process
    return found


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of all threads, and of the children that ended."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
        return float(_precise_cpu_s(process.pid) or times.user + times.system) + reaped
    return 0.0


def _precise_cpu_s(pid: int) -> float:
    """The process's CPU clock, in nanosecond steps where /proc counts hundredths of a second; 0 if there is none."""
    if sys.platform != "linux":
        return 0.0
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _rss_mib(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(process.memory_info().rss) / 2**20
    return 0.0


def _pss_mib(process: psutil.Process) -> float:
    """Proportional share, so that Postgres's shared buffers count once."""
    with contextlib.suppress(psutil.Error):
        info = process.memory_full_info()
        return float(getattr(info, "pss", info.rss)) / 2**20
    return 0.0


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without other configuration of what is measured."""
    dropped = ("TERSELY_", "DATABASE_", "LITELLM_", "OPENAI_", "PYTHON")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    proxies = {k for k in kept if k.lower().endswith("_proxy")}
    return {k: v for k, v in kept.items() if k not in proxies} | {"PYTHONPATH": str(ROOT)} | dict(extra)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def launch(
    name: str,
    command: Sequence[str],
    *,
    port: int,
    ready: str,
    scratch: Path,
    cores: Sequence[int],
    env: Mapping[str, str] | None = None,
    postgres_dir: Path | None = None,
) -> Server:
    """Start a server and wait until `ready` (a path) answers 200."""
    log = scratch / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(env or {}),
            stdout=out,
            stderr=out,
            stdin=subprocess.DEVNULL,
            # Signals from a terminal or a time limit come here alone; the servers are then stopped in order.
            start_new_session=True,
        )
    pin(process.pid, cores)
    server = Server(name, port, process, log, postgres_dir)
    deadline = time.monotonic() + START_LIMIT_S
    while not _answers(f"http://127.0.0.1:{port}{ready}"):
        if process.poll() is not None or time.monotonic() > deadline:
            server.stop()
            raise RuntimeError(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.1)
    return server


def upstream(scratch: Path) -> Server:
    """The mock model host."""
    port = free_port()
    command = [sys.executable, "-m", "bench.upstream", "--port", str(port)]
    return launch("upstream", command, port=port, ready="/healthz", scratch=scratch, cores=OTHER_CORES)


def set_gap(server: Server, gap_ms: float) -> None:
    """Pause of the mock model host between the events of a stream, in milliseconds."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/_bench/gap?ms={gap_ms}", method="POST", data=b"")
    with urllib.request.urlopen(request, timeout=5):
        pass


def set_delay(server: Server, delay_ms: float) -> None:
    """Set the time that the mock model host takes before it answers, in milliseconds."""
    url = f"http://127.0.0.1:{server.port}/_bench/delay?ms={delay_ms}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST", data=b""), timeout=5):
        pass


def bare(host: Server, scratch: Path) -> Server:
    """The bare passthrough."""
    port = free_port()
    command = [sys.executable, "-m", "bench.bare", "--port", str(port)]
    command += ["--upstream", f"http://127.0.0.1:{host.port}"]
    return launch("bare", command, port=port, ready="/healthz", scratch=scratch, cores=SERVER_CORES)


def tersely(host: Server | int, scratch: Path, env: Mapping[str, str] | None = None, *, module: str = "") -> Server:
    """Tersely with its embedded Postgres, durable writes on, one worker; started by ``module``, if that is given.

    ``host``: the model host, or its port.
    """
    port, upstream_port = free_port(), host if isinstance(host, int) else host.port
    data = scratch / "tersely-data"
    data.mkdir(exist_ok=True)
    settings = {
        "TERSELY_OPENAI_BASE_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "TERSELY_ANTHROPIC_BASE_URL": f"http://127.0.0.1:{upstream_port}/v1",
        "TERSELY_DATA_DIR": str(data),
        "TERSELY_LOG_LEVEL": "warning",
    }
    command = [sys.executable, "-m", module] if module else [str(Path(sys.executable).with_name("tersely"))]
    server = launch(
        "tersely",
        [*command, "serve", "--port", str(port), "--workers", "1"],
        port=port,
        ready="/readyz",
        scratch=scratch,
        cores=SERVER_CORES,
        env=settings | dict(env or {}),
        postgres_dir=data,
    )
    server.pin()
    return server


def ensure_litellm() -> Path:
    """LiteLLM's command, installed into an environment of its own when it is not there yet."""
    return ensure_installed(LITELLM, "litellm") / "litellm"


def litellm(host: Server, scratch: Path) -> Server:
    """LiteLLM's proxy as its documentation advises: one uvicorn worker, only errors logged, no database."""
    command = ensure_litellm()
    port = free_port()
    config = scratch / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        "  - model_name: gpt-4o-mini\n"
        "    litellm_params:\n"
        "      model: openai/gpt-4o-mini\n"
        f"      api_base: http://127.0.0.1:{host.port}/v1\n"
        "      api_key: sk-bench\n"
        "litellm_settings:\n"
        "  set_verbose: false\n"
        "  request_timeout: 600\n"
        "  num_retries: 0\n"
        "general_settings:\n"
        "  disable_spend_logs: true\n"
        "  disable_error_logs: true\n"
    )
    env = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        # No keys to check: neither has Tersely on the loopback.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--config", str(config), "--num_workers", "1"]
    return launch(
        "litellm",
        [str(command), *arguments],
        port=port,
        ready="/health/liveliness",
        scratch=scratch,
        cores=SERVER_CORES,
        env=env,
    )


@contextlib.contextmanager
def scratch_dir() -> Iterator[Path]:
    """A directory for logs and data; readable for the unprivileged user that Postgres runs as under root."""
    path = Path(tempfile.mkdtemp(prefix="tersely-bench-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def running(servers: list[Server]) -> Iterator[list[Server]]:
    """Stop all servers of the list at the end, the last one first, also when this process is told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield servers
    finally:
        for server in reversed(servers):
            server.stop()
