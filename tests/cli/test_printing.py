"""The output of commands: stored text on terminals and in pipes, and the effect of NO_COLOR."""

from __future__ import annotations

import io
import json
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.cli import printing
from tests.cli.conftest import Running, Say
from tests.cli.terminal import Terminal

EVIL = "\x1b]0;mine\x07\x1b[31mred\x9b1m\u202edrow\r"
SHOWN = r"\x1b]0;mine\x07\x1b[31mred\x9b1m\u202edrow\r"


@given(st.text())
def test_print_keeps_visible_characters_and_escapes_others(text: str) -> None:
    shown = printing.escape_controls(text)
    assert not any(unicodedata.category(each) == "Cc" and each not in "\n\t\r" for each in shown)
    assert "\r" not in shown.replace("\r\n", "")
    if not any(unicodedata.category(each) in {"Cc", "Cf"} for each in text):
        assert shown == text


@given(st.text(st.characters()))
def test_json_is_the_same_text_and_bytes_of_any_encoding(text: str) -> None:
    for encoding in ("utf-8", "ascii"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stdout", stream)
            printing.print_json({"text": text})
        stream.flush()
        written = stream.buffer.getvalue().decode(encoding)
        assert json.loads(written) == {"text": text}
        assert printing.escape_controls(written) == written


@pytest.mark.parametrize("command", [("show", "t1"), ("search", "mine"), ("build",), ("show",)])
def test_stored_text_has_no_power_over_a_terminal(
    running: Running, session: str, say: Say, command: tuple[str, ...]
) -> None:
    say(f"{EVIL} for mine", "yes")
    terminal = running.at_terminal(*command, "-s", session)
    assert terminal.end() == 0
    assert "\x1b]" not in terminal.shown
    assert "\x1b[31m" not in terminal.shown
    if command != ("show",):
        assert SHOWN in terminal.shown
        piped = running.run(*command, "-s", session)
        assert EVIL in piped.out


def test_memos_and_session_ids_are_printed_without_escape_sequences(running: Running, session: str) -> None:
    running.ask("POST", "/memos", json={"content": f"{session} {EVIL}", "tags": []}).raise_for_status()
    terminal = running.at_terminal("memos", session, COLUMNS="160")
    assert terminal.end() == 0
    assert SHOWN in terminal.shown
    assert "\x1b]" not in terminal.shown
    terminal = running.at_terminal("memos", "--delete", EVIL)
    assert terminal.end() == 1
    assert "\x1b" not in terminal.shown


def _compressed(running: Running, session: str, **given: str) -> Terminal:
    terminal = running.at_terminal("compress", "-s", session, **given)
    assert terminal.end() == 0
    return terminal


def test_progress_and_colours_follow_flags_and_environment(running: Running, session: str, say: Say) -> None:
    say("one", "two")
    assert "\x1b[" in _compressed(running, session).shown
    for plain in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown = _compressed(running, session, **plain).shown
        assert "\x1b" not in shown
        assert shown.startswith("compressing ...")
    for arguments in (("sessions",), ("--help",), ("stats", "--nope")):
        terminal = running.at_terminal(*arguments, NO_COLOR="1")
        terminal.end()
        assert terminal.shown
        assert "\x1b" not in terminal.shown
    assert "\x1b" not in running.run("sessions").out


def test_tables_fit_the_terminal_or_their_content(running: Running, session: str, say: Say) -> None:
    long = "Why does the build of the north wind fail since Monday, and who is to mend it before the end of the week?"
    say("Why?", f"So. <terse>{long}</terse>")
    terminal = running.at_terminal("show", "-s", session)
    assert terminal.end() == 0
    head, _, line = re.sub(r"\x1b\[[0-9]*m", "", terminal.shown).splitlines()
    assert re.fullmatch("turn +status +messages +tokens +input +cached +output +in short *", head)
    assert re.fullmatch("t1 +live +2 .* Why does the .*…", line)
    assert max(len(head), len(line)) <= 80
    piped = running.run("show", "-s", session).out
    assert any(line.startswith("t1 ") and line.rstrip().endswith(long) for line in piped.splitlines())
    running.ask("POST", "/memos", json={"content": f"{session} {long}", "tags": []}).raise_for_status()
    assert f"{session} {long}" in running.run("memos", session).out
