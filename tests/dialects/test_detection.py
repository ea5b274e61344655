"""The dialect of messages whose sender names none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.dialects.detection import detect_dialect
from tersely.domain.errors import InvalidRequest

CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]}
BLOCKS = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}]}
CONTENT = {"role": "model", "parts": [{"text": "hi"}]}
ITEM = {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}"}
PLAIN = {"role": "user", "content": "hi"}


def detect(*messages: Any) -> str:
    return detect_dialect([json.dumps(message).encode() for message in messages], field="messages")


@pytest.mark.parametrize(
    ("message", "dialect"),
    [
        (PLAIN, "openai_chat"),
        (CALL, "openai_chat"),
        ({"role": "tool", "tool_call_id": "c", "content": "ok"}, "openai_chat"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "openai_chat"),
        (BLOCKS, "anthropic"),
        ({"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}, "anthropic"),
        (CONTENT, "gemini"),
        ({"role": "user", "parts": [{"text": "hi"}]}, "gemini"),
        (ITEM, "openai_responses"),
        ({"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, "openai_responses"),
    ],
)
def test_a_shape_that_one_dialect_has_tells_it(message: Any, dialect: str) -> None:
    assert detect(message) == dialect
    assert detect(PLAIN, message, PLAIN) == dialect


def test_shapes_of_two_dialects_are_refused_with_their_places() -> None:
    with pytest.raises(InvalidRequest, match=r"openai_chat \(messages\[1\]\), anthropic \(messages\[2\]\)"):
        detect(PLAIN, CALL, BLOCKS)


@pytest.mark.parametrize("raw", [b"", b"[1]", b"nonsense", b'"text"', b"[" * 100_000])
def test_json_that_is_no_message_is_ignored(raw: bytes) -> None:
    assert detect_dialect([raw], field="messages") == "openai_chat"
