"""Clients that common generators make from the OpenAPI document call every REST route, and ``POST /v1/messages``.

The generators run in an environment of their own, which ``make generators`` installs.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import pytest

from tests.conftest import Database
from tests.generated_clients.program import write_program
from tests.generated_clients.steps import Step, read_steps
from tests.support.services import serve
from tests.support.stores import open_store
from tests.support.tenants import tenant
from tests.support.upstreams import scripted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
DOCUMENT = ROOT / "openapi" / "openapi.json"
GENERATORS = ROOT / ".venv" / "generators"

# These routes belong to the operator: a tenant's key may be refused there, in the described shape.
OPERATORS = "/api/admin"
SESSION = "chat"
LARGE_OUTPUT = "a line of a large output\n" * 10_000
SUCCESS = range(200, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A service with something stored for the tenant of ``key``, and a step for each route."""

    url: str
    key: str
    steps: list[Step]


@pytest.fixture(scope="module")
def generators() -> Path:
    """The environment of the generators."""
    if not (GENERATORS / "installed").exists():
        pytest.skip("the client generators are not installed: `make generators` installs them")
    return GENERATORS


@pytest.fixture
async def running(database: Database) -> AsyncIterator[Running]:
    async with open_store(database) as store:
        owner = await tenant(store)
    with scripted() as model:
        summarizer = {"summarizer_model": "m", "summarizer_base_url": model.url, "summarizer_api_key": "k"}
        with serve(database, model.url, auth="keys", **summarizer) as service:
            values = seed(service.url, owner.key)
            steps = read_steps(json.loads(DOCUMENT.read_bytes()), values)
            yield Running(url=service.url, key=owner.key, steps=steps)


def seed(url: str, key: str) -> dict[str, Any]:
    """Store a session, a proxied call, an artifact and a memo; return the values of path parameters."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Read the file"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": LARGE_OUTPUT},
        {"role": "assistant", "content": "It is long."},
        {"role": "user", "content": "Which colour palette?"},
        {"role": "assistant", "content": "Blue. <terse>chose blue</terse>"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "Welcome."},
    ]
    with httpx.Client(base_url=url, headers={"x-tersely-key": key}, timeout=30) as http:
        http.post(f"/api/sessions/{SESSION}/messages", json={"messages": turns}).raise_for_status()
        request = {
            "model": "claude-sonnet-4-5",
            "max_tokens": 64,
            "messages": [{"role": "user", "content": "And red?"}],
        }
        http.post("/v1/messages", json=request, headers={"x-tersely-session": SESSION}).raise_for_status()
        memo = http.post("/api/memos", json={"content": "Ports are fixed.", "tags": ["net"]}).raise_for_status().json()
    return {
        "session_id": SESSION,
        "turn": "t1",
        "seq": 5,
        "number": 1,
        "name": "context_search",
        "memo_id": memo["id"],
        "sha256": sha256(LARGE_OUTPUT.encode()).hexdigest(),
    }


async def test_a_python_client_calls_every_route(generators: Path, running: Running, tmp_path: Path) -> None:
    target = tmp_path / "generated_tersely_client"
    run(
        [
            *(generators / "bin/openapi-python-client", "generate", "--path", DOCUMENT, "--output-path", target),
            *("--meta", "none", "--config", HERE / "python_generator.yml", "--fail-on-warning"),
        ],
        path=generators / "bin",
    )
    sys.path.insert(0, str(tmp_path))
    try:
        package = import_module(target.name)
        made = package.AuthenticatedClient(
            base_url=running.url,
            token=running.key,
            prefix="",
            auth_header_name="X-Tersely-Key",
            timeout=httpx.Timeout(30),
        )
        with made as client:
            for step in running.steps:
                module = import_module(f"{target.name}.api.{step.tag}.{step.operation_id}")
                answer = module.sync_detailed(**arguments(module.sync_detailed, step), client=client)
                check(step, answer.status_code, answer.content)
                if answer.content:
                    assert answer.parsed is not None, step.operation_id
                    described = getattr(answer.parsed, "to_dict", lambda: None)()
                    assert described is None or set(described) == set(json.loads(answer.content)), step.operation_id
    finally:
        sys.path.remove(str(tmp_path))
        for name in [name for name in sys.modules if name.partition(".")[0] == target.name]:
            del sys.modules[name]


async def test_a_typescript_client_compiles_and_calls_every_route(
    generators: Path, running: Running, tmp_path: Path
) -> None:
    modules = generators / "node_modules"
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.ts").write_text(write_program(running.steps, json.loads(DOCUMENT.read_bytes())))
    generate = [modules / ".bin/openapi-typescript", DOCUMENT, "--default-non-nullable=false"]
    run([*generate, "-o", tmp_path / "schema.d.ts"], path=generators / "node/bin")
    options = ["--strict", "--skipLibCheck", "--target", "es2022", "--module", "esnext"]
    options += ["--moduleResolution", "bundler"]
    run([modules / ".bin/tsc", *options, "program.ts"], path=generators / "node/bin", place=tmp_path)
    printed = run(
        [generators / "node/bin/node", "program.js", running.url],
        place=tmp_path,
        variables={"TERSELY_KEY": running.key},
    )
    answers = json.loads(printed)
    assert set(answers) == {step.operation_id for step in running.steps}
    for step in running.steps:
        check(step, answers[step.operation_id]["status"], json.dumps(answers[step.operation_id]["body"]))


def test_the_steps_are_all_rest_routes_and_one_of_the_proxy() -> None:
    document = json.loads(DOCUMENT.read_bytes())
    every = {
        operation["operationId"]
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if path.startswith("/api/")
    }
    steps = read_steps(document, {})
    assert {step.operation_id for step in steps} == every | {"create_message"}
    assert len(every) >= 50


def check(step: Step, status: int, body: object) -> None:
    """Every route succeeds; those of the operator may refuse, and only in a described way."""
    if step.path.startswith(OPERATORS):
        assert str(int(status)) in step.statuses, (step.operation_id, status, body)
    else:
        assert status in SUCCESS, (step.operation_id, status, body)


def arguments(function: Any, step: Step) -> dict[str, Any]:
    """Return the step's values under the names that the generator gave them, the body as its model."""
    names = inspect.signature(function).parameters
    given = {name if name in names else f"{name}_": value for name, value in {**step.path_values, **step.query}.items()}
    if step.body is not None:
        hint = get_type_hints(function)["body"]
        kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        (model,) = [kind for kind in kinds if hasattr(kind, "from_dict")]
        given["body"] = model.from_dict(step.body)
    return given


def run(
    command: list[Any], *, path: Path | None = None, place: Path | None = None, variables: dict[str, str] | None = None
) -> str:
    """Run a command, with ``path`` before the others in PATH; return what it prints."""
    environment = {**os.environ, **(variables or {})}
    if path is not None:
        environment["PATH"] = f"{path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [str(part) for part in command],
        cwd=place, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-3000:]}"
    return done.stdout
