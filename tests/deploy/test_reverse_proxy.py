"""The nginx example in front of a running service: streams, long bodies, and what is not for the world."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.loops import wait_until
from tests.support.services import serve
from tests.support.upstreams import scripted

EXAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "tersely.conf"


@contextmanager
def nginx(port: int, directory: Path) -> Iterator[str]:
    """The example in front of the service at ``port``, without its TLS; the address."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed (Debian: apt-get install nginx-light)")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        own = probe.getsockname()[1]
    text = EXAMPLE.read_text().replace("127.0.0.1:8484", f"127.0.0.1:{port}").replace("443 ssl", f"127.0.0.1:{own}")
    text = re.sub(r"^.*ssl_certificate.*\n", "", text, flags=re.MULTILINE)
    paths = "".join(
        f"{name}_temp_path {directory}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log {directory}/error.log; worker_processes 1;"
        f"events {{}} http {{ access_log off; {paths}\n{text}\n}}"
    )
    directory.chmod(0o755)
    process = subprocess.Popen([program, "-p", directory, "-c", directory / "nginx.conf"], stderr=subprocess.DEVNULL)
    base = f"http://127.0.0.1:{own}"

    def is_up() -> bool:
        try:
            return httpx.get(f"{base}/healthz", timeout=1).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(is_up)
        yield base
    finally:
        process.terminate()
        process.wait(10)


def test_nginx_passes_streams_and_long_bodies_and_hides_metrics(database: Database, tmp_path: Path):
    # The service is known under the proxy's name, so it wants no loopback name.
    with scripted() as model, serve(database, model.url) as service, nginx(service.port, tmp_path) as base:
        words = ["one ", "two ", "three"]
        reply = ScriptedReply(message={"role": "assistant", "content": "".join(words)}, pieces=words, delay=0.7)
        key = model.script("slow", reply)
        body = {"model": "m", "user": key, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        arrivals: list[float] = []
        with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=30) as answer:
            assert answer.status_code == 200
            arrivals.extend(time.monotonic() for line in answer.iter_lines() if any(word in line for word in words))
        assert len(arrivals) >= 3
        assert arrivals[-1] - arrivals[0] > 1.0, "events come as they are made, not all at the end"

        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 5_000_000}]}
        assert httpx.post(f"{base}/v1/chat/completions", content=json.dumps(long), timeout=60).status_code == 200
        assert httpx.get(f"{base}/metrics").status_code == 403
        assert httpx.get(f"{base}/api/sessions").status_code == 200
