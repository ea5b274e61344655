"""A request that brings only what is new to a long session whose strategy shows everything: others are not held up."""

from __future__ import annotations

import json

from tests.conftest import Database
from tests.support.http import STORED, body_of, post
from tests.support.loop_time import callback_times
from tests.support.services import serve
from tests.support.upstreams import RawUpstream, http_head

APPENDED = 10_000
APPENDS = 2
# Seconds of the loop's own processor time. Read and built in one piece this took 90 ms, written in one 60 ms.
LONGEST = 0.02


async def test_a_delta_shows_a_long_session_without_holding_the_loop(
    store: Database, raw: RawUpstream, key: str
) -> None:
    message = {"role": "assistant", "content": "Done."}
    answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    raw.answer(http_head("application/json"), answer)
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": f"Step {n}: looked at src/part_{n}.py."}
        for n in range(APPENDED * APPENDS)
    ]
    with serve(store, raw.url, strategy="full", instructions="off", database_timeout=20) as service:
        for start in range(0, len(messages), APPENDED):
            body = json.dumps({"messages": messages[start : start + APPENDED]}).encode()
            assert (await post(service, body, path=f"/api/sessions/{key}/messages")).status == 201
        await post(service, body_of("warm up"))
        with callback_times(service) as times:
            reply = await post(service, body_of("Go on."), X_Tersely_Session=key)
    assert reply.status == 200
    assert reply.headers["x-tersely-context"] in STORED
    assert json.loads(raw.requests[-1].body)["messages"] == [*messages, {"role": "user", "content": "Go on."}]
    assert times.worst[0] < LONGEST, times.worst
