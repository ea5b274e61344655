"""Streams: as they come, whatever comes, to whoever goes away."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import time
from functools import partial

import psutil
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.support.http import body_of, post, request_bytes, wire
from tests.support.loops import eventually, until
from tests.support.rows import messages_by_number, query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import DONE, Model, RawUpstream, chunk, http_head, sse

BEAT = b": keep-alive\n\n"


def content_of(stream: bytes) -> str:
    """The text in a stream of events, checking that each event is one."""
    text = ""
    for event in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data and data != b"[DONE]":
            for choice in json.loads(data).get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text


def unchunked(response: bytes) -> tuple[bytes, bytes]:
    """Head and body of a chunked response, as far as it came."""
    head, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, separator, rest = rest.partition(b"\r\n")
        if not separator or int(size, 16) == 0:
            break
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return head, body


async def ask(service: Service, session: str, **more: object) -> bytes:
    answer = await post(service, body_of("go on", stream=True, **more), X_Tersely_Session=session)
    assert answer.status == 200
    return answer.body


@pytest.mark.parametrize(
    "content_type", ["text/plain; charset=utf-8", "application/json", "application/octet-stream", ""]
)
@pytest.mark.parametrize("first", [b"", b"\n", b": wait\n\n", b"da", b"\xef\xbb\xbfdat"])
async def test_stream_is_one_under_any_content_type(
    behind_raw: Service, raw: RawUpstream, key: str, content_type: str, first: bytes
):
    head, event = http_head(content_type), sse("Words.", role=True)
    rest = event.removeprefix(first.removeprefix(b"\xef\xbb\xbf"))
    raw.answer(head, first, 0.05, rest, 10.0)
    async with wire(behind_raw) as there:
        await there.send(request_bytes(body_of("go on", stream=True), x_tersely_session=f"{key}-1"))
        await there.until(b"Words.", limit=5)

    raw.answer(head, first, 0.05, rest, sse("\n<terse>said</terse>"), sse(finish="stop"), DONE)
    answer = await post(
        behind_raw, body_of("go on", stream=True), X_Tersely_Session=key, X_Tersely_Epoch=FROM_THE_START
    )
    assert content_of(answer.body.removeprefix(b"\xef\xbb\xbf")).strip() == "Words."
    assert answer.headers["content-type"] == content_type
    question, reply = await messages_by_number(behind_raw, key)
    assert (question.status, reply.status, reply.text.strip()) == ("live", "live", "Words.")


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_events_go_out_as_they_come(behind_raw: Service, raw: RawUpstream, key: str, strategy: str):
    pause = 0.15
    raw.answer(
        http_head(), sse(role=True), *(x for n in range(4) for x in (pause, sse(f"w{n} "))), sse(finish="stop"), DONE
    )

    async with wire(behind_raw) as line:
        began = time.monotonic()
        await line.send(request_bytes(body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy))
        for number in range(4):
            await line.until(f"w{number} ".encode())
            assert pause * (number + 1) - 0.02 < time.monotonic() - began < pause * (number + 1) + 0.35
        head, body = unchunked(await line.until(b"0\r\n\r\n"))

    assert content_of(body) == "w0 w1 w2 w3 "
    assert b"x-accel-buffering: no" in head
    assert b"cache-control: no-cache" in head
    assert b"content-type: text/event-stream" in head


async def test_tags_are_stripped_wherever_chunks_are_cut(behind_raw: Service, raw: RawUpstream, key: str):
    text = "a < b <terse>the log</terse> c<ter<terse>two</terse>se>"
    raw.answer(http_head(), sse(role=True), *(sse(letter) for letter in text), sse(finish="stop"), DONE)

    assert content_of(await ask(behind_raw, key)) == "a < b  c<terse>"

    rows = await query(behind_raw, "SELECT text FROM terse WHERE session_id = $1 ORDER BY number", key)
    assert [row["text"] for row in rows] == [b"the log", b"two"]


async def test_utf8_is_cut_anywhere(behind_raw: Service, raw: RawUpstream, key: str):
    text = "\u00e9\U0001f600 \u4f60\u597d \u2028 end of it"
    event = sse(text).replace(json.dumps(text).encode(), json.dumps(text, ensure_ascii=False).encode())
    whole = sse(role=True) + event + sse(finish="stop") + DONE
    raw.answer(http_head(), *(x for n in range(0, len(whole), 7) for x in (whole[n : n + 7], 0.001)))

    assert content_of(await ask(behind_raw, key)) == text
    assert (await messages_by_number(behind_raw, key))[1].text == text


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_crlf_comments_and_data_on_several_lines(behind_raw: Service, raw: RawUpstream, key: str, strategy: str):
    lines = b'data: {"id":"c1","choices":[{"index":0,\r\ndata: "delta":{"content":"two lines"}}]}\r\n\r\n'
    crlf = [sse(role=True), sse("<terse>t</terse> and ", finish=None), sse(finish="stop"), DONE]
    first, tag, *rest = [event.replace(b"\n", b"\r\n") for event in crlf]
    raw.answer(http_head(), b": hi\r\n\r\n", first, lines[:50], 0.02, lines[50:], tag, *rest)

    answer = await post(behind_raw, body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    expected = "two lines and " if strategy == "slim" else "two lines<terse>t</terse> and "
    assert content_of(answer.body) == expected
    assert answer.body.endswith(b"data: [DONE]\r\n\r\n")
    assert (await messages_by_number(behind_raw, key))[1].text == expected


async def test_usage_and_calls_are_untouched(behind_raw: Service, raw: RawUpstream, key: str):
    function = b'{"name":"f","arguments":"{\\"a\\": \\"<terse>x</terse>\\"}"}'
    call = b'{"index":0,"id":"call_1","type":"function","function":%s}' % function
    events = [
        b'data: {"choices":[{"index":0,"delta":{"role":"assistant","tool_calls":[%s]}, "finish_reason":null}]}\n\n'
        % call,
        sse(finish="tool_calls"),
        b'data: {"choices":[], "usage":{"prompt_tokens":10,"completion_tokens":5,"x":1.0}}\n\n',
        DONE,
    ]
    raw.answer(http_head(), *events)

    got = await ask(behind_raw, key, stream_options={"include_usage": True})

    assert got == b"".join(events)
    row = (await query(behind_raw, "SELECT input_tokens, output_tokens FROM calls WHERE session_id = $1", key))[0]
    assert tuple(row) == (10, 5)


async def test_usage_requested_by_tersely_alone_is_stripped(service: Service, model: Model, key: str):
    got = await post(service, body_of("count", stream=True, user=key), X_Tersely_Session=key)

    assert b"usage" not in got.body
    assert json.loads(model.requests(key)[0].body)["stream_options"] == {"include_usage": True}
    row = (await query(service, "SELECT input_tokens, output_tokens FROM calls WHERE session_id = $1", key))[0]
    assert row["input_tokens"] > 0
    assert row["output_tokens"] > 0


async def test_an_error_in_the_middle_comes_through(service: Service, model: Model, key: str):
    model.script(key, ScriptedReply(message={"content": "half of a sen"}, pieces=["half of ", "a sen"], break_after=3))

    got = await post(service, body_of("go", stream=True, user=key), X_Tersely_Session=key)

    assert b'"The server had an error while processing your request."' in got.body
    assert b"[DONE]" not in got.body
    assert [(each.text, each.finish) for each in await messages_by_number(service, key)][1] == (
        "half of a sen",
        "interrupted",
    )


@pytest.mark.parametrize(
    "ending", [b"", b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"]
)
@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_streams_that_end_oddly(behind_raw: Service, raw: RawUpstream, key: str, ending: bytes, strategy: str):
    raw.answer(
        http_head(), sse("all of it ", role=True), sse("was said", finish="stop"), 0.01, ending[:9], 0.01, ending[9:]
    )

    answer = await post(behind_raw, body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    assert content_of(answer.body) == "all of it was said"
    assert answer.body.endswith(ending)
    assert [(each.text, each.finish) for each in await messages_by_number(behind_raw, key)][1] == (
        "all of it was said",
        "stop",
    )


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_words_about_the_end_mark_are_not_the_end(behind_raw: Service, raw: RawUpstream, key: str, strategy: str):
    raw.answer(http_head(), sse("it ends with data: [DONE] on a line", role=True), 0.2, sse(" and so on"), 5.0, DONE)

    async with wire(behind_raw) as line:
        await line.send(request_bytes(body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy))
        await line.until(b"[DONE] on a line", limit=1)
        got = await line.until(b" and so on", limit=1)
    assert got.count(b"[DONE]") == 1, "the text alone; the host has not ended the stream"


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_a_host_that_does_not_hang_up_after_the_end(
    behind_raw: Service, raw: RawUpstream, key: str, strategy: str
):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head, chunk(sse("that is all", role=True)), chunk(sse(finish="stop")), chunk(DONE), 5.0)

    answer = await post(behind_raw, body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    assert answer.body.endswith(DONE)
    assert answer.seconds < 1.4
    assert (await messages_by_number(behind_raw, key))[1].finish == "stop"


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_a_host_that_breaks_off_after_the_end(behind_raw: Service, raw: RawUpstream, key: str, strategy: str):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head, chunk(sse("that is all", role=True, finish="stop")), chunk(DONE))

    answer = await post(behind_raw, body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    assert answer.body.endswith(DONE)
    assert b"error" not in answer.body
    assert (await messages_by_number(behind_raw, key))[1].finish == "stop"


async def test_a_host_that_breaks_off_between_events(behind_raw: Service, raw: RawUpstream, key: str):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head, chunk(sse("half <ter", role=True)))

    got = await ask(behind_raw, key)

    assert content_of(got) == "half <ter"
    assert json.loads(got.strip().rpartition(b"data: ")[2])["error"]["code"] == "upstream_unavailable"
    assert [(each.text, each.finish) for each in await messages_by_number(behind_raw, key)][1] == (
        "half <ter",
        "interrupted",
    )


async def test_a_host_that_breaks_off_inside_an_event(behind_raw: Service, raw: RawUpstream, key: str):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head, chunk(sse("said", role=True)), chunk(sse("unsaid")[:40]))

    got = await ask(behind_raw, key)

    assert content_of(got) == "said"
    assert json.loads(got.strip().rpartition(b"data: ")[2])["error"]["code"] == "upstream_unavailable"
    assert (await messages_by_number(behind_raw, key))[1].text == "said"


async def test_half_an_event_that_is_out_already_ends_the_connection(
    plain_behind_raw: Service, raw: RawUpstream, key: str
):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head, chunk(sse("said", role=True)), chunk(sse("unsaid")[:40]))
    body = body_of("go", stream=True, stream_options={"include_usage": True})

    async with wire(plain_behind_raw) as line:
        await line.send(request_bytes(body, X_Tersely_Session=key))
        got = await line.to_end()

    assert b"upstream_unavailable" not in got
    assert not got.endswith(b"0\r\n\r\n")
    assert (await messages_by_number(plain_behind_raw, key))[1].text == "said"


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_silence_is_filled_with_heartbeats_between_events_only(
    behind_raw: Service, raw: RawUpstream, key: str, strategy: str
):
    event = sse("in two halves")
    raw.answer(http_head(), 0.7, sse(role=True), 0.7, event[:40], 0.7, event[40:], sse(finish="stop"), DONE)

    answer = await post(behind_raw, body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    before, _, after = answer.body.partition(sse(role=True)[:6])
    assert before.count(BEAT) >= 1
    assert after.count(BEAT) >= 2
    assert sse("in two halves") in answer.body, "a heartbeat inside an event would tear it"
    assert content_of(answer.body) == "in two halves"


async def test_a_host_that_is_silent_for_too_long_is_given_up(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(http_head(), sse("a word ", role=True), 20.0)

    got = await ask(behind_raw, key)

    assert got.count(BEAT) >= 3
    assert b"silent" in got
    assert (await messages_by_number(behind_raw, key))[1].finish == "interrupted"
    assert await asyncio.to_thread(raw.gone.wait, 5), "the call goes on upstream"


async def test_a_late_beginning(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(1.0, http_head(), sse("late but whole", role=True), sse(finish="stop"), DONE)

    assert content_of(await ask(behind_raw, key)) == "late but whole"


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_leaves_before_the_first_byte(
    behind_raw: Service, raw: RawUpstream, key: str, streams: bool
):
    raw.answer(20.0)

    before = len(raw.requests)
    async with wire(behind_raw) as line:
        await line.send(request_bytes(body_of("never mind", stream=streams), X_Tersely_Session=key))
        await until(lambda: len(raw.requests) > before)
    left = time.monotonic()

    assert await asyncio.to_thread(raw.gone.wait, 5)
    assert time.monotonic() - left < 1.0
    stored = await eventually(lambda: messages_by_number(behind_raw, key))
    assert [each.text for each in stored] == ["never mind"]


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_a_client_that_leaves_in_the_middle(behind_raw: Service, raw: RawUpstream, key: str, strategy: str):
    raw.answer(http_head(), sse("what was said ", role=True), sse("until then"), 20.0)

    async with wire(behind_raw) as line:
        await line.send(request_bytes(body_of("go", stream=True), X_Tersely_Session=key, X_Tersely_Strategy=strategy))
        await line.until(b"until then")
    left = time.monotonic()

    assert await asyncio.to_thread(raw.gone.wait, 5)
    assert time.monotonic() - left < 1.0
    stored = await eventually(lambda: _stored_replies(behind_raw, key, 1))
    assert (stored[0].text, stored[0].finish) == ("what was said until then", "client_left")


async def _stored_replies(service: Service, session: str, count: int):
    replies = [each for each in await messages_by_number(service, session) if each.role == "assistant"]
    return replies if len(replies) >= count else []


async def test_a_client_that_leaves_at_the_very_end(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(http_head(), sse("whole, as it turned out", role=True), sse(finish="stop"), DONE)

    for number in range(10):
        async with wire(behind_raw) as line:
            request = body_of(f"question {number}", stream=True)
            await line.send(request_bytes(request, X_Tersely_Session=f"{key}-{number}"))
            await line.until(b"turned out")
        stored = await eventually(partial(_stored_replies, behind_raw, f"{key}-{number}", 1))
        assert [each.text for each in stored] == ["whole, as it turned out"]


async def test_session_continues_after_the_client_left(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(http_head(), sse("what was said until then", role=True), 20.0)
    async with wire(behind_raw) as line:
        await line.send(request_bytes(body_of("one", stream=True), X_Tersely_Session=key))
        await line.until(b"until then")
    await eventually(lambda: _stored_replies(behind_raw, key, 1))

    raw.answer(http_head(), sse("and here is the rest", role=True), sse(finish="stop"), DONE)
    spoken = {"role": "assistant", "content": "what was said until then"}
    user = {"role": "user", "content": "one"}
    await post(behind_raw, body_of(user, spoken, "go on", stream=True), X_Tersely_Session=key)

    assert [(each.role, each.turn, each.status) for each in await messages_by_number(behind_raw, key)] == [
        ("user", 1, "live"),
        ("assistant", 1, "live"),
        ("user", 2, "live"),
        ("assistant", 2, "live"),
    ]


@pytest.mark.parametrize("strategy", ["slim", "full"])
async def test_the_turn_is_committed_before_the_client_sees_the_end(
    behind_raw: Service, raw: RawUpstream, key: str, strategy: str
):
    raw.answer(http_head(), sse("committed first", role=True), sse(finish="stop"), DONE)

    for number in range(20):
        session = f"{key}-{number}"
        async with wire(behind_raw) as line:
            request = request_bytes(body_of("go", stream=True), X_Tersely_Session=session, X_Tersely_Strategy=strategy)
            await line.send(request)
            await line.until(b"[DONE]")
            assert [each.role for each in await messages_by_number(behind_raw, session)] == ["user", "assistant"]


async def test_a_slow_client_slows_the_host_down(store, raw: RawUpstream, key: str):
    event = sse("x" * 60_000)
    written = 0

    async def flood(_request, _reader, writer):
        nonlocal written
        writer.write(http_head() + sse(role=True))
        for _ in range(2000):
            writer.write(event)
            await writer.drain()
            written += len(event)

    raw.handler = flood
    with serve(store, raw.url) as running:
        async with wire(running, limit=4096) as line:
            await line.send(
                request_bytes(body_of("much", stream=True), X_Tersely_Session=key, X_Tersely_Strategy="full")
            )
            await line.until(b"xxxx")
            gc.collect()
            before = psutil.Process(os.getpid()).memory_info().rss
            seen = -1
            while seen != written:
                seen = written
                await asyncio.sleep(0.4)
            grown = psutil.Process(os.getpid()).memory_info().rss - before

    assert written < 30_000_000, "120 MB were taken from the host for a client that reads nothing"
    assert grown < 100_000_000


async def test_a_long_stream_arrives_whole(behind_raw: Service, raw: RawUpstream, key: str):
    words = [f"word{n} " for n in range(20_000)]
    raw.answer(http_head(), sse(role=True), b"".join(map(sse, words)), sse(finish="stop"), DONE)

    got = await ask(behind_raw, key)

    assert content_of(got) == "".join(words)
    assert (await messages_by_number(behind_raw, key))[1].text == "".join(words)
