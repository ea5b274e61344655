"""Token counts of parts that only a provider can read: between half and twice the scripted host's count."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.registry import DIALECTS
from tersely.dialects.wire.media import opaque_size
from tersely.domain.messages import Dialect
from tersely.domain.tokens import AUDIO_TOKENS, FILE_TOKENS, IMAGE_UNKNOWN
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GEMINI
from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.scripted.replies import WireFormat
from tersely.service.common.tokens import count_message

WIRES: Mapping[Dialect, tuple[str, WireFormat]] = {
    "openai_chat": ("messages", CHAT),
    "anthropic": ("messages", ANTHROPIC),
    "gemini": ("contents", GEMINI),
    "openai_responses": ("input", RESPONSES),
}

PROSE = "The wheel turns the gear, and the gear turns the stone of the mill. " * 60
SECRET = base64.b64encode(bytes(range(256)) * 200).decode()
PDF = base64.b64encode(b"%PDF-1.7" + bytes(60_000)).decode()
PAGE = base64.b64encode(PROSE.encode()).decode()


def message_of(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def parts(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "mills"}}
HIT = {"type": "web_search_result", "url": "https://m.example/1", "title": "Mills", "encrypted_content": SECRET[:900]}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [HIT]}
CODE = {"executableCode": {"language": "PYTHON", "code": "print(sum(range(9)))"}}
RAN = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "36"}}
WEB = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "mills"}}


def document(**source: str) -> dict[str, Any]:
    return message_of("user", {"type": "document", "source": source})


SIZED: list[tuple[str, Dialect, dict[str, Any]]] = [
    ("a small call of the provider's tool", "anthropic", message_of("assistant", SEARCH)),
    ("what it found, encrypted", "anthropic", message_of("assistant", SEARCH, FOUND)),
    ("a block of a new type", "anthropic", message_of("user", {"type": "brand_new", "note": "small"})),
    ("a search result", "anthropic", message_of("user", {"type": "search_result", "source": "s", "title": "t",
        "content": [{"type": "text", "text": PROSE}]})),
    ("a document that is text", "anthropic", document(type="text", media_type="text/plain", data=PROSE * 70)),
    ("a document that is not English", "anthropic",
        document(type="text", media_type="text/plain", data="\u6c34\u8eca" * 900)),
    ("a text file", "anthropic", document(type="base64", media_type="text/markdown", data=PAGE)),
    ("a redacted thought", "anthropic", message_of("assistant", {"type": "redacted_thinking", "data": SECRET})),
    ("a thought with its signature", "anthropic",
        message_of("assistant", {"type": "thinking", "thinking": PROSE[:900], "signature": SECRET[:9000]})),
    ("code and its result", "gemini", parts("model", CODE, RAN)),
    ("a text file", "gemini", parts("user", {"inlineData": {"mimeType": "text/csv", "data": PAGE}})),
    ("a search", "openai_responses", WEB),
    ("an encrypted thought", "openai_responses",
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": SECRET * 6}),
    ("a compaction", "openai_responses", {"type": "compaction", "id": "cmp_1", "encrypted_content": SECRET}),
    ("a text file", "openai_responses", message_of("user", {"type": "input_file", "filename": "a.txt",
        "file_data": f"data:text/plain;base64,{PAGE}"})),
    ("an encrypted thought", "openai_chat", {"role": "assistant", "content": "So.", "reasoning_details": [
        {"type": "reasoning.encrypted", "data": SECRET}]}),
    ("a part of a new type", "openai_chat", message_of("user", {"type": "brand_new", "note": "small"})),
    ("a text file", "openai_chat", message_of("user", {"type": "file", "file": {
        "filename": "a.json", "file_data": f"data:application/json;base64,{PAGE}"}})),
]  # fmt: skip


def count(dialect: Dialect, message: dict[str, Any]) -> int:
    key, _ = WIRES[dialect]
    read = DIALECTS[dialect].read_request(json.dumps({"model": "m", key: [message]}).encode())
    assert read.unreadable is None
    return sum(count_message(each, "claude-opus-test") for each in read.messages)


@pytest.mark.parametrize(("what", "dialect", "message"), SIZED)
def test_media_with_a_known_size_count_by_it(what: str, dialect: Dialect, message: dict[str, Any]) -> None:
    key, wire = WIRES[dialect]
    measured = sum(wire.sizes({key: [message]})) // 4
    assert measured / 2 <= count(dialect, message) <= measured * 2, what


@pytest.mark.parametrize(
    ("dialect", "message", "tokens"),
    [
        ("anthropic", document(type="base64", media_type="application/pdf", data=PDF), FILE_TOKENS),
        ("anthropic", document(type="url", url="https://m.example/a.pdf"), FILE_TOKENS),
        ("anthropic", message_of("user", {"type": "image", "source": {"type": "url", "url": "https://m/1"}}),
            IMAGE_UNKNOWN),
        ("gemini", parts("user", {"inlineData": {"mimeType": "application/pdf", "data": PDF}}), FILE_TOKENS),
        ("gemini", parts("user", {"inlineData": {"mimeType": "audio/wav", "data": PDF}}), AUDIO_TOKENS),
        ("openai_chat", message_of("user", {"type": "file", "file": {
            "file_data": f"data:application/pdf;base64,{PDF}"}}), FILE_TOKENS),
        # Files within what only the provider understands are no text either.
        ("anthropic", message_of("assistant", {"type": "web_fetch_tool_result", "tool_use_id": "srvtoolu_1",
            "content": {"type": "web_fetch_result", "content": {"type": "document", "source": {
                "type": "base64", "media_type": "application/pdf", "data": PDF}}}}), FILE_TOKENS),
        ("openai_chat", message_of("user", {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{PDF}"}}),
            FILE_TOKENS),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text_count_by_their_kind(dialect: Dialect, message: dict[str, Any], tokens: int) -> None:
    assert tokens <= count(dialect, message) <= tokens + 80


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc", max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(values.filter(lambda value: "data:" not in str(value)))
def test_a_value_is_about_as_long_as_its_json(value: object) -> None:
    written = len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())
    assert opaque_size(value) <= 2 * written + 4
    assert written <= 6 * opaque_size(value)  # control characters are written as escapes


def test_deeply_nested_values_are_counted() -> None:
    deep: Any = []
    for _ in range(5_000):
        deep = [deep]
    assert opaque_size(deep) == 3 * 5_000 + 2
