"""A failing command prints one line and ends with a code, never with a traceback; no command imports what it does not
need.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from tersely.embedded_postgres import open_embedded_postgres
from tersely.server.embedded_server import serving
from tersely.store.db.migrations import migrate
from tests.cli.conftest import Running
from tests.cli.terminal import ROOT, Ran, environment, run
from tests.conftest import quickest_directory
from tests.support.processes import postgres_of

AWAY = "postgresql://nobody@127.0.0.1:1/none"


def complains(done: Ran) -> str:
    assert done.code == 1
    assert done.out == ""
    assert done.errors.startswith("tersely: ")
    assert len(done.errors.splitlines()) == 1
    return done.errors


@pytest.mark.parametrize(
    ("arguments", "stdin", "error"),
    [
        (("export", "-s", "{session}", "/nonexistent/x"), b"", "/nonexistent/x: No such file or directory"),
        (("import", "/nonexistent/x"), b"", "/nonexistent/x: No such file or directory"),
        (("import", "-"), b"[" * 100_000, "- is not JSON"),
        (("add", "user", "-"), b"\xff\xfe", "standard input is not UTF-8 text (byte 0)"),
        (("add", "user", b"\xff"), b"", "not UTF-8 text"),
        (("memos", "--delete", "../sessions/{session}"), b"", "memo"),
        (("stats", "--url", "ftp://127.0.0.1"), b"", "--url: 'ftp://127.0.0.1' is not an http(s) address"),
        (("stats", "--url", "http://127.0.0.1:99999"), b"", "is not an http(s) address"),
        (("stats", "--url", "http://127.0.0.1:1"), b"", "the service at http://127.0.0.1:1 does not answer"),
        (("stats", "--key", "é"), b"", "--key: not a Tersely key"),
        (("stats", "-s", "nowhere"), b"", "there is no such session"),
    ],
)
def test_an_error_is_one_line(
    running: Running, session: str, arguments: tuple[str | bytes, ...], stdin: bytes, error: str
) -> None:
    running.ask("POST", "/sessions", json={"id": session}).raise_for_status()
    given = [each.replace("{session}", session) if isinstance(each, str) else each for each in arguments]
    assert error in complains(running.run(*given, stdin=stdin))
    assert running.ask("GET", f"/sessions/{session}").status_code == 200


@pytest.mark.parametrize("arguments", [("stats", "--local"), ("keys", "list"), ("migrate",), ("cleanup",)])
def test_a_database_that_is_away(arguments: tuple[str, ...]) -> None:
    error = complains(run(*arguments, DATABASE_URL=AWAY))
    assert "the database does not answer: `tersely doctor` looks why (ConnectionRefusedError)" in error


def test_somebody_else_s_service(session: str) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Welcome!</html>")

        @override
        def log_message(self, *args: object, **named: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert f"the server at {url} is not a Tersely service" in complains(run("stats", "-s", session, "--url", url))
        server.shutdown()


def test_bad_settings_are_refused_by_name() -> None:
    assert "TERSELY_DATABASE_POOL" in complains(run("stats", "--local", TERSELY_DATABASE_POOL="0"))
    assert "DATABASE_URL must begin with postgresql://" in complains(run("keys", "list", DATABASE_URL="mysql://x"))


@pytest.fixture
def frozen() -> Iterator[Path]:
    """The data directory of an embedded Postgres whose processes are stopped."""
    home = quickest_directory()
    with tempfile.TemporaryDirectory(prefix="tersely-frozen-", dir=home, ignore_cleanup_errors=True) as parent:
        Path(parent).chmod(0o711)
        data_dir = Path(parent) / "data"
        with open_embedded_postgres(data_dir, settings={"fsync": "off"}) as server:
            asyncio.run(migrate(server.admin_dsn))
            stopped = postgres_of(data_dir)
            for process in stopped:
                process.suspend()
            try:
                yield data_dir
            finally:
                for process in stopped:
                    process.resume()


def test_commands_end_when_the_embedded_database_is_frozen(frozen: Path) -> None:
    commands = (("keys", "list"), ("stats", "--local"))
    with ThreadPoolExecutor() as pool:  # each waits for seconds
        for ran in pool.map(lambda command: run(*command, TERSELY_DATA_DIR=str(frozen)), commands):
            assert "accepts connections and answers none" in complains(ran)


def test_a_service_that_never_answers_is_not_waited_for(session: str) -> None:
    code = (
        "import sys, httpx, tersely.cli.connection as connection, tersely.cli.program as program;"
        "connection.LIMITS = httpx.Timeout(1); sys.exit(program.main())"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", code, "stats", "-s", session, "--url", url],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            timeout=60,
            check=False,
        )
    error = complains(Ran(code=done.returncode, out=done.stdout.decode(), errors=done.stderr.decode()))
    assert f"the service at {url} has not answered in time (ReadTimeout): look at its log" in error


async def test_an_application_that_does_not_start_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(config: uvicorn.Config) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(uvicorn.Config, "load", fail)
    limit = asyncio.timeout(5)
    with pytest.raises(RuntimeError, match="no such thing"):
        async with limit, serving(object(), path=str(tmp_path / "socket")):  # type: ignore[arg-type]
            pass
    assert not limit.expired()


async def test_an_idle_connection_outlives_that_of_its_client(tmp_path: Path) -> None:
    """`aiohttp` sends requests over connections that have idled for up to 15 s."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for stage in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{stage}.complete"})
            return
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    path = str(tmp_path / "socket")
    async with serving(application, path=path):  # type: ignore[arg-type]
        reader, writer = await asyncio.open_unix_connection(path)
        for pause in (0, 15.5):
            await asyncio.sleep(pause)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        writer.close()


def test_commands_for_a_running_service_do_not_import_it() -> None:
    code = "import sys, tersely.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    assert {"tersely.cli.chat.command", "tersely.cli.commands.sessions"} <= loaded
    heavy = {
        "tersely.composition",
        "tersely.settings",
        "tersely.store",
        "tersely.upstream",
        "tersely.api",
        "tersely.replay",
        "tersely.server.run",
    }
    assert loaded.isdisjoint({*heavy, "fastapi", "mcp", "sqlalchemy", "asyncpg", "uvicorn", "prompt_toolkit"})
