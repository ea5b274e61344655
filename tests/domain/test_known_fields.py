"""Members that no table knows are told by block, in every dialect; real clients send none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.data.known_fields import FIELDS, SEEN_FIELDS
from tersely.dialects.clients.known import SEEN
from tersely.dialects.known_fields import unknown_fields
from tersely.dialects.registry import DIALECTS
from tersely.domain.messages import Dialect
from tests.dialects.recordings import MISSING, SHARED, client_requests

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": "openai_chat",
    "/v1/responses": "openai_responses",
    "/v1/messages": "anthropic",
}


@pytest.mark.parametrize(
    ("dialect", "message", "blocks"),
    [
        ("openai_chat", {"role": "user", "content": "x", "new": 1}, ["message"]),
        (
            "openai_chat",
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {}, "new": 1}]},
            ["tool_call"],
        ),
        ("anthropic", {"role": "system", "content": [], "output_config": {"effort": "low"}}, []),
        ("anthropic", {"role": "user", "content": "x", "output_config": {}}, ["message:user"]),
        ("anthropic", {"role": "user", "content": [{"type": "text", "text": "x", "new": 1, "newer": 2}]}, ["text"] * 2),
        ("anthropic", {"role": "user", "content": [{"type": "of_tomorrow", "new": 1}]}, []),
        ("gemini", {"role": "user", "parts": [{"text": "x", "new": 1}], "new": 1}, ["content", "part"]),
        ("gemini_gca", {"role": "user", "parts": [{"text": "x", "new": 1}]}, ["part"]),
        ("openai_responses", {"role": "user", "content": "x", "new": 1}, ["message"]),
        (
            "openai_responses",
            {"output": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "new": 1}]},
            ["function_call"],
        ),
    ],
)
def test_unknown_members_are_reported_by_block(dialect: Dialect, message: dict[str, Any], blocks: list[str]) -> None:
    read = DIALECTS[dialect].read_message(json.dumps(message).encode())

    found = unknown_fields(dialect, read)

    assert [block for _, block in found] == blocks
    assert set(found) <= FIELDS.keys()


def test_every_seen_field_names_a_version() -> None:
    assert all(any(character.isdigit() for character in seen) for seen in SEEN_FIELDS.values())
    assert all((dialect, block) in FIELDS for dialect, block, _ in SEEN_FIELDS)
    assert all(version[0].isdigit() for version in SEEN.values())


@pytest.mark.skipif(not (SHARED / "clients").exists(), reason=MISSING)
@pytest.mark.parametrize("path", PATHS)
def test_recorded_clients_send_nothing_unknown(path: str) -> None:
    dialect = PATHS[path]
    recorded = client_requests(path)
    assert recorded
    for client, number, body in recorded:
        request = DIALECTS[dialect].read_request(json.dumps(body).encode())
        unknown = [block for message in request.messages for block in unknown_fields(dialect, message)]
        assert unknown == [], (client, number)
