"""``tersely wrap AGENT [arguments]``: start an agent that uses Tersely, and a service if none is running."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from tersely.cli.connection import DEFAULT_URL
from tersely.cli.printing import print_error
from tersely.server.errors import CommandError

KNOCK_SECONDS = 2.0
# The first start creates a database, which takes long on a busy machine.
START_SECONDS = 300.0
STOP_SECONDS = 60.0
TELL_EVERY = 5.0
# What ends a command from outside: `kill`, and a terminal that is closed.
ENDING = (signal.SIGTERM, signal.SIGHUP)
KEY_HEADER = "X-Tersely-Key"
KEY_VARIABLE = "TERSELY_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The start of an agent: variables of its environment, and arguments before the user's own."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def launch_of(agent: str, base: str, key: str | None) -> Launch:
    """Return how to start an agent against the service at ``base``.

    ``key`` is a Tersely key. Agents that support custom headers send it in one. Others get it as their provider key;
    then the service's settings need the provider's own key.
    """
    openai = {"OPENAI_BASE_URL": f"{base}/v1", **({"OPENAI_API_KEY": key} if key else {})}
    match agent:
        case "claude":
            headers = {"ANTHROPIC_CUSTOM_HEADERS": f"{KEY_HEADER}: {key}"} if key else {}
            return Launch(environment={"ANTHROPIC_BASE_URL": base, **headers})
        case "codex":
            provider = f'name = "Tersely", base_url = "{base}/v1", env_key = "OPENAI_API_KEY", wire_api = "responses"'
            if key:  # by the name of a variable: arguments can be read by everybody on the machine
                provider += f', env_http_headers = {{ "{KEY_HEADER}" = "{KEY_VARIABLE}" }}'
            return Launch(
                environment={KEY_VARIABLE: key} if key else {},
                arguments=("-c", "model_provider=tersely", "-c", f"model_providers.tersely={{ {provider} }}"),
            )
        case "gemini":
            return Launch(environment={"GOOGLE_GEMINI_BASE_URL": base, **({"GEMINI_API_KEY": key} if key else {})})
        case "opencode":
            options: dict[str, object] = {"baseURL": f"{base}/v1"}
            if key:
                options["headers"] = {KEY_HEADER: key}
            config = {"provider": {name: {"options": options} for name in ("openai", "anthropic")}}
            return Launch(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})
        case "aider":
            more = {"OPENAI_API_BASE": f"{base}/v1", "ANTHROPIC_API_BASE": base}
            return Launch(environment={**openai, **more})
        case "copilot":
            more = {"COPILOT_PROVIDER_API_KEY": key} if key else {}
            return Launch(environment={"COPILOT_PROVIDER_BASE_URL": f"{base}/v1", **more})
        case _:
            return Launch(environment={**openai, "ANTHROPIC_BASE_URL": base, "GOOGLE_GEMINI_BASE_URL": base})


def wrap(command: list[str], *, url: str | None, key: str | None, upstream: str | None) -> int:
    """Run an agent to its end; its exit code. ``url``: of a service that must run. Raises `CommandError`."""
    if command[0].startswith("-"):
        raise CommandError(f"wrap has no option {command[0]}: `tersely wrap --help` lists them; then the agent follows")
    program = shutil.which(command[0])
    if program is None:
        raise CommandError(f"there is no program {command[0]} on the PATH: install it first")
    for number in ENDING:
        signal.signal(number, _leave)
    with _service(url, upstream) as base:
        launch = launch_of(Path(command[0]).stem, base, key)
        print_error(f"{command[0]} talks to Tersely at {base}; what it says is stored there: {base}/console")
        child = subprocess.Popen(
            [program, *launch.arguments, *command[1:]], env={**_without_proxies(os.environ), **launch.environment}
        )
        with _signals_for(child):
            return child.wait()


@contextlib.contextmanager
def _service(url: str | None, upstream: str | None) -> Iterator[str]:
    """Yield the address of a service: the given one, the default one, or one that is started for this agent."""
    if url is not None:
        base = url.rstrip("/")
        if not _answers(base):
            raise CommandError(f"nothing answers at {base}: start `tersely serve` there, or leave --url out")
        yield base
    elif upstream is not None:
        with _started(0, upstream) as base:
            yield base
    else:
        with _lock("use", fcntl.LOCK_SH) as use, _shared_service(use) as base:
            yield base


@contextlib.contextmanager
def _shared_service(use: int | None) -> Iterator[str]:
    """Yield the address of the default service. If it is started here, it ends with the last agent that uses it."""
    with contextlib.ExitStack() as stack:
        with _lock("start", fcntl.LOCK_EX):  # of agents that start together, one starts the service
            if _answers(DEFAULT_URL):
                base = DEFAULT_URL
            else:
                port = 0 if _is_taken(DEFAULT_URL) else urlsplit(DEFAULT_URL).port or 0
                base = stack.enter_context(_started(port))
                stack.callback(_wait_for_others, use)
        yield base


@contextlib.contextmanager
def _lock(name: str, operation: int) -> Iterator[int | None]:
    """Hold a lock among this user's wraps; None where the directory for temporary files permits none."""
    path = Path(tempfile.gettempdir()) / f"tersely-wrap-{os.getuid()}-{name}.lock"
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(file, operation)
        yield file
    finally:
        os.close(file)


def _wait_for_others(use: int | None) -> None:
    """Wait until no other agent uses the service that was started here."""
    if use is None:
        return
    try:
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print_error("other agents still use this Tersely: it ends with the last of them, or by Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            fcntl.flock(use, fcntl.LOCK_EX)


@contextlib.contextmanager
def _started(port: int, upstream: str | None = None) -> Iterator[str]:
    """Yield the address of a service that is started here."""
    arguments = ["serve", "--port", str(port), *(["--upstream", upstream] if upstream else [])]
    print_error("no Tersely runs yet: starting one that ends with the agent")
    process = subprocess.Popen(
        [sys.executable, "-m", "tersely", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the agent
    )
    try:
        yield _greeted(process)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()


def _greeted(process: subprocess.Popen[str]) -> str:
    """Return the address that a starting service prints first. Raises `CommandError` if it prints none."""
    lines: queue.Queue[str] = queue.Queue()
    output = process.stdout
    assert output is not None

    def read() -> None:
        for line in output:
            lines.put(line)

    threading.Thread(target=read, name="greeting", daemon=True).start()
    for _ in range(int(START_SECONDS / TELL_EVERY)):
        end = time.monotonic() + TELL_EVERY
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=0.2)
                if "serves on " in line:
                    return line.rpartition(" ")[2].strip()
            if process.poll() is not None:
                raise CommandError("the service did not start: run `tersely doctor` to see why")
        print_error("still starting: the first time a database is made")
    raise CommandError("the service did not start in time: run `tersely doctor` to see why")


def _answers(base: str) -> bool:
    """Return whether Tersely serves there."""
    try:
        found = httpx.get(f"{base}/healthz", timeout=KNOCK_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return found.status_code == 200 and found.headers.get("x-tersely-request-id") is not None


def _is_taken(base: str) -> bool:
    try:
        httpx.get(base, timeout=KNOCK_SECONDS, trust_env=False)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        pass
    return True


@contextlib.contextmanager
def _signals_for(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave Ctrl-C to the agent, which gets it from the terminal too, and forward what else ends a command."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        **{number: signal.signal(number, lambda given, _: child.send_signal(given)) for number in ENDING},
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    """End in order, with the service that was started here."""
    raise SystemExit(128 + number)


def _without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Let no proxy of the environment stand between the agent and this machine."""
    given = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    names = ",".join(filter(None, (given, "127.0.0.1", "localhost")))
    return {**environment, "NO_PROXY": names, "no_proxy": names}
