"""``tersely serve`` as a process: how it greets, refuses and ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from typing_extensions import override

from tersely.server.host_check import check_hosts_in_background
from tersely.server.run import HEALTH_SECONDS
from tersely.settings import Settings
from tests.conftest import quickest_directory
from tests.support.loops import wait_until
from tests.support.processes import AWAY, greeting, postgres_of, start


@pytest.fixture
def data_dir() -> Iterator[Path]:
    home = quickest_directory()
    with tempfile.TemporaryDirectory(prefix="tersely-serving-", dir=home, ignore_cleanup_errors=True) as parent:
        Path(parent).chmod(0o711)
        directory = Path(parent) / "data"
        yield directory
        for process in postgres_of(directory):
            process.kill()


@contextmanager
def two_workers() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service of two workers, and its address."""
    process = start("--port", "0", "--workers", "2", DATABASE_URL=AWAY)
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(process))
        assert found is not None
        yield process, found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def metrics_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=60).text


def workers_in(metrics: str) -> set[str]:
    """The processes of which the metrics tell."""
    return set(re.findall(r'process_resident_memory_bytes\{worker="(\d+)"\}', metrics))


def test_a_closed_terminal_ends_the_database_too(data_dir: Path) -> None:
    process = start("--port", "0", TERSELY_DATA_DIR=str(data_dir))
    try:
        assert "Tersely serves on" in greeting(process)
        servers = postgres_of(data_dir)
        assert servers
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
        assert psutil.wait_procs(servers, 10)[1] == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_greeting_names_the_port_and_is_the_only_output(workers: str) -> None:
    process = start("--port", "0", "--workers", workers, DATABASE_URL=AWAY)
    try:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", greeting(process))
        assert found is not None
        assert found[1] != "0"
        assert httpx.get(f"{found[0]}/healthz", timeout=60).status_code == 200
        process.send_signal(signal.SIGHUP if workers == "2" else signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "uvicorn" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("TERSELY_OPENAI_BASE_URL", "http://localhost:{port}/v1", "TERSELY_OPENAI_BASE_URL: localhost"),
        ("TERSELY_GEMINI_GCA_BASE_URL", "http://[::1]:{port}", "TERSELY_GEMINI_GCA_BASE_URL: ::1"),
        ("TERSELY_SUMMARIZER_BASE_URL", "http://a:b@127.0.0.1:{port}/v1", "TERSELY_SUMMARIZER_BASE_URL: 127.0.0.1"),
        (
            "TERSELY_UPSTREAMS",
            '{{"mine": {{"dialect": "openai", "base_url": "http://0.0.0.0:{port}/v1"}}}}',
            "base_url of upstreams.mine: 0.0.0.0",
        ),
    ],
)
def test_a_service_is_not_its_own_model_host(setting: str, value: str, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = start("--port", port, DATABASE_URL=AWAY, **{setting: value.format(port=port)})
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert errors.splitlines() == [f"tersely: {name}:{port} is this service itself: name the model host"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_service_that_is_its_model_host_by_another_name_says_so(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    url = f"http://someone:secret@127.0.0.2:{port}/v1"
    # All of 127.0.0.0/8 leads to a service that listens on 0.0.0.0.
    process = start(
        "--host", "0.0.0.0", "--port", port, "--workers", workers,
        DATABASE_URL=AWAY, TERSELY_INSECURE="1", TERSELY_OPENAI_BASE_URL=url,
    )  # fmt: skip
    assert process.stderr is not None
    line = next(line for line in process.stderr if "is a Tersely service" in line)
    process.terminate()
    process.communicate(timeout=60)
    assert json.loads(line)["level"] == "error"
    assert "TERSELY_OPENAI_BASE_URL: 127.0.0.2 is a Tersely service, not a model host" in json.loads(line)["message"]
    assert "secret" not in line


def test_only_configured_hosts_are_asked_and_until_they_answer() -> None:
    asked: list[tuple[str, str | None]] = []

    class Host(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append((self.path, self.headers.get("authorization")))
            self.send_response(502 if len(asked) == 1 else 404)
            self.end_headers()

        @override
        def log_message(self, *args: object, **named: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"127.0.0.1:{server.server_port}/llm"
        # Both settings name one host, which is asked once for both.
        url, other = f"http://user:secret@{root}/v1", f"http://{root}"
        settings = Settings(_env_file=None, openai_base_url=url, anthropic_base_url=other)
        check_hosts_in_background(settings, (0.0, 0.1, 0.2))
        wait_until(lambda: not any(thread.name == "host-check" for thread in threading.enumerate()), 10)
        server.shutdown()
    assert asked == [("/llm/", None)] * 2


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_is_one_line(workers: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = start("--port", port, "--workers", workers, DATABASE_URL=AWAY)
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert out == ""
    assert errors.splitlines() == [f"tersely: port {port} of 127.0.0.1 is in use: choose another one with --port"]


def test_nobody_listens_before_a_worker_serves() -> None:
    """A load balancer goes elsewhere at once, where a connection that nobody accepts would have kept its client."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start("--port", str(port), "--workers", "2", DATABASE_URL=AWAY)
    try:
        refused, end = 0, time.monotonic() + 60
        while time.monotonic() < end:
            try:
                connection = socket.create_connection(("127.0.0.1", port), 1)
            except OSError:
                refused += 1
                time.sleep(0.01)
                continue
            with connection:
                connection.settimeout(30)
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                began = time.monotonic()
                assert b" 200 " in connection.recv(1000)
                assert time.monotonic() - began < 1.5
            break
        assert refused
        assert "Tersely serves on" in greeting(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_killed_workers_are_replaced_at_once_without_being_imported_anew() -> None:
    with two_workers() as (_, url):
        while len(first := workers_in(metrics_of(url))) < 2:
            time.sleep(0.1)
        for pid in first:
            psutil.Process(int(pid)).suspend()
        time.sleep(1.5)  # the supervisor has begun to wait for an answer of theirs
        for pid in first:
            psutil.Process(int(pid)).kill()
        killed_at = time.monotonic()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if len(second := workers_in(metrics_of(url)) - first) == 2:
                    break
            time.sleep(0.05)
        assert time.monotonic() - killed_at < HEALTH_SECONDS / 2
        for pid in second:
            spent = psutil.Process(int(pid)).cpu_times()
            assert spent.user + spent.system < 1.5, "importing everything takes twice that"


@pytest.mark.timeout(300)
def test_the_service_goes_on_when_what_forks_its_workers_is_killed_while_it_starts() -> None:
    with two_workers() as (process, url):
        killed: set[int] = set()
        while len(killed) < 2 and process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in psutil.Process(process.pid).children():
                    if each.pid not in killed and "forkserver" in " ".join(each.cmdline()):
                        each.kill()
                        killed.add(each.pid)
            time.sleep(0.05)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if len(workers_in(metrics_of(url))) == 2:
                    break
            time.sleep(0.1)
        assert process.poll() is None
        assert httpx.get(f"{url}/healthz").status_code == 200


def test_workers_share_the_memory_of_what_was_imported() -> None:
    """A third of theirs at least; a quarter where collections of garbage write to it."""
    with two_workers() as (_, url):
        while len(workers := workers_in(metrics_of(url))) < 2:
            time.sleep(0.1)
        for pid in workers:
            memory = psutil.Process(int(pid)).memory_full_info()
            assert memory.uss < 2 / 3 * memory.rss


def test_metrics_of_two_workers_name_both_processes() -> None:
    with two_workers() as (process, url):
        text = ""
        for _ in range(100):
            text = metrics_of(url)
            if text.count("process_resident_memory_bytes{") == 2:
                break
            time.sleep(0.2)
        workers = workers_in(text)
        assert len(workers) == 2
        assert workers <= {str(each.pid) for each in psutil.Process(process.pid).children(recursive=True)}
        assert re.search(r'^tersely_build_info\{version="[^"]+"\} 1\.0$', text, re.MULTILINE)
        assert re.search(r'^tersely_fail_open_total\{reason="read"\} 0\.0$', text, re.MULTILINE)
        assert "_created" not in text


def test_a_start_that_waits_for_its_database_says_so() -> None:
    """A server that accepts and does not answer stands for one that takes its time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = start("--port", "0", DATABASE_URL=f"postgresql://nobody@127.0.0.1:{port}/none")
        try:
            assert process.stderr is not None
            lines = [json.loads(process.stderr.readline())["message"]]
            assert lines[0].startswith("preparing the database: 3 s so far")
            assert "Tersely serves on" in greeting(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
