"""Every code block of README and docs is run, or checked by the parser of whatever would run it.

- ``curl``: run against a service in front of a scripted model, page by page, README first;
- ``tersely``: parsed by the command line's own parser; ``make``: a target of the Makefile;
- ``TERSELY_*``: a setting; other programs: named in ``OTHER_PROGRAMS``;
- Python: compiled, README's run; TOML, YAML, JSON: parsed.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from tersely.cli.program import app
from tersely.settings import Settings
from tests.cli.conftest import ADMIN_KEY, Running, running
from tests.docs.pages import NAMES, ROOT, Block, blocks

__all__ = ["running"]  # a fixture

SHELL = ("sh", "console")
PARSED = ("sh", "console", "python", "json", "toml", "yaml")
# Text is for trees and maps, ts for the one client in TypeScript, sql for operators' consoles.
SHOWN = ("text", "ts", "sql")
OTHER_PROGRAMS = {
    *(
        "aider",
        "claude",
        "cline",
        "cn",
        "codex",
        "copilot",
        "gemini",
        "llm",
        "mini",
        "opencode",
        "pi",
        "qwen",
    ),  # clients
    *("cd", "echo", "export", "git", "docker", "cat", "kill", "createdb", "psql", "pip"),
    *("npm", "npx", "openapi-python-client", "helm", "kubectl"),
}
COMMAND_VARIABLES = {"TERSELY_URL", "TERSELY_KEY", "TERSELY_SESSION"}
PLACES = ("http://127.0.0.1:8484", "http://localhost:8484")

ALL = [block for name in NAMES for block in blocks(name)]


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the simple commands of a shell block, as words; pipes and redirections end a command."""
    code = re.sub(r"(?m)(^|[ \t]+)# .*$", "", block.code.replace("\\\n", " "))
    lexer = shlex.shlex(code, posix=True, punctuation_chars="();<>|&\n")
    lexer.commenters = ""
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    ended = False
    for token in lexer:
        if token in {"\n", "&&", "||", ";", "&", "|"} or token.strip("\n") == "":
            if words:
                yield words
            words, ended = [], False
        elif set(token) <= {">", "<"}:
            ended = True
        elif not ended:
            words.append(token)
    if words:
        yield words


def simple_commands(block: Block) -> list[list[str]]:
    """Return the commands without assignments in front of them, which are checked."""
    found = []
    for words in commands(block):
        rest = list(words)
        while rest and re.match(r"[A-Z_]+=", rest[0]):
            check_variable(rest.pop(0))
        if rest and rest[0] == "export":
            for each in rest[1:]:
                check_variable(each)
        if rest:
            found.append(rest)
    return found


def check_variable(assignment: str) -> None:
    name = assignment.partition("=")[0]
    if name.startswith("TERSELY_") and name not in COMMAND_VARIABLES:
        assert name.removeprefix("TERSELY_").lower() in Settings.model_fields, name


def parse_tersely(arguments: list[str]) -> None:
    """Parse arguments by the command line's own parser; raises what it raises."""
    command: Any = typer.main.get_command(app)
    context: Any = None
    name: str | None = "tersely"
    while hasattr(command, "resolve_command"):
        assert arguments, "a command is missing"
        context = command.context_class(command, info_name=name, parent=context)
        name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None
    command.make_context(name, list(arguments), parent=context)


def parse_block(block: Block) -> Any:
    """Parse a block by its language's own parser, raise what that raises, and return the result."""
    match block.language:
        case "python":
            tree = ast.parse(block.code, block.place)
            compile(tree, block.place, "exec")
            return tree.body
        case "json":
            return json.loads(block.code)
        case "toml":
            return tomllib.loads(block.code)
        case _:
            return yaml.safe_load(block.code)


def test_blocks_say_their_language() -> None:
    assert [block.place for block in ALL if block.language not in (*PARSED, *SHOWN)] == []


@pytest.mark.parametrize("block", [block for block in ALL if block.language in SHELL], ids=lambda block: block.place)
def test_shell_commands_exist_and_take_their_arguments(block: Block) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    for command in simple_commands(block):
        words = command
        if words[0] == "systemd-run":
            words = words[next(index for index, word in enumerate(words) if word.endswith("/tersely")) :]
        program, arguments = words[0], words[1:]
        if program.rpartition("/")[2] == "tersely":
            parse_tersely([re.sub(r"^\$\w+/|^path/to/", "", each) for each in arguments])
        elif program == "make":
            assert {each for each in arguments if "=" not in each} <= targets, words
        elif program.rpartition("/")[2] == "python":
            assert arguments[0] == "-m", words
            if arguments[1].startswith("tests.clients"):
                assert (ROOT / arguments[1].replace(".", "/")).exists() or (
                    ROOT / (arguments[1].replace(".", "/") + ".py")
                ).exists(), words
        elif program != "curl":
            assert program in OTHER_PROGRAMS, words


@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language in PARSED and block.language not in SHELL],
    ids=lambda block: block.place,
)  # fmt: skip
def test_blocks_can_be_parsed(block: Block) -> None:
    assert parse_block(block), f"{block.place}: the block is empty"


def pages_with_curl() -> list[str]:
    return [name for name in NAMES if any("curl " in block.code for block in blocks(name) if block.language == "sh")]


def test_curl_commands_are_answered(running: Running) -> None:
    failed = []
    for name in pages_with_curl():
        for block in blocks(name):
            if block.language != "sh":
                continue
            for words in simple_commands(block):
                if words[0] != "curl":
                    continue
                here = [word.replace(PLACES[0], running.url).replace(PLACES[1], running.url) for word in words]
                assert here != words, f"{block.place}: not this service"
                here = [word.replace("$TERSELY_ADMIN_KEY", ADMIN_KEY) for word in here]
                done = subprocess.run(
                    [*here, "--silent", "--max-time", "30", "--output", os.devnull, "--write-out", "%{http_code}"],
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                if not done.stdout.startswith("2"):
                    failed.append((block.place, " ".join(words), done.stdout))
    assert failed == []


def test_python_of_the_readme_runs(running: Running, tmp_path: Path) -> None:
    found = [block for block in blocks("README.md") if block.language == "python"]
    assert found
    for block in found:
        code = block.code.replace(PLACES[0], running.url)
        assert code != block.code
        script = tmp_path / "example.py"
        script.write_text(code, encoding="utf-8")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
