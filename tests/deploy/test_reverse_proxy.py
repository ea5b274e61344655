"""The nginx and Caddy examples in front of a running service, each with its TLS."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tersely.settings import Settings
from tests.conftest import Database
from tests.console.test_access import token_in
from tests.support.loops import wait_until
from tests.support.services import serve
from tests.support.upstreams import scripted

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy"
MAX_BODY = int(Settings.model_fields["max_body"].default)
# What both examples let through.
PROXY_LIMIT = 64 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A proxy's command, and the file of the authority that its certificate is checked against."""

    command: list[str]
    authority: Path


def nginx(port: int, own: int, directory: Path) -> Example:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None or shutil.which("openssl") is None:
        pytest.skip("nginx or openssl is not installed (Debian: apt-get install nginx-light openssl)")
    certificate, key = directory / "fullchain.pem", directory / "privkey.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    text = adapted(
        "nginx/tersely.conf",
        {
            "127.0.0.1:8484": f"127.0.0.1:{port}",
            "listen 443 ssl": f"listen 127.0.0.1:{own} ssl",
            "tersely.example.com": "localhost",
            "/etc/ssl/tersely": str(directory),
        },
    )
    paths = "".join(
        f"{name}_temp_path {directory}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off; pid {directory}/pid; error_log {directory}/error.log; worker_processes 1;"
        f"events {{}} http {{ access_log off; {paths}\n{text}\n}}"
    )
    return Example(command=[program, "-p", str(directory), "-c", str(directory / "nginx.conf")], authority=certificate)


def caddy(port: int, own: int, directory: Path) -> Example:
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("caddy is not installed (Debian: apt-get install caddy)")
    site = adapted(
        "caddy/Caddyfile", {"127.0.0.1:8484": f"127.0.0.1:{port}", "tersely.example.com": f"https://localhost:{own}"}
    )
    # An authority of its own in place of Let's Encrypt.
    options = "admin off\nauto_https disable_redirects\ndefault_bind 127.0.0.1\nlocal_certs\nskip_install_trust"
    (directory / "Caddyfile").write_text(f"{{\n{options}\n}}\n{site}")
    return Example(
        command=[program, "run", "--adapter", "caddyfile", "--config", str(directory / "Caddyfile")],
        authority=directory / "caddy/pki/authorities/local/root.crt",
    )


def adapted(name: str, changes: dict[str, str]) -> str:
    """The example's text with other addresses."""
    text = (EXAMPLES / name).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


@contextmanager
def running(make: Callable[[int, int, Path], Example], port: int, directory: Path) -> Iterator[httpx.Client]:
    """A client of the example in front of the service at ``port``, which checks the example's certificate."""
    directory.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        own = probe.getsockname()[1]
    example = make(port, own, directory)
    process = subprocess.Popen(
        example.command,
        env={**os.environ, "XDG_DATA_HOME": str(directory), "XDG_CONFIG_HOME": str(directory)},
        stderr=subprocess.DEVNULL,
    )
    base = f"https://localhost:{own}"

    def is_up() -> bool:
        assert process.poll() is None, "the proxy does not take the example"
        try:
            context = ssl.create_default_context(cafile=example.authority)
            return httpx.get(f"{base}/healthz", timeout=1, verify=context).status_code == 200
        except (httpx.TransportError, OSError):  # its certificate is not written yet
            return False

    try:
        wait_until(is_up)
        context = ssl.create_default_context(cafile=example.authority)
        with httpx.Client(base_url=base, verify=context, timeout=60, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(params=[nginx, caddy], ids=["nginx", "caddy"])
def example(request: pytest.FixtureRequest) -> Callable[[int, int, Path], Example]:
    made: Callable[[int, int, Path], Example] = request.param
    return made


def test_streams_and_long_bodies_pass_and_metrics_do_not(
    database: Database, tmp_path: Path, example: Callable[[int, int, Path], Example]
):
    # The service is known under a loopback name, so it wants no key.
    with scripted() as model, serve(database, model.url) as service, running(example, service.port, tmp_path) as http:
        words = ["one ", "two ", "three"]
        reply = ScriptedReply(message={"role": "assistant", "content": "".join(words)}, pieces=words, delay=0.7)
        key = model.script("slow", reply)
        body = {"model": "m", "user": key, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
        arrivals: list[float] = []
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            arrivals.extend(time.monotonic() for line in answer.iter_lines() if any(word in line for word in words))
        assert len(arrivals) >= 3
        assert arrivals[-1] - arrivals[0] > 1.0, "events come as they are made, not all at the end"

        long = {"model": "m", "messages": [{"role": "user", "content": "x" * 5_000_000}]}
        assert http.post("/v1/chat/completions", content=json.dumps(long)).status_code == 200
        assert http.get("/api/sessions").status_code == 200
        base = str(http.base_url).rstrip("/")
        for path in ("/metrics", "/%6detrics", "//metrics", "/./metrics", "/metrics?", "/metrics/"):
            hidden = http.get(f"{base}{path}")
            assert hidden.status_code in (307, 403, 404), path
            assert "tersely_" not in hidden.text
            assert hidden.headers.get("location", base).startswith(base)


def test_the_console_knows_its_address_and_its_forms_work(
    database: Database, tmp_path: Path, example: Callable[[int, int, Path], Example]
):
    with scripted() as model, serve(database, model.url) as service, running(example, service.port, tmp_path) as http:
        base = str(http.base_url).rstrip("/")
        page = http.get("/console/sessions")
        assert f"export OPENAI_BASE_URL={base}/v1" in page.text
        cookie = page.headers["set-cookie"]
        assert "; Secure" in cookie
        assert http.post("/api/sessions", json={"id": "s"}).status_code == 201
        token = token_in(http.get("/console/session/hands", params={"id": "s", "act": "delete"}).text)
        form = {"id": "s", "act": "delete", "token": token}
        strange = {"origin": "https://elsewhere.example"}
        assert http.post("/console/session/act", data=form, headers=strange).status_code == 403
        assert http.post("/console/session/act", data=form, headers={"origin": base}).status_code == 303


def test_a_body_that_is_too_long_is_refused_in_the_form_that_clients_read(
    database: Database, tmp_path: Path, example: Callable[[int, int, Path], Example]
):
    with scripted() as model, serve(database, model.url) as service, running(example, service.port, tmp_path) as http:
        json_type = {"content-type": "application/json"}
        own = http.post("/v1/chat/completions", content=b" " * (MAX_BODY + 1), headers=json_type)
        assert own.status_code == 413
        assert own.json()["error"]["code"] == "request_too_large"
        assert status_of_too_long_body(http, PROXY_LIMIT + 1) == 413
        assert http.get("/healthz").status_code == 200


def status_of_too_long_body(http: httpx.Client, size: int) -> int:
    """The answer to a body of ``size`` bytes; 413 also if the connection is closed while it is sent."""
    try:
        return http.post("/v1/chat/completions", content=b" " * size).status_code
    except (httpx.WriteError, httpx.RemoteProtocolError):
        return 413


def test_both_examples_name_the_same_limits():
    texts = [(EXAMPLES / name).read_text() for name in ("nginx/tersely.conf", "caddy/Caddyfile")]
    sizes = [re.search(r"(?:client_max_body_size|max_size) (\d+)(?:m;|MiB\n)", text) for text in texts]
    assert [each and int(each[1]) * 1024**2 for each in sizes] == [PROXY_LIMIT, PROXY_LIMIT]
    assert PROXY_LIMIT > MAX_BODY
    first_byte = int(Settings.model_fields["first_byte_timeout"].default)
    assert f"proxy_read_timeout {first_byte}s" in texts[0]
    assert f"response_header_timeout {first_byte}s" in texts[1]
