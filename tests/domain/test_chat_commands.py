"""Commands typed into a chat, taken apart."""

from __future__ import annotations

import pytest

from tersely.domain.chat_commands import HELP, Command, is_command, parse_command
from tersely.domain.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/context", Command(verb="context")),
        ("  /context   clear ", Command(verb="clear")),
        ("/context window 0", Command(verb="window", number=0)),
        ("/context show", Command(verb="show")),
        ("/context rebuild", Command(verb="rebuild")),
        ("/context drop t7", Command(verb="drop", number=7)),
        ("/context drop 7", Command(verb="drop", number=7)),
        ("/undo", Command(verb="undo")),
        ("/message", Command(verb="list", number=10)),
        ("/messages list 3", Command(verb="list", number=3)),
        ("/message show t2", Command(verb="show turn", number=2)),
        ("/messages remove 2", Command(verb="remove", number=2)),
        ("/message pin 12", Command(verb="pin", number=12)),
        ("/messages unpin 12", Command(verb="unpin", number=12)),
        ("/message important 12", Command(verb="important", number=12, priority=75)),
        ("/message important 12 0", Command(verb="important", number=12, priority=0)),
        ("/session scratchpad", Command(verb="scratchpad")),
        ("/session scratchpad - [ ]  test it", Command(verb="scratchpad", value="- [ ]  test it")),
        ("/help", Command(verb="help")),
        (" /help\n", Command(verb="help")),
        ("/config", Command(verb="config")),
        (
            "/config agent_max_context_tokens 80000",
            Command(verb="config", key="agent_max_context_tokens", value="80000"),
        ),
        ('/config epoch {"high":  9}', Command(verb="config", key="epoch", value='{"high":  9}')),
    ],
)
def test_commands_are_parsed(text: str, command: Command) -> None:
    assert is_command(text)
    assert parse_command(text) == command


@pytest.mark.parametrize("text", ["", "hello", "/contextual", "see /undo", "/undo\nplease", "/message\n", "/help me"])
def test_text_for_the_model_is_no_command(text: str) -> None:
    assert is_command(text) == (text == "/message\n")  # a line's end alone says nothing


@pytest.mark.parametrize(
    "text",
    [
        "/context foo", "/context window", "/context window -1", "/context window many", "/context drop", "/undo now",
        "/message list 0", "/message show", "/message show t0", "/session", "/config strategy", "/message remove tx",
        "/message pin", "/message pin 0", "/message unpin t1", "/message important", "/message important 1 101",
    ],
)  # fmt: skip
def test_malformed_command_is_refused(text: str) -> None:
    assert is_command(text)
    with pytest.raises(InvalidRequest):
        parse_command(text)


def test_usage_names_the_right_lines() -> None:
    with pytest.raises(InvalidRequest, match=r"/context window N"):
        parse_command("/context foo")
    with pytest.raises(InvalidRequest, match=r"/message show TURN"):
        parse_command("/messages foo")
    assert HELP.count("\n") == 16


def test_mutating_commands_are_distinguished_from_reading_ones() -> None:
    lines = ("/session scratchpad", "/session scratchpad x", "/config", "/config a b", "/help")
    assert [parse_command(line).is_mutating for line in lines] == [False, True, False, True, False]
