"""`tersely wrap` and `tersely doctor`, as a user at a shell runs them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typing_extensions import override

from tersely.cli.commands.doctor import Finding, examine
from tersely.cli.commands.wrap import launch_of
from tersely.store.db.migrations import current_revision
from tests.conftest import TERSELY, Database
from tests.support.services import serve
from tests.support.upstreams import scripted

# An agent that finds its model as the official SDKs do: by their variables.
AGENT = """#!{python}
import os, sys
import anthropic, openai
if "claude" in sys.argv[0]:
    client = anthropic.Anthropic(api_key="none", max_retries=0)
    answer = client.messages.with_raw_response.create(
        model="m", max_tokens=50, messages=[{{"role": "user", "content": sys.argv[1]}}]
    )
else:
    client = openai.OpenAI(api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
    answer = client.chat.completions.with_raw_response.create(
        model="m", messages=[{{"role": "user", "content": sys.argv[1]}}]
    )
print(answer.headers["x-tersely-context"], sys.argv[1:])
sys.exit(7)
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("claude", "qwen"):
        program = directory / name
        program.write_text(AGENT.format(python=sys.executable))
        program.chmod(0o755)
    return directory


# Hosts that refuse at once.
NO_HOSTS = {
    "TERSELY_OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
    "TERSELY_ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
    "TERSELY_GEMINI_BASE_URL": "http://127.0.0.1:1",
}


def run(*arguments: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY", "DATABASE"))}
    given = {**clean, "PATH": f"{path}:{os.environ['PATH']}", "HTTP_PROXY": "http://127.0.0.1:9", **environment}
    return subprocess.run(
        [TERSELY, *arguments], env=given, capture_output=True, text=True, timeout=110, check=False, cwd=path
    )


def test_an_agent_talks_to_a_running_service(database: Database, agents: Path):
    with scripted() as model, serve(database, model.url) as service:
        for name in ("claude", "qwen"):
            done = run("wrap", "--url", service.url, name, "hello", "--help", path=agents)
            assert done.returncode == 7, done.stderr
            # A short session goes up as it is.
            assert done.stdout == "passthrough ['hello', '--help']\n"
            assert service.url in done.stderr
        assert [each.path for each in model.state.received] == ["/v1/messages", "/v1/chat/completions"]


def test_a_service_is_started_for_the_agent_and_ends_with_it(database: Database, agents: Path):
    done = run("wrap", "--upstream", "scripted", "claude", "hello", path=agents, DATABASE_URL=database.dsn)
    assert (done.returncode, done.stdout.startswith("passthrough")) == (7, True), done.stderr
    base = done.stderr.partition("talks to Tersely at ")[2].partition(";")[0]
    assert base.startswith("http://127.0.0.1:")
    refused = run("wrap", "--url", base, "claude", "hello", path=agents)
    assert (refused.returncode, "nothing answers" in refused.stderr) == (1, True)


def test_a_program_that_is_not_there_is_named(agents: Path):
    done = run("wrap", "no-such-agent", path=agents)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "tersely: there is no program no-such-agent on the PATH: install it first",
    )
    wrong = run("wrap", "--port", "8484", "no-such-agent", path=agents)
    assert wrong.returncode == 1
    assert "wrap has no option --port" in wrong.stderr


def test_every_agent_is_pointed_at_the_service_and_given_the_key():
    base, key = "http://127.0.0.1:8484", "tsk_0123456789abcdef_x"
    for agent in ("claude", "codex", "gemini", "opencode", "aider", "qwen", "copilot", "anything"):
        launch = launch_of(agent, base, key)
        assert base in " ".join([*launch.environment.values(), *launch.arguments])
        assert key in " ".join(launch.environment.values())
        assert key not in " ".join(launch.arguments), "other users of the machine can read arguments"
        assert key not in str(launch_of(agent, base, None))


def test_doctor_names_the_problem_and_its_remedy(database: Database, agents: Path, tmp_path: Path):
    with scripted() as model, serve(database, model.url) as service:
        hosts = {
            "TERSELY_OPENAI_BASE_URL": model.url,
            "TERSELY_ANTHROPIC_BASE_URL": model.url.removesuffix("/v1"),
            "TERSELY_GEMINI_BASE_URL": "http://127.0.0.1:1",
        }
        data = {"TERSELY_DATA_DIR": str(tmp_path / "data")}
        well = run(
            "doctor", "--json", "--port", str(service.port), path=agents, DATABASE_URL=database.dsn, **hosts, **data
        )
        assert well.returncode == 0, well.stdout
        found = [(each["state"], each["subject"], each["text"]) for each in json.loads(well.stdout)]
        assert ("ok", "port", f"Tersely serves on {service.port} and is ready") in found
        assert ("ok", "database", f"DATABASE_URL answers, schema {current_revision()}") in found
        assert [state for state, subject, _ in found if subject == "host"] == ["ok", "ok", "warn"]
        taken = run(
            "doctor",
            "--port",
            model.url.split(":")[2].split("/")[0],
            path=agents,
            DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",
            TERSELY_TYPO="1",
            **hosts,
            **data,
        )
    assert taken.returncode == 1
    assert "used by another program" in taken.stdout
    assert "fail  database  DATABASE_URL" in taken.stdout
    assert "TERSELY_TYPO is no setting" in taken.stdout
    assert taken.stdout.count("->") >= 4
    wrong = run("doctor", path=agents, TERSELY_HEARTBEAT="-1")
    assert (wrong.returncode, "TERSELY_HEARTBEAT" in wrong.stdout) == (1, True)


def test_doctor_finds_no_fault_in_a_new_database(agents: Path):
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o711)  # Postgres runs as another user where this one is root
        done = run("doctor", "--json", path=agents, TERSELY_DATA_DIR=f"{directory}/data")
    (found,) = [each for each in json.loads(done.stdout) if each["subject"] == "database"]
    assert (found["state"], "is new: `tersely serve` sets it up" in found["text"]) == ("ok", True)
    assert done.stderr == ""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_sigterm_ends_agent_and_service(database: Database, agents: Path):
    (agents / "sleeper").write_text(f"#!{sys.executable}\nimport time\nprint('up', flush=True)\ntime.sleep(100)\n")
    (agents / "sleeper").chmod(0o755)
    environment = {**os.environ, "PATH": f"{agents}:{os.environ['PATH']}", "DATABASE_URL": database.dsn}
    command = [TERSELY, "wrap", "--upstream", "scripted", "sleeper"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=agents) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0


# An agent that uses its service to the end of its input, then looks whether it still answers.
PATIENT = """#!{python}
import os, sys, urllib.request
base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
print(base, flush=True)
sys.stdin.readline()
print(urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(base + "/healthz").status, flush=True)
"""
# `tersely wrap` with another default port: this machine's own Tersely may have the usual one.
WRAP = """
import sys
from tersely.cli.commands import wrap
wrap.DEFAULT_URL = "http://127.0.0.1:" + sys.argv[1]
sys.exit(wrap.wrap(sys.argv[2:], url=None, key=None, upstream=None))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(base: str) -> bool:
    try:
        return httpx.get(f"{base}/healthz", trust_env=False).is_success
    except httpx.ConnectError:
        return False


@pytest.fixture
def patient(database: Database, agents: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Start a patient agent in a wrap of its own."""
    (agents / "patient").write_text(PATIENT.format(python=sys.executable))
    (agents / "patient").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TERSELY")}
    environment = {**clean, "PATH": f"{agents}:{os.environ['PATH']}", "DATABASE_URL": database.dsn}
    started = []

    def start(port: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WRAP, str(port), "patient"],
            env={**environment, "TMPDIR": str(agents)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=agents,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def finish(process: subprocess.Popen[str]) -> str:
    """Let a patient agent end. Return what its service answered."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_a_service_that_wrap_started_ends_with_the_last_of_its_agents(
    patient: Callable[[int], subprocess.Popen[str]],
) -> None:
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    first = patient(port)
    assert first.stdout is not None
    assert first.stdout.readline() == f"{base}\n"
    second = patient(port)
    assert second.stdout is not None
    assert second.stdout.readline() == f"{base}\n"
    assert finish(first) == "200\n"
    assert first.stderr is not None
    assert any("it ends with the last of them" in line for line in first.stderr)
    assert finish(second) == "200\n"
    assert (first.wait(60), second.wait(60)) == (0, 0)
    assert not answers(base)


def test_a_closed_terminal_ends_the_service_too(patient: Callable[[int], subprocess.Popen[str]]) -> None:
    port = free_port()
    process = patient(port)
    assert process.stdout is not None
    assert process.stdout.readline() == f"http://127.0.0.1:{port}\n"
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) != 0
    assert not answers(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("environment", "files", "error"),
    [
        ({"TERSELY_UPSTREAMS": '{"ollama":'}, {}, "TERSELY_UPSTREAMS: is not valid JSON"),
        ({"TERSELY_LIMITS": "600"}, {}, "TERSELY_LIMITS: Input should be a valid dictionary"),
        ({"TERSELY_PRICES": "/no/such/file"}, {}, "TERSELY_PRICES: /no/such/file cannot be read"),
        ({"TERSELY_SHADOW": "none"}, {}, "TERSELY_SHADOW: shadow must be one of full"),
        ({"TERSELY_STRATEGY": "slm"}, {}, "TERSELY_STRATEGY: strategy must be one of full"),
        ({"TERSELY_EPOCH": '{"high": 9, "low": 10}'}, {}, "TERSELY_EPOCH: epoch.high must be"),
        ({}, {"tersely.toml": b"strategy = full\n"}, "tersely.toml: Invalid value (at line 1, column 12)"),
        ({}, {".env": b"TERSELY_STRATEGY=\xff\n"}, ".env or tersely.toml is not UTF-8 text"),
        ({}, {"tersely.toml": b'[upstreams.a]\ndialect = "openai"\n'}, "TERSELY_UPSTREAMS.a.base_url: Field required"),
    ],
)
def test_doctor_names_what_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    files: dict[str, bytes],
    error: str,
):
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found = [finding for finding in examine(8484) if finding.subject != "version"]
    assert [finding.state for finding in found] == ["fail"]
    assert found[0].text.startswith(error)


def test_a_file_of_settings_that_cannot_be_read_is_one_line(agents: Path):
    (agents / "tersely.toml").write_text("strategy = full\n")
    done = run("serve", "--port", "0", path=agents)
    assert (done.returncode, done.stderr) == (1, "tersely: tersely.toml: Invalid value (at line 1, column 12)\n")


def test_entries_of_files_that_are_no_settings_are_named(agents: Path):
    (agents / ".env").write_text("TERSELY_STRATEGIE=full\nTERSELY_HEARTBEAT=7\nTERSELY_PORT=9000\nOTHER=1\n")
    (agents / "tersely.toml").write_text(
        'cleanup_day = 3\ncache_ttl = 9\ndatabase_url = "postgresql://127.0.0.1:1/x"\n'
    )
    done = run("doctor", "--json", path=agents, **NO_HOSTS)
    warnings = [each["text"] for each in json.loads(done.stdout) if each["subject"] == "settings"]
    assert warnings == [
        "TERSELY_STRATEGIE in .env is no setting: ignored",
        "cleanup_day in tersely.toml is no setting: ignored",
    ]


@pytest.mark.parametrize(
    ("dialect", "path", "right"),
    [
        ("openai", "", "/v1"),
        ("openai", "/v1/chat/completions", "/v1"),
        ("openai", "/v1/v1", "/v1"),
        ("openai", "/api/v1/responses", "/api/v1"),
        ("anthropic", "/v1", ""),
        ("anthropic", "/api/anthropic/v1/messages", "/api/anthropic"),
        ("gemini", "/v1beta", ""),
        ("gemini", "/v1beta/openai", ""),
        ("azure", "/openai/v1", ""),
        ("azure", "/openai/deployments/mine", ""),
        ("openai", "/v1", None),
        ("openai", "/api/paas/v4", None),
        ("openai", "/v1beta/openai", None),
        ("anthropic", "", None),
        ("anthropic", "/anthropic", None),
        ("gemini", "", None),
        ("azure", "", None),
    ],
)
def test_doctor_doubts_base_urls_with_a_version_missing_or_repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dialect: str, path: str, right: str | None
):
    hosts = {"mine": {"dialect": dialect, "base_url": f"http://name:secret@127.0.0.1:1{path}"}}
    found = examine_with(monkeypatch, tmp_path, TERSELY_UPSTREAMS=json.dumps(hosts))
    assert not [each for each in found if "secret" in each.text + each.advice]
    advice = [each.advice for each in found if "base_url of upstreams.mine" in each.advice]
    expected = f"set base_url of upstreams.mine to http://127.0.0.1:1{right}, unless"
    assert [each.startswith(expected) for each in advice] == ([] if right is None else [True])


@pytest.mark.parametrize(("at", "is_doubted"), [("/v1/models", True), ("/models", False)])
def test_doctor_asks_a_host_whether_it_needs_a_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str, is_doubted: bool
):
    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401 if self.path == at else 404)
            self.send_header("date", "no date")
            self.end_headers()

        @override
        def date_time_string(self, timestamp: float | None = None) -> str:
            return "neither"

    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = examine_with(monkeypatch, tmp_path, TERSELY_OPENAI_BASE_URL=url)
        server.shutdown()
    assert ("ok", "openai: 127.0.0.1 answers") in [(each.state, each.text) for each in found]
    assert any(f"set TERSELY_OPENAI_BASE_URL to {url}/v1" in each.advice for each in found) is is_doubted


def test_doctor_names_a_host_that_is_a_tersely_service(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    with scripted() as model, serve(database, model.url) as service:
        found = examine_with(monkeypatch, tmp_path, TERSELY_OPENAI_BASE_URL=f"{service.url}/v1")
    (finding,) = [each for each in found if each.text.startswith("openai: ")]
    assert (finding.state, "is a Tersely service" in finding.text) == ("warn", True)
    assert "TERSELY_OPENAI_BASE_URL" in finding.advice


def test_doctor_names_a_data_directory_below_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    found = examine_with(monkeypatch, tmp_path, TERSELY_DATA_DIR=str(tmp_path / "file" / "data"))
    (finding,) = [each for each in found if each.subject == "disk"]
    assert (finding.state, finding.text) == ("fail", f"{tmp_path / 'file'} is not a directory")


def examine_with(monkeypatch: pytest.MonkeyPatch, directory: Path, **environment: str) -> list[Finding]:
    """The findings of `tersely doctor` with these settings, without a database."""
    monkeypatch.chdir(directory)
    for name, value in {**NO_HOSTS, "DATABASE_URL": "postgresql://127.0.0.1:1/none", **environment}.items():
        monkeypatch.setenv(name, value)
    return list(examine(1))


def test_doctor_tells_that_nobody_has_a_key(database: Database, agents: Path):
    def access() -> tuple[str, str]:
        done = run("doctor", "--json", path=agents, DATABASE_URL=database.dsn, TERSELY_AUTH="keys", **NO_HOSTS)
        (found,) = [each for each in json.loads(done.stdout) if each["subject"] == "access"]
        return found["state"], found["text"] + found["advice"]

    state, text = access()
    assert (state, "tersely keys create" in text) == ("fail", True)
    made = run("keys", "create", "--tenant", "me", path=agents, DATABASE_URL=database.dsn)
    assert access() == ("ok", "every call needs a Tersely key; valid keys: 1")
    key_id = made.stdout.split("_")[1]
    assert run("keys", "revoke", key_id, path=agents, DATABASE_URL=database.dsn).returncode == 0
    assert access()[0] == "fail"
