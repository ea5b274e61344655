"""Hands on the context, memory and memos, through a running service: each command does what its REST call does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tersely.cli import program as commands
from tersely.server.errors import CommandError
from tests.cli.conftest import Running, Say
from tests.cli.terminal import ROOT

Typed = Callable[..., str]


@pytest.fixture
def typed(running: Running, session: str, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Return the output of a successful command on the test's session."""
    monkeypatch.setenv("TERSELY_URL", running.url)
    monkeypatch.setenv("TERSELY_SESSION", session)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, stdin: str | bytes | None = None) -> str:
        done = CliRunner().invoke(commands.app, list(arguments), stdin)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


def test_turns_are_dropped_removed_and_undone(typed: Typed, say: Say) -> None:
    say("one", "first", "two", "second", "three", "third")
    assert typed("drop", "t1") == "t1 is hidden from every context.\n"
    assert json.loads(typed("undo", "--json"))["status"] == "undone"
    assert typed("remove", "t2") == "t2 was removed for good.\n"
    assert {each["turn"]: each["status"] for each in json.loads(typed("show", "--json"))} == {
        "t1": "dropped",
        "t3": "undone",
    }
    with pytest.raises(CommandError, match="turn id"):
        typed("drop", "first")


def test_all_turns_or_the_last_ones_are_listed(typed: Typed, say: Say) -> None:
    say(*(f"text {i}" for i in range(50)))
    last = [f"t{i}" for i in range(6, 26)]
    assert [each["turn"] for each in json.loads(typed("show", "--json"))] == last
    assert [each["turn"] for each in json.loads(typed("show", "-n", "2", "--json"))] == ["t24", "t25"]
    assert [each["turn"] for each in json.loads(typed("show", "--all", "--json"))] == [f"t{i}" for i in range(1, 26)]
    lines = typed("show", "-n", "3").splitlines()
    assert len([line for line in lines if " live " in line]) == 3
    assert json.loads(typed("show", "t7", "--json"))["first_seq"] == 13
    assert "text 12" in typed("show", "t7")


def test_messages_are_pinned_and_marked(running: Running, session: str, typed: Typed, say: Say) -> None:
    say("one", "first")

    def stored() -> Any:
        return running.ask("GET", f"/sessions/{session}/messages").json()["items"][0]

    typed("pin", "1")
    assert stored()["pinned"]
    assert json.loads(typed("unpin", "1", "--json"))["pinned"] is False
    assert not stored()["pinned"]
    typed("important", "1")
    assert stored()["priority"] == 75
    assert json.loads(typed("important", "1", "50", "--json"))["priority"] == 50
    with pytest.raises(CommandError):
        typed("pin", "99")


def test_the_context_is_cleared_looked_at_and_configured(typed: Typed, say: Say) -> None:
    say("one", "first")
    assert "messages: " in typed("context")
    assert json.loads(typed("context", "--json"))["turns"][0]["turn"] == "t1"
    assert typed("clear").startswith("The context is empty now: ")
    assert [each["kept"] for each in json.loads(typed("context", "--json"))["turns"]] == ["left_out"]
    assert typed("config", "strategy", "window").startswith("strategy: window\n")
    assert '"context_size": 3' in typed("window", "3")
    assert json.loads(typed("window", "4", "--json"))["strategy"] == {"name": "window", "context_size": 4}
    assert json.loads(typed("config", "epoch", '{"stride": 8}', "--json"))["epoch"] == {"stride": 8}
    assert '"context_size": 4' in typed("config")
    with pytest.raises(CommandError, match="bogus"):
        typed("config", "strategy", "bogus")
    with pytest.raises(CommandError, match="is not a valid command"):
        typed("config", "strategy slim", "x")


def test_the_state_and_the_scratchpad(typed: Typed, say: Say) -> None:
    say("Fix the parser in app/parse.py", "Done.")
    for more in ((), ("--json",)):
        with pytest.raises(CommandError, match="TERSELY_SUMMARIZER_MODEL"):
            typed("rebuild", *more)
    assert typed("scratchpad") == "The scratchpad is empty.\n"
    typed("scratchpad", "--set", "- [ ] one")
    typed("scratchpad", "--append", "-", stdin="- [ ] two")
    assert typed("scratchpad") == "- [ ] one\n- [ ] two\n"
    assert json.loads(typed("scratchpad", "--json"))["text"] == "- [ ] one\n- [ ] two"


def test_memory_is_listed_and_deleted(running: Running, session: str, typed: Typed, tmp_path: Path) -> None:
    made, trim = f"{session}-m", {"name": "trim", "max_context_turns": 1}
    running.ask("POST", "/sessions", json={"id": made, "strategy": trim}).raise_for_status()
    messages = [
        {"role": role, "content": text}
        for i in range(8)
        for role, text in (("user", f"Which zanzibar port {i}?"), ("assistant", f"Port {i} is for zanzibar{i}.py"))
    ]
    running.ask("POST", f"/sessions/{made}/messages", json={"messages": messages}).raise_for_status()
    typed("compress", "-s", made)
    found = json.loads(typed("memory", "--session", made, "--json"))
    assert found
    assert found[0]["session"] == made
    assert json.loads(typed("memory", "zanzibar", "--json"))
    assert made in typed("memory")
    file = tmp_path / "memory.jsonl"
    typed("memory", "--export", str(file))
    assert made in {json.loads(line)["session"] for line in file.read_text().splitlines()}
    with pytest.raises(CommandError, match="day or session"):
        typed("memory", "--forget")
    assert json.loads(typed("memory", "--forget", "--session", made, "--json"))["deleted"] == len(found)
    assert json.loads(typed("memory", "--session", made, "--json")) == []


def test_memos_are_exported_and_deleted_by_their_tags(typed: Typed, session: str, tmp_path: Path) -> None:
    for text in ("first", "second"):
        typed("memos", "--add", text, "--tag", session)
    typed("memos", "--add", "other", "--tag", f"{session}-other")
    file = tmp_path / "memos.jsonl"
    typed("memos", "--export", str(file), "--tag", session)
    assert {json.loads(line)["content"] for line in file.read_text().splitlines()} == {"first", "second"}
    with pytest.raises(CommandError):
        typed("memos", "--forget")
    assert typed("memos", "--forget", "--tag", session) == "2 deleted.\n"
    assert json.loads(typed("memos", "--json", "--tag", f"{session}-other"))[0]["content"] == "other"
    assert json.loads(typed("memos", "--forget", "--all", "--json"))["deleted"] >= 1
    assert json.loads(typed("memos", "--json")) == []


@pytest.mark.parametrize("text", ["use arr[i] and [/] or list[/b] here", "[bold]not bold[/bold]"])
def test_brackets_are_text(typed: Typed, text: str) -> None:
    memo = json.loads(typed("memos", "--add", text, "--json"))[0]
    assert text in typed("memos")
    assert json.loads(typed("memos", "--delete", memo["id"], "--json")) is None
    typed("add", "user", "hi", "-s", "x[/y]")
    assert "x[/y]" in typed("sessions")


def test_a_memo_s_id_leads_nowhere_else(running: Running, session: str, typed: Typed, say: Say) -> None:
    say("one")
    with pytest.raises(CommandError):
        typed("memos", "--delete", f"../sessions/{session}")
    with pytest.raises(CommandError):
        typed("remove", f"../../{session}")
    with pytest.raises(CommandError):
        typed("show", "../../../memos", "--json")
    assert running.ask("GET", f"/sessions/{session}").json()["messages"] == 1


@pytest.mark.parametrize("name", ["", ".", "..", "a\nb", "\udcff"])
def test_names_of_nothing(typed: Typed, name: str) -> None:
    with pytest.raises(CommandError, match="is not a valid name"):
        typed("add", "user", "x", "-s", name)
    with pytest.raises(CommandError, match="is not a valid name"):
        typed("memos", "--delete", name)


def test_export_says_where_to(typed: Typed, session: str, say: Say, tmp_path: Path) -> None:
    say("one")
    file = tmp_path / "a.json"
    assert typed("export", str(file)) == f"{session}: {file.stat().st_size:,} bytes in {file}\n"
    exported = json.loads(typed("export", str(file), "--json"))
    assert exported == {"session": session, "file": str(file), "bytes": file.stat().st_size}
    assert json.loads(typed("export", "--json"))["context"][0]["content"] == "one"
    with pytest.raises(CommandError, match="/nonexistent/x: No such file"):
        typed("export", "/nonexistent/x")


def test_text_that_is_not_utf8_is_refused(typed: Typed) -> None:
    with pytest.raises(CommandError, match="standard input is not UTF-8 text"):
        typed("add", "user", "-", stdin=b"\xff\xfe")
    with pytest.raises(CommandError, match="not UTF-8 text"):
        typed("add", "user", "\udcff")


def test_the_documentation_names_every_command() -> None:
    rows = [line for line in (ROOT / "docs" / "cli.md").read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z]+)[^`]*`", row.split("|")[1])}
    assert named == set(get_command(commands.app).commands)  # type: ignore[attr-defined]
