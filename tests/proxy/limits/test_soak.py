"""A short soak: many clients at once, in every dialect, with short and long bodies and replies.

No callback of the event loop runs long meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from itertools import cycle, islice

from tests.conftest import Database
from tests.proxy.streaming.test_idle_streams import KINDS
from tests.support.http import body_of, post
from tests.support.loop_time import callback_times
from tests.support.services import Service, serve
from tests.support.upstreams import RawRequest, RawUpstream, http_head

CLIENTS = 6
ROUNDS = 5
WORDS = "some words here for you "
MARKS = "Done.\n### STATE\n \n# x\n<terse>`a` < b</terse>\n```\n"
# Seconds of the loop's own processor time.
LONGEST = 0.02


def _text(number: int) -> str:
    return (WORDS * 20, MARKS * 1000, WORDS * 20_000, MARKS * 40)[number % 4]


async def test_soak_has_no_long_callback(store: Database, raw: RawUpstream, key: str) -> None:
    replies = cycle(range(1000))
    by_path = {speaker.path.partition("?")[0]: speaker for speaker in KINDS.values()}

    async def answer(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaker = next(each for path, each in by_path.items() if request.target.partition("?")[0].endswith(path[3:]))
        text = json.dumps(_text(next(replies)))[1:-1].encode()
        writer.write(http_head() + speaker.beginning.replace(b"half a word", text) + speaker.end)
        await writer.drain()

    async def talk(service: Service, client: int) -> None:
        name, speaker = list(KINDS.items())[client % len(KINDS)]
        for turn in range(ROUNDS):
            session = f"{key}-{client}-{turn % 2}"
            sent = await post(service, speaker.body, path=speaker.path, X_Tersely_Session=session)
            assert sent.status == 200, (name, sent.body[:500])
            body = json.dumps({"messages": [{"role": "user", "content": _text(turn)}]}).encode()
            appended = await post(service, body, path=f"/api/sessions/{key}-rest-{client}/messages")
            assert appended.status == 201, appended.body
            preview = await post(service, b"{}", path=f"/api/sessions/{session}/context")
            assert preview.status == 200, preview.body

    raw.handler = answer
    with serve(store, raw.url, strategy="window", epoch='{"high": 8000, "low": 3000}') as service:
        await asyncio.gather(*(talk(service, client) for client in islice(cycle(range(5)), CLIENTS)))
        await post(service, body_of("warm"))
        with callback_times(service) as times:
            await asyncio.gather(*(talk(service, client + 10) for client in range(CLIENTS)))
    assert times.worst[0] < LONGEST, times.worst
