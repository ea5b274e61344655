"""The decoder of server-sent events: every byte accounted for, wherever the stream was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.wire.sse import BOM, DataLines, EventTooLarge, SseDecoder, SseEvent, parse_event, with_data

TOKENS = st.sampled_from(
    [
        b"data: {}",
        b"data:x",
        b"data",
        b": hi",
        b":",
        b"event: error",
        b"id: 1",
        b"retry: 5",
        b"\r\n",
        b"\n",
        b"\r",
        "é\U0001f600".encode(),
        b"\xef\xbb\xbf",
        b"data: a\ndata: b\n\n",
        b"data: z\r\n\r\n",
        b"data: y\r\r",
        b" ",
        b"nofield",
    ]
)
STREAMS = st.lists(TOKENS, max_size=25).map(b"".join)


def decode(*chunks: bytes) -> list[SseEvent]:
    decoder = SseDecoder()
    events = [event for chunk in chunks for event in decoder.feed(chunk)]
    return events + decoder.close()


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
def test_fields_of_an_event(newline: bytes):
    stream = newline.join(
        [b"event: error", b"data: {", b"data:}", b"", b": ping", b"", b"", b"data", b"", b"id: 7", b"", b"data: last"]
    )
    events = decode(stream)
    assert [(event.event, event.data, event.is_comment) for event in events] == [
        ("error", b"{\n}", False),
        ("", None, True),
        ("", None, False),
        ("", b"", False),
        ("", None, False),
        ("", b"last", False),
    ]
    assert b"".join(event.raw for event in events) == stream
    assert decode(*(bytes([byte]) for byte in stream)) == events


def test_a_byte_order_mark_is_no_part_of_a_field():
    assert decode(b"\xef\xbb\xbfdata: x\n\n")[0].data == b"x"


def test_complete_event_is_returned_at_once():
    decoder = SseDecoder()
    assert decoder.feed(b"data: 1\n") == []
    assert [event.data for event in decoder.feed(b"\ndata: 2\n\ndata")] == [b"1", b"2"]
    assert [event.data for event in decoder.feed(b": 3\r\n\r\n")] == [b"3"]
    assert decoder.close() == []


@given(STREAMS, st.lists(st.integers(0, 10_000), max_size=20))
def test_the_cuts_do_not_matter(stream: bytes, places: list[int]):
    whole = decode(stream)
    assert decode(*cut(stream, places)) == whole
    assert decode(*(bytes([byte]) for byte in stream)) == whole
    assert b"".join(event.raw for event in whole) == stream


def test_the_size_of_an_event_is_bounded():
    decoder = SseDecoder(limit=100)
    decoder.feed(b"data: x\n\n" * 50)
    with pytest.raises(EventTooLarge):
        decoder.feed(b"x" * 101)


def test_with_data_keeps_the_rest():
    event = parse_event(b"event: e\r\ndata: {a}\r\nid: 1\r\n\r\n")
    assert with_data(event, b"{b}") == b"event: e\r\ndata: {b}\r\nid: 1\r\n\r\n"
    lines = parse_event(b": c\ndata: {\ndata: }\n\n")
    assert with_data(lines, b"{b}") == b": c\ndata: {b}\n\n"
    assert parse_event(with_data(parse_event(b"data: data\n\n"), b"x")).data == b"x"


@given(stream=STREAMS, cuts=st.lists(st.integers(min_value=0, max_value=400), max_size=6))
def test_data_lines_do_not_depend_on_where_the_stream_was_cut(stream: bytes, cuts: list[int]) -> None:
    places = sorted({0, *(min(cut, len(stream)) for cut in cuts), len(stream)})
    lines = DataLines()
    out = b"".join(lines.feed(stream[start:end]) for start, end in pairwise(places)) + lines.close()
    whole = DataLines()

    assert out == whole.feed(stream) + whole.close()


@given(stream=STREAMS.map(lambda stream: stream.replace(BOM, b"")), mark=st.sampled_from([b"", BOM]))
def test_data_lines_keep_the_data_and_nothing_else(stream: bytes, mark: bytes) -> None:
    stream = mark + stream
    lines = DataLines()
    before, after = decode(stream), decode(lines.feed(stream) + lines.close())

    assert [event.data for event in after if event.data is not None] == [
        event.data for event in before if event.data is not None
    ]
    assert not any(event.event or event.is_comment for event in after)
    shown = b"".join(event.raw for event in after).replace(b"\r", b"\n").split(b"\n")
    assert not any(line.startswith((b":", b"event:", b"id:", b"retry:")) for line in shown)
