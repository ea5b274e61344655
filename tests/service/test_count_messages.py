"""Counting the messages of one call leaves the event loop to others, however the text is spread."""

from __future__ import annotations

import threading

import pytest

from tersely.dialects.openai_chat.read import read_message
from tersely.service.common import tokens


@pytest.mark.parametrize(
    ("texts", "is_inline"),
    [(["word"] * 150, True), (["word"] * 250, False), (["word " * 10_000], False)],
    ids=["few", "many", "long"],
)
async def test_many_or_long_messages_are_counted_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, texts: list[str], is_inline: bool
) -> None:
    threads = set()
    count = tokens.count_message

    def noted(*args: object) -> int:
        threads.add(threading.get_ident())
        return count(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tokens, "count_message", noted)
    messages = [read_message(b'{"role":"user","content":"%s"}' % text.encode()) for text in texts]
    counts = await tokens.count_messages(messages, "gpt-4o")
    assert counts == [count(message, "gpt-4o") for message in messages]
    assert (threads == {threading.get_ident()}) is is_inline
