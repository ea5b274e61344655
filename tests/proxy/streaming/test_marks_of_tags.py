"""Replies that consist of little but marks of tags: no callback of the event loop runs long, in any dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.conftest import Database
from tests.proxy.streaming.test_idle_streams import KINDS
from tests.support.http import body_of, post
from tests.support.loop_time import callback_times
from tests.support.rows import messages_by_number
from tests.support.services import Service, serve
from tests.support.upstreams import RawUpstream, http_head

KIB = 1024
# Seconds of the loop's own processor time. One delta of 64 KiB took 0.13 to 0.35, an open block letter by letter 0.5.
LONGEST = 0.02

TEXTS = {
    "headings": ("window", "### STATE\n \n# x\n" * 4096),
    "blank lines": ("window", "a" + " \n" * 32 * KIB),
    "hashes": ("window", "#\n" * 32 * KIB),
    "fences": ("window", "### STATE\n" + "~~~\n" * 16 * KIB),
    "brackets": ("slim", "<" * 64 * KIB),
    "open tags": ("slim", "``<terse>`" * 6 * KIB),
    "long": ("window", "### STATE\n \n# x\n" * 32 * KIB),
}


@pytest.fixture(scope="module")
def services(store: Database, raw: RawUpstream) -> Iterator[dict[str, Service]]:
    """By strategy."""
    with serve(store, raw.url, strategy="slim") as slim, serve(store, raw.url, strategy="window") as window:
        yield {"slim": slim, "window": window}


def _events(beginning: bytes, texts: list[str]) -> list[bytes]:
    """The stream that begins like ``beginning``, with these words in place of its own."""
    mark = b"\r\n\r\n" if b"\r\n\r\n" in beginning else b"\n\n"
    events = [each + mark for each in beginning.split(mark)[:-1]]
    (place,) = [n for n, each in enumerate(events) if b"half a word" in each]
    changed = [events[place].replace(b"half a word", json.dumps(text)[1:-1].encode()) for text in texts]
    return [*events[:place], b"".join(changed)]


@pytest.mark.parametrize("name", KINDS)
async def test_marks_in_a_stream_hold_nobody_up(
    services: dict[str, Service], raw: RawUpstream, key: str, name: str
) -> None:
    speaker = KINDS[name]
    raw.answer(http_head(), speaker.beginning, speaker.end)
    for service in services.values():  # what is made at the first call is no matter of the reply
        await post(service, speaker.body, path=speaker.path)
    for kind, (strategy, text) in TEXTS.items():
        raw.answer(http_head(), *_events(speaker.beginning, [text]), speaker.end)
        with callback_times(services[strategy]) as times:
            answer = await post(services[strategy], speaker.body, path=speaker.path, X_Tersely_Session=key + kind)
        assert answer.status == 200
        (_, reply) = await messages_by_number(services[strategy], key + kind)
        assert reply.finish != "interrupted"
        assert times.worst[0] < LONGEST, (kind, times.worst)


@pytest.mark.parametrize("end", ["", "\n# Next\nx"])
@pytest.mark.parametrize("name", KINDS)
async def test_an_open_block_letter_by_letter_holds_nobody_up(
    services: dict[str, Service], raw: RawUpstream, key: str, name: str, end: str
) -> None:
    speaker, service = KINDS[name], services["window"]
    block = "Done.\n### STATE\n" + "x" * (15_000 if end else 20_000) + end
    raw.answer(http_head(), speaker.beginning, speaker.end)
    await post(service, speaker.body, path=speaker.path)
    raw.answer(http_head(), *_events(speaker.beginning, list(block)), speaker.end)
    with callback_times(service) as times:
        answer = await post(service, speaker.body, path=speaker.path, X_Tersely_Session=key)
    assert (b"xxx" in answer.body or answer.body.count(b'"x"') > 15_000) is (end == "")
    assert b"Next" in answer.body or b'"N"' in answer.body or not end
    assert times.worst[0] < LONGEST, times.worst


@pytest.mark.parametrize("kind", TEXTS)
async def test_marks_in_a_whole_reply_hold_nobody_up(
    services: dict[str, Service], raw: RawUpstream, key: str, kind: str
) -> None:
    strategy, text = TEXTS[kind]
    service = services[strategy]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    raw.answer(http_head("application/json"), json.dumps({"id": "c", "choices": [choice]}).encode())
    await post(service, body_of("hello"))
    with callback_times(service) as times:
        assert (await post(service, body_of("hello"), X_Tersely_Session=key)).status == 200
    assert times.worst[0] < LONGEST, times.worst
