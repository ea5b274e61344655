"""Messages as people read them."""

from __future__ import annotations

from tersely.domain.history.readable import format_message
from tests.builders import assistant, call, result, user


def test_format_message_names_every_part() -> None:
    text = format_message(assistant("I look.", call("c1", "read", {"path": "a.py"})))

    assert text == '--- assistant ---\nI look.\n[call c1] read {"path": "a.py"}'
    assert format_message(result("c1", "the file")) == "--- tool ---\n[result of c1] the file"


def test_format_message_shows_injected_blocks_too() -> None:
    message = user("<system-reminder>be brief</system-reminder>\n\nHello")

    assert "be brief" in format_message(message)
    assert "Hello" in format_message(message)
