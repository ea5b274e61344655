"""Install a program, serve Tersely for it, run its commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from string import Template
from typing import BinaryIO

import psutil

from tests.clients.checks import Outcome, look
from tests.clients.program import FILLER, Program, Step
from tests.clients.relay import Relay, relaying
from tests.conftest import TERSELY

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
NOWHERE = "http://127.0.0.1:9"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
SILENCE = 4.0
"""Seconds after which a program on a terminal is taken to wait for its user."""
SERVES = re.compile(r"Tersely serves on (\S+)\n")
# Both with Tersely's own words and tools from the first request on, so that a client meets them at every call.
DEFAULT = '{"instructions_at": 0}'
SMALL = '{"high": 2000, "low": 700, "instructions_at": 0}'


def install(program: Program, place: Path) -> None:
    """Into ``place``, by the ordinary client of its registry."""
    place.mkdir(parents=True, exist_ok=True)
    if program.npm:
        _run(["npm", "init", "--yes"], place)
        node = (f"node@{program.node}",) if program.node else ()
        _run(["npm", "install", "--no-audit", "--no-fund", *program.npm, *node], place)
    if program.pip:
        _run([sys.executable, "-m", "venv", str(place / "venv")], place)
        _run([str(place / "venv/bin/python"), "-m", "pip", "install", "--quiet", *program.pip], place)
    if program.setup:
        _run(["bash", "-c", program.setup], place)


def installed_version(program: Program, place: Path) -> str:
    """The version of a program's first package in ``place``."""
    if program.npm:
        described = json.loads((place / "node_modules" / program.package / "package.json").read_bytes())
        return str(described["version"])
    name = program.package.partition("[")[0]
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    done = subprocess.run([str(place / "venv/bin/python"), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _run(command: list[str], place: Path) -> None:
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]} {done.stderr[-2000:]}")


async def run(program: Program, installed: Path, place: Path, *, is_small: bool) -> Outcome:
    """All commands of a program against a Tersely of its own, and what came of it."""
    shutil.rmtree(place, ignore_errors=True)
    home, work = place / "home", place / "work"
    home.mkdir(parents=True)
    work.mkdir()
    outcome = Outcome(
        program=program.name, version=installed_version(program, installed), variant="small" if is_small else "auto"
    )
    log = place / "tersely.log"
    async with (
        serving(place / "data", log, SMALL if is_small else DEFAULT) as url,
        relaying(url) as relay,
    ):
        env = _environment(program, installed, home, work, relay.url)
        for name, content in program.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(content).safe_substitute(env))
        await _prepare(work, env)
        try:
            for number, step in enumerate(program.steps, 1):
                relay.step = number
                await _take(outcome, step, number, place, work, env | {"ASK": step.ask})
        finally:
            _end_daemons(home)
        await asyncio.sleep(0.5)
        await look(outcome, program, url, relay.seen, log, is_small=is_small)
        _keep(relay, place)
    return outcome


def _environment(program: Program, installed: Path, home: Path, work: Path, url: str) -> dict[str, str]:
    """Nothing of the caller's own, and no way out but the loopback."""
    own = {
        "PATH": f"{installed}/node_modules/.bin:{installed}/venv/bin:{os.environ['PATH']}",
        "HOME": str(home),
        "WORK": str(work),
        "URL": url,
        "LIB": str(installed),
        "SCRIPTS": str(SCRIPTS),
        "FILLER": FILLER,
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "NO_COLOR": "1",
        "TMPDIR": str(home),
        "NODE_PATH": f"{installed}/node_modules",
    }
    own |= dict.fromkeys(PROXIES, NOWHERE) | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    return own | {name: Template(value).safe_substitute(own) for name, value in program.env.items()}


async def _prepare(work: Path, env: Mapping[str, str]) -> None:
    (work / "README.md").write_text("A folder to try things out in.\n")
    for command in (
        "git init -q",
        "git config user.email a@b.c && git config user.name A",
        "git add . && git commit -qm start",
    ):
        done = await asyncio.create_subprocess_shell(command, cwd=work, env=dict(env))
        await done.wait()


async def _take(outcome: Outcome, step: Step, number: int, place: Path, work: Path, env: Mapping[str, str]) -> None:
    output = place / f"step{number}.txt"
    started = time.monotonic()
    code = await (_on_terminal if step.keys else _in_shell)(step, output, work, env)
    text = output.read_text(errors="replace")
    took = time.monotonic() - started
    if code != 0:
        outcome.faults.append(f"step {number} ended with {code} after {took:.0f} s: {text[-400:]!r}")
    outcome.faults += [f"step {number}: {words!r} is not in its output" for words in step.expects if words not in text]
    if "<terse>" in text:
        outcome.faults.append(f"step {number}: a tag was shown")


async def _in_shell(step: Step, output: Path, work: Path, env: Mapping[str, str]) -> int | None:
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", step.command, cwd=work, env=dict(env), stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return await _end(process, step.limit)


async def _on_terminal(step: Step, output: Path, work: Path, env: Mapping[str, str]) -> int | None:
    """Type each line once the program has been silent for a while, as a user would."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f"stty rows 50 cols 160; {step.command}", cwd=work, env=dict(env), stdin=theirs, stdout=theirs,
        stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    with output.open("wb") as file:
        await _listen(ours, file, "", step.limit)
        for line in step.keys:
            os.write(ours, line.encode())
            await asyncio.sleep(1)
            os.write(ours, b"\r")
            await _listen(ours, file, step.answer, step.limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        await _end(process, 10)
    os.close(ours)
    return 0


async def _listen(terminal: int, file: BinaryIO, answer: str, limit: float) -> None:
    """Until the program has said ``answer`` and then nothing for a while."""
    end = time.monotonic() + limit
    last, received = time.monotonic(), b""
    while time.monotonic() < end and (
        not received or answer.encode() not in received or time.monotonic() < last + SILENCE
    ):
        with contextlib.suppress(BlockingIOError, OSError):
            if read := os.read(terminal, 65536):
                file.write(read)
                received += read
                last = time.monotonic()
                # What terminals are asked for: where the cursor is, and what they are.
                if b"\x1b[6n" in read:
                    os.write(terminal, b"\x1b[1;1R")
                if b"\x1b[c" in read:
                    os.write(terminal, b"\x1b[?62;c")
        await asyncio.sleep(0.05)


async def _end(process: asyncio.subprocess.Process, limit: float) -> int | None:
    try:
        return await asyncio.wait_for(process.wait(), limit)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        return None


def _end_daemons(home: Path) -> None:
    """End what the program left running: all that has this home."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("HOME") == str(home):
                process.kill()


def _keep(relay: Relay, place: Path) -> None:
    """Keep the recorded traffic, for whoever looks into a fault."""
    folder = place / "wire"
    folder.mkdir()
    for number, seen in enumerate(relay.seen, 1):
        head = f"step {seen.step}: {seen.method} {seen.target} -> {seen.status}\n{dict(seen.headers)}\n".encode()
        (folder / f"{number:03}.txt").write_bytes(head + seen.body + b"\n\n" + seen.reply)


@asynccontextmanager
async def serving(data: Path, log: Path, epoch: str) -> AsyncIterator[str]:
    """`tersely serve --upstream scripted` with a database of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TERSELY_", "DATABASE_"))}
    env = kept | {"TERSELY_DATA_DIR": str(data), "TERSELY_EPOCH": epoch}
    command = [TERSELY, "serve", "--port", "0", "--upstream", "scripted"]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdout=file, stderr=file)
        try:
            yield await _address(log, process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(log: Path, process: asyncio.subprocess.Process) -> str:
    """Return its address, once it says that it serves."""
    for _ in range(1200):
        if found := SERVES.search(log.read_text(errors="replace")):
            return found[1]
        if process.returncode is not None:
            break
        await asyncio.sleep(0.1)
    raise RuntimeError(f"Tersely did not start: {process.returncode}")
