"""Side calls that clients mark otherwise than by their words: they go through as they are, and leave nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.http import post
from tests.support.rows import query
from tests.support.services import Service
from tests.support.upstreams import RawUpstream, http_head

SAID = [{"role": "user", "content": "Fix the bug."}, {"role": "assistant", "content": "Done."}]
QUESTION = {"role": "user", "content": "Go on."}
CALLS: dict[str, tuple[str, dict[str, Any], dict[str, str], str]] = {
    "quota": (
        "/v1/messages",
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "quota"}],
            "metadata": {"user_id": "u"},
        },
        {},
        "quota",
    ),
    "compaction": (
        "/v1/chat/completions",
        {"model": "m", "messages": [*SAID, QUESTION]},
        {"x_interaction_type": "conversation-compaction"},
        "summary",
    ),
    "title": (
        "/v1/chat/completions",
        {"model": "m", "messages": [QUESTION]},
        {"x_interaction_type": "conversation-title"},
        "title",
    ),
    "prewarm": (
        "/v1/responses",
        {"model": "m", "input": [QUESTION]},
        {"x_codex_turn_metadata": '{"request_kind":"prewarm"}'},
        "prewarm",
    ),
    "thread title": (
        "/v1/responses",
        {"model": "m", "input": [*SAID, QUESTION]},
        {"x_codex_turn_metadata": '{"thread_source":"thread_title","turn_id":"t"}'},
        "title",
    ),
}
REPLY = b'{"said":"by the host"}'


@pytest.mark.parametrize("name", CALLS)
async def test_a_side_call_is_forwarded_and_forgotten(
    behind_raw: Service, raw: RawUpstream, key: str, name: str
) -> None:
    path, request, headers, kind = CALLS[name]
    raw.answer(http_head("application/json"), REPLY)
    body = json.dumps(request, indent=1).encode()
    before = len(await query(behind_raw, "SELECT FROM messages"))

    answer = await post(behind_raw, body, path=path, x_session_id=key, **headers)

    assert (answer.status, answer.body, answer.context) == (200, REPLY, "passthrough")
    assert "x-tersely-session" not in answer.headers
    assert raw.requests[-1].body == body
    assert len(await query(behind_raw, "SELECT FROM messages")) == before
    metrics = (await post(behind_raw, b"", path="/metrics", method="GET")).body.decode()
    assert f'kind="{kind}"' in metrics


async def test_question_resembling_a_side_call_is_stored(behind_raw: Service, raw: RawUpstream, key: str) -> None:
    raw.answer(http_head("application/json"), REPLY)
    body = json.dumps({"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "quota"}]}).encode()
    answer = await post(behind_raw, body, path="/v1/messages", X_Tersely_Session=key)
    assert answer.session == key
    assert len(await query(behind_raw, "SELECT FROM messages WHERE session_id = $1 AND role = 'user'", key)) == 1
