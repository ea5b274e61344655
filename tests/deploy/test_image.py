"""The image, built with buildah: in it the service answers a call, with its own Postgres, as a user without rights.

The base is pulled, or is the one in buildah's storage that TERSELY_TEST_BASE_IMAGE names.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
BASE = "TERSELY_TEST_BASE_IMAGE"
PULL_SECONDS = 60
# Works without rights of a kernel's: no overlays, no namespaces.
ENVIRONMENT = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}


def buildah(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run buildah; what it prints goes into the answer."""
    return subprocess.run(
        ["buildah", *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def base_image() -> str:
    """The base image, which is in buildah's storage now; the test is skipped where it cannot be."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed: the image is not built")
    if os.environ.get(BASE):
        return os.environ[BASE]
    # buildah pulls by tag or by digest, not by both.
    found = re.search(r"^ARG PYTHON_IMAGE=(\w+):\S+(@\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    image = f"docker.io/library/{found[1]}{found[2]}"
    try:
        is_there = buildah("pull", image, timeout=PULL_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        is_there = False
    if not is_there:
        pytest.skip(f"{image} cannot be pulled, and {BASE} names no other base: the image is not built")
    return image


def pip_files() -> list[str]:
    """The configuration that pip needs to reach its index from here, as files."""
    config = configparser.ConfigParser(interpolation=None)
    config.read("/etc/pip.conf")
    found = [Path("/etc/pip.conf"), Path(config.get("global", "cert", fallback="/nowhere"))]
    return [str(file) for file in found if file.is_file()]


@pytest.fixture(scope="module")
def container() -> Iterator[str]:
    """A working container of the image that the Dockerfile gives."""
    base = base_image()
    given = ["--network", "host", "--build-arg", f"PYTHON_IMAGE={base}", "-t", "localhost/tersely-test"]
    for file in pip_files():
        given += ["--volume", f"{file}:{file}:ro"]
    built = buildah("build", *given, str(ROOT), timeout=600)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    started = buildah("from", "--pull-never", "localhost/tersely-test")
    assert started.returncode == 0, started.stderr
    name = started.stdout.strip()
    yield name
    buildah("rm", name)
    buildah("rmi", "localhost/tersely-test")


def test_the_image_serves_calls_as_a_user_without_rights(container: str) -> None:
    version = buildah("run", "--user", "10001", container, "--", "tersely", "--version")
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version.stdout), version.stderr
    port = free_port()
    command = ["tersely", "serve", "--upstream", "scripted", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(
        ["buildah", "run", "--user", "10001", container, "--", "env", "TERSELY_AUTH=off", *command],
        env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            wait_until_ready(http, process)
            request = {"model": "gpt-4o", "messages": [{"role": "user", "content": "Hello"}]}
            answer = http.post("/v1/chat/completions", json=request)
            assert answer.status_code == 200, answer.text
            session = answer.headers["x-tersely-session"]
            assert http.get(f"/api/sessions/{session}/messages").json()["items"][0]["role"] == "user"
            assert http.get("/docs").status_code == 200
            assert http.get("/console", follow_redirects=True).status_code == 200
    finally:
        stop(process)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_ready(http: httpx.Client, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, process.stdout and process.stdout.read()
        try:
            if http.get("/readyz").json().get("database") == "ready":
                return
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    raise AssertionError("the service in the container was not ready within 120 s")


def stop(process: subprocess.Popen[str]) -> None:
    """End the service by its own signal, then whatever is left of what was started.

    buildah reaps the container's processes late, or not at all: any of them may be gone or a zombie at each step.
    """
    family = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    for each in family:
        with suppress(psutil.Error):
            if "serve" in each.cmdline():
                each.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for each in family:
        with suppress(psutil.Error):
            each.kill()
    if process.stdout is not None:
        process.stdout.close()
