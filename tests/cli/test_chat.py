"""``tersely chat`` at a terminal and from a pipe, through a running service."""

from __future__ import annotations

import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.cli.conftest import Running, Say
from tests.cli.terminal import CTRL_C, CTRL_D, ENTER, UP, Terminal
from tests.conftest import Database

# A prompt begins with telling the terminal how pasted text is to be marked.
PROMPT = "\x1b[?2004h"
LONG = "word " * 400
SAID = {"role": "assistant", "content": LONG}


def chat(running: Running, session: str, *arguments: str, **given: str) -> Terminal:
    """A chat that waits for its first line."""
    terminal = running.at_terminal("chat", "-s", session, *arguments, **given)
    terminal.wait_for(PROMPT)
    return terminal


def test_ctrl_c_forgets_the_line_and_then_leaves(running: Running, session: str) -> None:
    terminal = chat(running, session)
    terminal.type("half a thou", CTRL_C)
    terminal.wait_for(PROMPT)
    terminal.type("whole", ENTER)
    terminal.wait_for("whole")
    terminal.wait_for(PROMPT)
    terminal.type(CTRL_C)
    assert terminal.end() == 0
    texts = [m["raw"]["content"] for m in running.ask("GET", f"/sessions/{session}/messages").json()["items"]]
    assert texts[0] == "whole"


def test_chat_prompt_names_session_and_commands(running: Running, session: str) -> None:
    terminal = running.at_terminal("chat", "-s", session, "--model", "some-model")
    greeting = terminal.wait_for("/exit leaves.")
    assert f"Session {session}, model some-model." in greeting
    assert "/help lists the commands" in greeting
    terminal.wait_for(f"{session}>")
    terminal.type("/help", ENTER)
    terminal.wait_for("/exit                     leave the chat")
    terminal.wait_for(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_d_leaves(running: Running, session: str) -> None:
    terminal = chat(running, session)
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_ctrl_c_stops_a_reply_and_the_chat_continues(running: Running, session: str) -> None:
    slow = ScriptedReply(message={"role": "assistant", "content": LONG}, delay=0.2)
    model = running.script(slow, ScriptedReply(message={"role": "assistant", "content": "at once"}))
    terminal = chat(running, session, "--model", model)
    terminal.type("at length", ENTER)
    terminal.wait_for("word word")
    terminal.type(CTRL_C)
    terminal.wait_for("[stopped]", 5)
    terminal.wait_for(PROMPT)
    terminal.type("shortly", ENTER)
    terminal.wait_for("at once")
    terminal.wait_for(PROMPT)
    terminal.type("/exit", ENTER)
    assert terminal.end() == 0


def test_without_a_service_replies_stream_too(running: Running, session: str, database: Database) -> None:
    slow = ScriptedReply(message={"role": "assistant", "content": LONG}, delay=0.2)
    given = {"TERSELY_URL": "", "DATABASE_URL": database.dsn}
    terminal = chat(running, session, "--model", running.script(slow), "--upstream", running.upstream, **given)
    terminal.type("at length", ENTER)
    terminal.wait_for("word word")
    terminal.type(CTRL_C)
    terminal.wait_for("[stopped]", 5)
    terminal.wait_for(PROMPT)
    terminal.type("/message list", ENTER)
    assert "error" not in terminal.wait_for("t1")
    terminal.wait_for(PROMPT)
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_typed_lines_come_back_from_the_history(running: Running, session: str) -> None:
    terminal = chat(running, session)
    terminal.type("/session scratchpad", ENTER)
    terminal.wait_for("The scratchpad is empty.")
    terminal.wait_for(PROMPT)
    terminal.type(UP, ENTER)
    terminal.wait_for("The scratchpad is empty.")
    terminal.wait_for(PROMPT)
    terminal.type(CTRL_C)
    assert terminal.end() == 0


def test_control_characters_of_a_reply_are_made_harmless(running: Running, session: str) -> None:
    model = running.script(ScriptedReply(message={"role": "assistant", "content": "\x1b]0;mine\x07\x1b[31mred"}))
    terminal = chat(running, session, "--model", model)
    terminal.type("hi", ENTER)
    before = terminal.wait_for(r"\x1b]0;mine\x07\x1b[31mred")
    assert "\x1b]0;mine" not in before + terminal.shown


def test_a_context_taller_than_the_terminal_is_opened(running: Running, session: str, say: Say, tmp_path) -> None:
    say("\n".join(f"line {i}" for i in range(60)))
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "opened: $(grep -c ^line.[0-9] "$1")"\n')
    editor.chmod(0o755)
    terminal = chat(running, session, EDITOR=str(editor))
    terminal.type("/context show", ENTER)
    assert "line 59" not in terminal.wait_for("opened: 60")
    terminal.type("/context window 3", ENTER)
    terminal.wait_for("recent_turns")


@pytest.mark.parametrize("program", ["", "/no/such/program"])
def test_text_is_printed_without_an_editor(running: Running, session: str, say: Say, program: str) -> None:
    say("\n".join(f"line {i}" for i in range(60)))
    terminal = chat(running, session, EDITOR=program or "cat")
    terminal.type("/context show", ENTER)
    printed = terminal.wait_for("line 59")
    assert printed.index("line 0") < printed.index("line 58")


def test_a_new_chat_can_be_configured_before_its_first_message(running: Running, session: str) -> None:
    done = running.run("chat", "-s", session, stdin=b"/config strategy trim\n/context\n")
    assert done.code == 0, done.errors
    assert "strategy: trim" in done.out
    assert "strategy trim, epoch" in done.out
    done = running.run("chat", "-s", session, "--strategy", "window", stdin=b"/config\n")
    assert "strategy: window" in done.out


@pytest.mark.parametrize(
    ("reply", "shown", "error"),
    [
        (
            ScriptedReply(message=SAID, break_after=3),
            "word",
            "the model's host failed",
        ),
        (
            ScriptedReply(message=SAID, break_after=3, break_with="disconnect"),
            "word",
            "",
        ),
        (ScriptedReply(status=401, body=b'{"error":{"message":"no such key"}}'), "", "no such key"),
    ],
)
def test_failed_reply_is_reported_in_the_chat(
    running: Running, session: str, reply: ScriptedReply, shown: str, error: str
) -> None:
    model = running.script(reply, ScriptedReply(message={"role": "assistant", "content": "fine again"}))
    done = running.run("chat", "-s", session, "--model", model, stdin=b"one\ntwo\n")
    assert done.code == 1
    assert done.out.startswith(shown)
    assert done.out.endswith("\nfine again\n" if shown else "fine again\n")
    assert done.errors.startswith("tersely: ")
    assert len(done.errors.splitlines()) == 1
    assert error in done.errors


def test_tool_calls_are_shown_in_the_chat(running: Running, session: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    reply = ScriptedReply(message={"role": "assistant", "content": None, "tool_calls": [call]})
    done = running.run("chat", "-s", session, "--model", running.script(reply), stdin=b"one\n")
    assert (done.code, done.out) == (0, '[call of look with {"at": 1}: there are no tools here]\n')


@pytest.mark.parametrize(
    ("arguments", "stdin", "error"),
    [
        (("--strategy", "bogus"), b"hi\n", "bogus"),
        ((), b"/context bogus\n", "is not a valid command"),
        ((), b"\xff\xfe\n", "a line of standard input is not UTF-8 text (byte 0)"),
        (("--key", "é"), b"hi\n", "--key: not a Tersely key"),
        (("--upstream", "notaurl"), b"hi\n", "--upstream: 'notaurl' is not an http(s) address"),
        (("--url", "http://127.0.0.1:1"), b"hi\n", "does not answer"),
        (("--url", "nowhere:8484"), b"hi\n", "--url: 'nowhere:8484' is not an http(s) address"),
        (("-s", "a\nb"), b"hi\n", "printable"),
        (("-s", ".."), b"hi\n", "'..'"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    running: Running, session: str, arguments: tuple[str, ...], stdin: bytes, error: str
) -> None:
    done = running.run("chat", *(() if "-s" in arguments else ("-s", session)), *arguments, stdin=stdin)
    assert done.code == 1
    assert done.out == ""
    assert done.errors.startswith("tersely: ")
    assert error in done.errors
    assert "Traceback" not in done.errors


def test_piped_chat_continues_after_an_error(running: Running, session: str) -> None:
    done = running.run("chat", "-s", session, stdin=b"/undo\n\xff\n\n/session scratchpad\n")
    assert done.code == 1
    assert done.out.endswith("The scratchpad is empty.\n")
    assert len(done.errors.splitlines()) == 2


def test_a_session_may_have_any_name(running: Running) -> None:
    done = running.run("chat", "-s", "über/all?", stdin="grüß\n".encode())
    assert done.code == 0, done.errors
    assert "grüß" in running.run("search", "grüß", "-s", "über/all?").out
