"""``tersely add``, ``build`` and the others, straight on the database and through a running service."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tersely.cli import program as commands
from tersely.cli.printing import ago
from tersely.composition.clock import clock
from tersely.fakellm.scripted import run_scripted
from tersely.replay.service import run_service
from tersely.server.errors import CommandError
from tersely.service.common.auth import new_key
from tersely.settings import Settings
from tersely.store.ops import keys
from tests.conftest import Database
from tests.support.stores import open_store


class Ran:
    """The result of a command."""

    def __init__(self, code: int, output: str, error: BaseException | None) -> None:
        self.code = code
        self.output = output
        self.error = error

    @property
    def json(self):
        return json.loads(self.output)


@pytest.fixture
def run(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DATABASE_URL", database.dsn)
    monkeypatch.setenv("TERSELY_URL", "")
    monkeypatch.setenv("COLUMNS", "200")

    async def invoke(*arguments: str, stdin: str | None = None, local: bool = True) -> Ran:
        given = [*arguments, *(["--local"] if local else [])]
        done = await asyncio.to_thread(CliRunner().invoke, commands.app, given, stdin)
        return Ran(done.exit_code, done.stdout, done.exception)

    return invoke


async def test_fifths_commands(run) -> None:
    added = await run("add", "user", "Fix the bug in auth.js")
    assert (added.code, added.output) == (0, "main: message 1, t1\n")
    assert (await run("add", "assistant", stdin="Fixed.\n")).output == "main: message 2, t1\n"
    piped = await run("add", "user", "-", "--pin", "--priority", "90", "--json", stdin="Never touch [bold]main[/bold].")
    assert piped.json == {"first_seq": 3, "last_seq": 3, "turn": "t2"}
    built = await run("build", "--strategy", "full")
    assert built.output.endswith("--- user ---\nNever touch [bold]main[/bold].\n")
    assert (await run("build", "--json")).json["report"]["tokens_after"] > 0
    stats = await run("stats")
    assert stats.output.startswith("Context Manager Stats\n─────────────────────\nTotal tokens used:")
    assert "Messages stored:       3\n" in stats.output
    assert "\x1b" not in stats.output
    assert (await run("stats", "--json")).json["messages"] == 3
    assert "tokens now" in (await run("compress")).output
    assert "Level breakdown" not in (await run("stats", "-s", "main")).output
    await run("config", "strategy", "tiered", "-s", "main")
    levels = (await run("stats", "-s", "main")).output.partition("Level breakdown:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in levels[:4]] == ["Permanent", "Session", "Working", "Volatile"]


async def test_looking_and_undoing(run) -> None:
    await run("add", "user", "Which port?", "-s", "a")
    await run("add", "assistant", "8484", "-s", "a")
    assert (await run("search", "PORT", "-s", "a")).output == (
        "--- messages 1-2 of 2 ---\n[user t1] Which port?\n[assistant t1] 8484\n"
    )
    nothing = await run("search", "zebra", "-s", "a")
    assert (nothing.code, nothing.output) == (1, "No messages found.\n")
    assert (await run("search", "--mode", "tail", "-n", "1", "-s", "a", "--json")).json["total"] == 2
    listed = await run("sessions")
    assert "a" in listed.output
    assert "slim" in listed.output
    assert [each["id"] for each in (await run("sessions", "--json")).json] == ["a"]
    shown = await run("show", "-s", "a")
    assert "in short" in shown.output
    assert "t1" in shown.output
    assert "--- assistant ---\n8484" in (await run("show", "t1", "-s", "a")).output
    assert (await run("undo", "-s", "a")).output == "t1 was taken back.\n"
    again = await run("undo", "-s", "a")
    assert again.code == 1
    assert isinstance(again.error, CommandError)
    assert str(again.error) == "there is no turn to take back"
    assert str((await run("stats", "-s", "none")).error) == "there is no such session"
    assert (await run("search", "x", "--mode", "grep")).code == 2


async def test_transfer_and_memos(run, tmp_path: Path) -> None:
    await run("add", "user", "Which port?", "-s", "a")
    file = tmp_path / "a.json"
    assert (await run("export", str(file), "-s", "a")).code == 0
    assert (await run("import", str(file), "-s", "b c/d")).output == "b c/d: 1 messages in 1 turns\n"
    assert (await run("export", "-s", "b c/d")).output.encode().strip() == file.read_bytes().strip()
    assert isinstance((await run("import", str(tmp_path / "none"))).error, CommandError)
    made = (await run("memos", "--add", "Ports are fixed.", "--tag", "net", "--json")).json[0]
    assert made["tags"] == ["net"]
    assert "Ports are fixed." in (await run("memos", "ports")).output
    assert (await run("memos", "zebra", "--json")).json == []
    assert (await run("memos", "--delete", made["id"])).code == 0
    assert (await run("memos", "--json")).json == []


async def test_a_session_is_filled_and_read_by_commands(run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_scripted() as server:
        done = await run(
            "chat", "--upstream", server.base_url, "-s", "talk", stdin="Hello there\n/message list\n/nope\n/exit\n"
        )
    assert done.code == 0, done.error
    assert "t1 · 2 messages" in done.output
    assert (await run("stats", "-s", "talk", "--json")).json["turns"] == 2


async def test_through_a_running_service(run, database: Database) -> None:
    async with open_store(database) as store:
        text, stored = new_key("north", "", now=clock(), key_id=secrets.token_hex(8), secret=secrets.token_urlsafe(32))
        await keys.add(store, stored)
    settings = Settings(_env_file=None)
    async with run_service(settings, database.dsn, "http://127.0.0.1:9") as url:
        where = ("--url", url, "--key", text)
        assert (await run("add", "user", "hi", *where, local=False)).code == 0
        assert (await run("stats", "--json", *where, local=False)).json["messages"] == 1
        refused = await run("stats", "--url", url, local=False)
        assert "a Tersely key is needed" in str(refused.error)
    assert (await run("stats", "--json", "--key", text)).json["messages"] == 1
    gone = await run("stats", *where, local=False)
    assert "does not answer" in str(gone.error)


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "just now"), (59, "just now"), (60, "1 minute ago"), (7_300, "2 hours ago")]
)
def test_ages_are_printed_in_plain_units(seconds: int, text: str) -> None:
    from datetime import timedelta

    assert ago(timedelta(seconds=seconds)) == text
