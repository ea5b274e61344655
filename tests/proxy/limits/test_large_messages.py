"""A message or a reply of many megabytes: no callback on the event loop is long, and it is stored byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.conftest import Database
from tests.support.http import body_of, post
from tests.support.loop_time import callback_times
from tests.support.rows import query
from tests.support.services import serve
from tests.support.upstreams import RawUpstream, http_head

MIB = 1024 * 1024
SENTENCE = "The worker reads the queue and writes its result to the table. "
# Seconds of the loop's own processor time. Each of these took 45 ms to 100 ms in one piece.
LONGEST = 0.02


def words(size: int) -> str:
    return SENTENCE * (size // len(SENTENCE))


@pytest.fixture
def echo(raw: RawUpstream) -> RawUpstream:
    """A host whose loop is left out of the figures: it says one word, or what the test gives it."""
    message = {"role": "assistant", "content": "Done."}
    answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    raw.answer(http_head("application/json"), answer)
    return raw


async def run(store: Database, upstream: str, key: str, requests: list[tuple[str, bytes]]) -> tuple[list[int], Any]:
    """Send the requests; the statuses, and the times of callbacks but for the first, small ones."""
    with serve(store, upstream) as service:
        # What is made at the first call of a route is no matter of its size.
        await post(service, body_of("warm up"), X_Tersely_Session=f"{key}-warm")
        await post(service, b'{"messages":[{"role":"user","content":"x"}]}', path=f"/api/sessions/{key}-w/messages")
        with callback_times(service) as times:
            statuses = [(await post(service, body, path=path, X_Tersely_Session=key)).status for path, body in requests]
        return statuses, times


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/sessions/{}/messages"])
async def test_a_large_message_is_stored_without_holding_the_loop(
    store: Database, echo: RawUpstream, key: str, path: str
) -> None:
    large = words(28 * MIB)
    statuses, times = await run(store, echo.url, key, [(path.format(key), body_of("hello", large))])
    assert statuses[0] in (200, 201)
    found = await query(store, "SELECT raw FROM messages WHERE session_id = $1 AND length(raw) > $2", key, MIB)
    assert [json.loads(row["raw"])["content"] for row in found] == [large]
    assert await query(store, "SELECT FROM message_pieces") == []
    assert times.worst[0] < LONGEST, times.worst


@pytest.mark.parametrize("tag", ["", "<terse>Looked at the table.</terse>"])
async def test_a_large_reply_is_stored_without_holding_the_loop(
    store: Database, raw: RawUpstream, key: str, tag: str
) -> None:
    large = words(15 * MIB)
    message = {"role": "assistant", "content": large + tag}
    answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    raw.answer(http_head("application/json"), answer)
    statuses, times = await run(store, raw.url, key, [("/v1/chat/completions", body_of("hello"))])
    assert statuses == [200]
    sql = "SELECT raw, model_raw FROM messages WHERE session_id = $1 AND role = 'assistant'"
    (reply,) = await query(store, sql, key)
    assert json.loads(reply["raw"])["content"] == large
    assert json.loads(reply["model_raw"] or reply["raw"])["content"] == large + tag
    assert times.worst[0] < LONGEST, times.worst


async def messages_by_number_in(store: Database, session: str) -> list[Any]:
    return await query(
        store, "SELECT raw, model_raw FROM messages WHERE session_id = $1 AND turn > 0 ORDER BY seq", session
    )
