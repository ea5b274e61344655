"""Replies on their way to the client: untouched where nothing is taken out, as if never tagged where
something is.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.dialects.dialect import UNCHANGED, ClientView, Reply
from tersely.dialects.openai_chat.stream import ReplyStream
from tersely.dialects.openai_chat.whole import split_reply
from tersely.dialects.wire.sse import SseDecoder
from tersely.domain.text.tags import NOTHING, TagKinds

WIRE = Path(__file__).parents[3] / "shared" / "data" / "wire"


def recordings(*, stream: bool) -> list[Path]:
    index = WIRE / "index.jsonl"
    if not index.exists():
        return []
    lines = map(json.loads, index.read_text().splitlines())
    return [WIRE / line["file"] for line in lines if line["api"].endswith(".chat") and line["stream"] is stream]


STREAMS = recordings(stream=True)
BODIES = recordings(stream=False)
TERSE = TagKinds(terse=True)
STATE = TagKinds(state=True)
BOTH = TagKinds(terse=True, state=True)
needs_recordings = pytest.mark.skipif(not STREAMS, reason=f"the recorded provider traffic is not there: {WIRE}")


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in pairwise(ends)]


def run(chunks: list[bytes], *, extract: TagKinds = TERSE, strip_usage: bool = False) -> tuple[bytes, Reply]:
    reader = ReplyStream(ClientView(tags=extract, strip_usage=strip_usage))
    sent = b"".join([reader.feed(chunk) for chunk in chunks])
    return sent + reader.close(), reader.reply


def payloads(stream: bytes) -> list[Any]:
    decoder = SseDecoder()
    events = decoder.feed(stream) + decoder.close()
    return [json.loads(event.data) for event in events if event.data and event.data.strip() not in {b"[DONE]", b""}]


def texts(stream: bytes) -> dict[int, str]:
    """Return the texts that a client puts together from a stream, per choice."""
    found: dict[int, str] = defaultdict(str)
    for payload in payloads(stream):
        for choice in payload.get("choices") or ():
            content = (choice.get("delta") or {}).get("content")
            if isinstance(content, list):
                content = "".join(part.get("text") or "" for part in content if part["type"] == "text")
            found[choice.get("index") or 0] += content or ""
    return found


def event(delta: dict[str, Any] | None = None, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": finish}
    payload = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], **more}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def text_events(*pieces: str, index: int = 0) -> list[bytes]:
    return [event({"content": piece}, index=index) for piece in pieces]


# Recorded provider streams


@needs_recordings
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem[:60])
def test_recorded_streams_come_through_byte_for_byte(path: Path):
    stream = path.read_bytes()
    whole, reply = run([stream])
    assert whole == stream
    assert run([stream], extract=NOTHING) == (whole, reply)
    for size in (1, 7, 100, 1400):
        chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert run(chunks) == (whole, reply)
        assert run(chunks, extract=NOTHING) == (whole, reply)
    for choice in reply.choices:
        assert choice.client_message == choice.model_message
        assert choice.terse == ()
        content = json.loads(choice.model_message)["content"]
        if isinstance(content, str):
            assert content == texts(stream)[choice.index]
    assert reply.is_done == (b"[DONE]" in stream)
    calls = {
        delta["id"]
        for payload in payloads(stream)
        for each in payload.get("choices") or ()
        for delta in (each.get("delta") or {}).get("tool_calls") or ()
        if delta.get("id")
    }
    assembled = [call for choice in reply.choices for call in json.loads(choice.model_message).get("tool_calls", ())]
    assert {call["id"] for call in assembled} == calls
    assert all(json.loads(call["function"]["arguments"] or "{}") is not None for call in assembled)


def test_usage_beside_a_name_that_is_no_text_goes_out_as_it_is():
    event = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":1},"\xff":1}\n\n'
    sent, reply = run([event, b"data: [DONE]\n\n"], strip_usage=True)
    assert sent == event + b"data: [DONE]\n\n"
    assert b"prompt_tokens" in reply.usage


@needs_recordings
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem[:60])
def test_recorded_streams_lose_only_the_usage_that_tersely_requested(path: Path):
    stream = path.read_bytes()
    sent, reply = run([stream], strip_usage=True)
    before = payloads(stream)
    expected = []
    for payload in before:
        if payload.get("choices") == [] and payload.get("usage"):
            continue
        if payload.get("usage", 0) is None:
            del payload["usage"]
        expected.append(payload)
    assert payloads(sent) == expected
    assert reply == run([stream])[1]


@needs_recordings
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_recorded_streams_with_planted_tags_come_out_as_without(data: st.DataObject):
    path = data.draw(st.sampled_from(STREAMS))
    stream = path.read_bytes()
    plain = texts(stream)
    if "```" in plain[0] or "~~~" in plain[0]:
        return  # a tag inside of a fence is text
    lines = stream.split(b"\n")
    places = [place for place, line in enumerate(lines) if line.startswith(b"data: {") and _content(line)]
    if not places:
        return
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from(places))
        inside = data.draw(st.sampled_from(["did x", "", "a < b", "x\ny", "é"]))
        lines[place] = _plant(lines[place], f"<terse>{inside}</terse>", data)
    planted = b"\n".join(lines)
    chunks = cut(planted, data.draw(st.lists(st.integers(0, 10**6), max_size=30)))
    sent, reply = run(chunks)
    assert texts(sent) == plain
    assert any("<terse>" in text for text in texts(planted).values())
    for choice in reply.choices:
        client = json.loads(choice.client_message)
        if isinstance(client["content"], str):
            assert client["content"] == plain[choice.index]
    assert reply.is_done == (b"[DONE]" in stream)


def _content(line: bytes) -> str:
    for choice in json.loads(line[6:]).get("choices") or ():
        content = (choice.get("delta") or {}).get("content")
        if isinstance(content, str) and content:
            return content
    return ""


def _plant(line: bytes, tag: str, data: st.DataObject) -> bytes:
    payload = json.loads(line[6:])
    for choice in payload["choices"]:
        content = (choice.get("delta") or {}).get("content")
        if isinstance(content, str) and content and "<terse>" not in content:
            place = data.draw(st.integers(0, len(content)))
            choice["delta"]["content"] = content[:place] + tag + content[place:]
    return b"data: " + json.dumps(payload).encode()


@needs_recordings
@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem[:60])
def test_recorded_bodies_come_through_byte_for_byte(path: Path):
    body = path.read_bytes()
    sent, reply = split_reply(body, ClientView(tags=TERSE))
    assert sent is body
    for choice, expected in zip(reply.choices, json.loads(body)["choices"], strict=True):
        assert json.loads(choice.model_message) == expected["message"]


# Streams of our own


def test_tags_are_stripped_and_the_rest_keeps_its_bytes():
    head = [event({"role": "assistant", "content": ""}), *text_events("Hi ", "there")]
    tag = text_events("\n<ter", "se>did ", "x</", "terse>")
    tail = [event({}, "stop"), DONE]
    sent, reply = run([*head, *tag, *tail])
    assert sent.startswith(b"".join(head))
    assert sent.endswith(b"".join(tail))
    assert texts(sent) == {0: "Hi there\n"}
    assert len(payloads(sent)) == 5  # two of the four chunks with the tag have nothing left
    assert reply == Reply(
        id="c1",
        model="m",
        choices=reply.choices,
        is_done=True,
    )
    (choice,) = reply.choices
    assert json.loads(choice.model_message)["content"] == "Hi there\n<terse>did x</terse>"
    assert json.loads(choice.client_message)["content"] == "Hi there\n"
    assert (choice.terse, choice.finish_reason) == (("did x",), "stop")


def test_event_is_sent_once_its_text_cannot_begin_a_tag():
    reader = ReplyStream(ClientView(tags=TERSE))
    sent = [texts(reader.feed(chunk))[0] for chunk in text_events("a <", "b <te", "r", "e> <terse", ">x")]
    assert sent == ["", "a <", "", "b <ter", ""]
    assert texts(reader.feed(event({}, "stop"))) == {0: "e> <terse>x"}


def test_events_whose_text_proved_to_be_no_tag_go_out_as_they_came():
    """Tokens end where they like: many a stream has "<" in an event of its own."""
    chunks = [*text_events("a ", "<", "b> ", "<", "terse", ">x"), event({}, "stop"), DONE]
    assert run(chunks)[0] == b"".join(chunks)
    chunks = [*text_events("a <", "ter", "se", "!")]
    assert run(chunks)[0] == b"".join(chunks)
    unclosed = [*text_events("a", "<terse>", "b"), DONE]
    assert run(unclosed)[0] == b"".join(unclosed)
    with_usage = [event({"content": piece}, usage=None) for piece in ("a", "<", "b")]
    assert run(with_usage, strip_usage=True)[0] == run(with_usage, extract=NOTHING, strip_usage=True)[0]


@pytest.mark.parametrize("ending", [[event({}, "stop"), DONE], [event({}, "stop")], [DONE], []])
def test_an_unclosed_tag_is_text(ending: list[bytes]):
    sent, reply = run([*text_events("a <terse>b"), *ending])
    assert texts(sent) == {0: "a <terse>b"}
    assert json.loads(reply.choices[0].client_message)["content"] == "a <terse>b"
    assert sent == b"".join([*text_events("a <terse>b"), *ending])


def test_a_finish_chunk_that_carries_text():
    chunks = [event({"content": "a <te"}), event({"content": "rse"}, "length"), DONE]
    assert run(chunks)[0] == b"".join(chunks)
    sent, _ = run([event({"content": "a <te"}), event({"content": "rse>x</terse>b"}, "length"), DONE])
    assert sent == b"".join([event({"content": "a "}), event({"content": "b"}, "length"), DONE])


def test_tool_call_ends_the_text_before_it():
    call = {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
    reader = ReplyStream(ClientView(tags=BOTH))
    assert reader.feed(event({"content": "Let me see.\n\n"})) == b""
    assert reader.feed(event(call)) == event({"content": "Let me see.\n\n"}) + event(call)
    chunks = [
        *text_events("So.", "\n### STATE\nGoal: x"),
        event(call),
        *text_events("\n### STATE\nGoal: y"),
        event({}, "tool_calls"),
    ]
    sent, reply = run(chunks, extract=BOTH)
    assert sent == b"".join([*text_events("So."), event(call), event({}, "tool_calls")])
    assert reply.choices[0].state == "Goal: y"


def test_choices_have_states_of_their_own():
    chunks = [
        *text_events("one <te", index=0),
        *text_events("two <terse>", index=1),
        *text_events("rse>1</terse>!", index=0),
        *text_events("2</terse>?", index=1),
        event({}, "stop", index=0),
        event({}, "stop", index=1),
        DONE,
    ]
    sent, reply = run(chunks)
    assert texts(sent) == {0: "one !", 1: "two ?"}
    assert [choice.terse for choice in reply.choices] == [("1",), ("2",)]
    both = {"index": 1, "delta": {"content": "<terse>x</terse>"}, "finish_reason": None}
    several = (
        b"data: " + json.dumps({"choices": [{**both, "index": 0, "delta": {"content": "a"}}, both]}).encode() + b"\n\n"
    )
    assert texts(run([several])[0]) == {0: "a", 1: ""}


def test_only_the_content_changes():
    raw = (
        b'event: x\r\ndata: {"id":"c" , "big":12345678901234567890123, "choices":[{"index":0,"delta":{"content":'
        b'"a<terse>b</terse>c", "other": [1.0 ]},"logprobs":{"content":[ {"token":"a"}]}}], "usage" '
        b': {"x":1.50}}\r\n\r\n'
    )
    sent, reply = run([raw])
    assert sent == (
        b'event: x\r\ndata: {"id":"c" , "big":12345678901234567890123, "choices":[{"index":0,"delta":{"content":'
        b'"ac", "other": [1.0 ]},"logprobs":{"content":[ {"token":"a"}]}}], "usage" : {"x":1.50}}\r\n\r\n'
    )
    assert reply.usage == b'{"x":1.50}'


def test_event_with_other_members_stays_without_its_text():
    tag = "<terse>x</terse>"
    assert payloads(run([event({"content": tag})])[0]) == []
    for chunk in (
        event({"role": "assistant", "content": tag}),
        event({"content": tag, "reasoning": "hm"}),
        event({"content": tag, "refusal": "no"}),
        event({"content": tag, "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f"}}]}),
        event({"content": tag}, "stop"),
        event({"content": tag}, usage={"total_tokens": 1}),
        event({"content": tag}, x_groq={"id": "1"}),
    ):
        (payload,) = payloads(run([chunk])[0])
        assert payload["choices"][0]["delta"]["content"] == ""
    with_logprobs = event({"content": tag}).replace(b'"logprobs": null', b'"logprobs": {"content": []}')
    (payload,) = payloads(run([with_logprobs])[0])
    assert payload["choices"][0]["logprobs"] == {"content": []}


def test_escaped_brackets_are_brackets():
    chunk = event({"content": "a<terse>x</terse>"}).replace(b"<", b"\\u003c").replace(b">", b"\\u003E")
    assert texts(run([chunk])[0]) == {0: "a"}
    assert texts(run([chunk.replace(b"\\u003c", b"\\u003C")])[0]) == {0: "a"}


def test_fences_are_seen_although_earlier_chunks_went_out_unread():
    pieces = ["```\n", "code\n", "<terse>in</terse>\n", "```\n", "<terse>out</terse>"]
    sent, reply = run(text_events(*pieces))
    assert texts(sent) == {0: "```\ncode\n<terse>in</terse>\n```\n"}
    assert reply.choices[0].terse == ("out",)


def test_line_ends_padding_comments_and_events_without_data():
    chunks = [
        b": comment\r\n\r\n",
        b'data:   {"choices":[{"index":0,"delta":{"content":"a<te"}}]}   \r\n\r\n',
        b"\r\n",
        b'data: {"choices":[{"index":0,\r\ndata: "delta":{"content":"rse>x</terse>b"}}]}\r\n\r\n',
        b"data: [DONE]\r\n\r\n",
    ]
    stream = b"".join(chunks)
    expected, reply = run(chunks)
    assert texts(expected) == {0: "ab"}
    assert expected.startswith(b": comment\r\n\r\n")
    assert expected.endswith(b"data: [DONE]\r\n\r\n")
    assert reply.is_done
    for size in (1, 2, 3, 11):
        assert run([stream[at : at + size] for at in range(0, len(stream), size)]) == (expected, reply)


def test_error_in_a_stream_follows_the_held_back_text():
    error = b'data: {"error":{"message":"boom"}}\n\n'
    sent, reply = run([*text_events("a <ter"), error])
    assert [list(each) for each in payloads(sent)][-1] == ["error"]
    assert texts(sent) == {0: "a <ter"}
    assert sent.endswith(error)
    assert reply.error == b'{"message":"boom"}'
    assert not reply.is_done


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"not an event stream at all < >",
        b"data: {not json <\n\n",
        b"data: [1,2]\n\n",
        b'data: "<"\n\n',
        b"\xff\xfe<\n\n",
        b'data: {"choices": "<"}\n\n',
        b'data: {"choices":[5,"<"]}\n\n',
        b"data: " + b"[" * 100_000 + b"<\n\n",
        b'data: {"choices":[{"delta":{"content":7,"x":"<"}}]}\n\n',
        b"<html>\r\n\r\n</html>",
        b'{"error":{"message":"<"}}',
        b'data: {"usage":null,"usage":5,"x":"<"}\n\n',
        b"data: {}\n\n\n\n\n",
    ],
)
def test_unknown_events_pass_through(junk: bytes):
    for chunks in ([junk], [bytes([byte]) for byte in junk[:300]] + [junk[300:]]):
        assert run(chunks)[0] == junk
        assert run(chunks, extract=NOTHING)[0] == junk


@pytest.mark.parametrize("size", [50_000, 100_000, 400_000])
def test_an_event_beyond_the_limit_goes_through(size: int):
    reader = ReplyStream(ClientView(tags=TERSE, strip_usage=True), max_event=70_000)
    huge = event({"content": "x" * 150_000})
    stream = b"".join([*text_events("a<terse>1</terse>", "<"), huge, *text_events("<terse>2</terse>"), DONE])
    sent = b"".join([reader.feed(stream[at : at + size]) for at in range(0, len(stream), size)]) + reader.close()
    assert huge in sent
    assert sent.endswith(DONE)
    assert texts(sent)[0].startswith("a<xxx")
    assert reader.reply.choices[0].terse[:1] == ("1",)


def test_lone_surrogates_in_two_halves():
    first, second = (
        b'data: {"choices":[{"index":0,"delta":{"content":"<b>\\ud83d"}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\ude00<terse>x</terse>"}}]}\n\n',
    )
    sent, reply = run([first, second])
    assert sent == first + second.replace(b"<terse>x</terse>", b"")
    assert json.loads(reply.choices[0].client_message)["content"] == "<b>\U0001f600"


@pytest.mark.parametrize(
    "chunk",
    [
        b'{"choices":"words","usage":{"prompt_tokens":1}}',
        b'{"choices":[{"index":"x","message":{"content":"words"}}],"usage":5}',
        b'{"role":"assistant","content":"words","usage":[5]}',
    ],
)
@pytest.mark.parametrize("extract", [TERSE, NOTHING])
def test_a_chunk_of_unknown_shape_with_usage_passes(chunk: bytes, extract: TagKinds):
    stream = b"data: " + chunk + b"\n\n" + DONE
    assert run([stream], extract=extract, strip_usage=True)[0] == stream


def test_usage_requested_by_tersely_alone_is_stripped():
    chunks = [
        event({"content": "a"}, usage=None),
        event({"content": ',"usage":null} <b>'}, usage=None),
        event({}, "stop", usage=None),
        b'data: {"id":"c1","choices":[],"usage":{"total_tokens":3}}\n\n',
        DONE,
    ]
    sent, reply = run(chunks, strip_usage=True)
    assert all("usage" not in payload for payload in payloads(sent))
    assert texts(sent) == {0: 'a,"usage":null} <b>'}
    assert reply.usage == b'{"total_tokens":3}'
    with_usage = [chunk for chunk in run(chunks)[0].split(b"\n\n") if b'"total_tokens"' in chunk]
    assert len(with_usage) == 1
    # Providers that report with the last words do so unasked.
    last = event({"content": "a"}, "stop", usage={"total_tokens": 3})
    assert run([last], strip_usage=True)[0] == last
    azure = b'data: {"choices":[],"prompt_filter_results":[{}]}\n\n'
    assert run([azure], strip_usage=True)[0] == azure


def test_the_stream_is_assembled_into_a_reply():
    chunks = [
        event({"role": "assistant", "reasoning_content": "h", "content": None}),
        event({"reasoning_content": "m"}),
        event(
            {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]}
        ),
        event({"tool_calls": [{"index": 0, "function": {"arguments": '{"x'}}]}),
        event({"tool_calls": [{"index": 0, "function": {"arguments": '":1}'}}]}),
        # Some compatible providers give every call the index 0.
        event({"tool_calls": [{"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}),
        event({}, "tool_calls"),
    ]
    reply = run(chunks)[1]
    assert json.loads(reply.choices[0].model_message) == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_content_in_parts():
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "h"}]}
    chunks = [
        event({"content": [thinking]}),
        event({"content": [{**thinking, "thinking": [{"type": "text", "text": "m"}]}]}),
        event({"content": [{"type": "text", "text": "a<terse>"}]}),
        event({"content": "x</terse>b"}),
        event({}, "stop"),
    ]
    sent, reply = run(chunks)
    assert texts(sent) == {0: "ab"}
    (choice,) = reply.choices
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    assert json.loads(choice.model_message)["content"] == [thought, {"type": "text", "text": "a<terse>x</terse>b"}]
    assert json.loads(choice.client_message)["content"] == [thought, {"type": "text", "text": "ab"}]


PIECES = st.lists(
    st.sampled_from(["<terse>", "</terse>", "<ter", "se>", "<", "a", "\n", "```", "```\n", "é", "</", "x y", ""]),
    max_size=15,
)


@settings(max_examples=300)
@given(PIECES, st.lists(st.integers(0, 10**5), max_size=12), st.booleans(), st.booleans())
def test_the_cuts_do_not_matter(pieces: list[str], places: list[int], crlf: bool, strip_usage: bool):
    stream = b"".join([*text_events(*pieces), event({}, "stop", usage=None), DONE])
    if crlf:
        stream = stream.replace(b"\n\n", b"\r\n\r\n")
    whole = run([stream], strip_usage=strip_usage)
    assert run(cut(stream, places), strip_usage=strip_usage) == whole
    (choice,) = whole[1].choices
    assert (json.loads(choice.model_message)["content"] or "") == "".join(pieces)
    assert (json.loads(choice.client_message)["content"] or "") == texts(whole[0])[0]


# Replies that are not streamed


def test_split_reply():
    body = (
        b'{"id":"c","model":"m", "choices" : [ {"index":0,"message":{"role":"assistant", '
        b'"content":"a<terse>x</terse>","n":1.0},'
        b'"finish_reason":"stop"},{"index":1, "message":{"content":"b"},"finish_reason":"length"}],"usage":{"a":1}}'
    )
    sent, reply = split_reply(body, ClientView(tags=TERSE))
    assert json.loads(sent)["choices"][0]["message"] == {"role": "assistant", "content": "a", "n": 1.0}
    assert b'{"index":1, "message":{"content":"b"},"finish_reason":"length"}' in sent
    assert [choice.terse for choice in reply.choices] == [("x",), ()]
    assert [choice.finish_reason for choice in reply.choices] == ["stop", "length"]
    assert (reply.id, reply.model, reply.usage, reply.is_done) == ("c", "m", b'{"a":1}', True)
    assert reply.choices[0].model_message == b'{"role":"assistant", "content":"a<terse>x</terse>","n":1.0}'
    assert split_reply(body, UNCHANGED)[0] is body


def test_split_reply_with_parts():
    parts = [{"type": "text", "text": "a<te"}, {"type": "text", "text": "rse>x</terse>b"}]
    body = json.dumps({"choices": [{"message": {"content": parts}}]}).encode()
    sent, reply = split_reply(body, ClientView(tags=TERSE))
    assert json.loads(sent)["choices"][0]["message"]["content"] == [{"type": "text", "text": "ab"}]
    assert reply.choices[0].terse == ("x",)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"choices":null}', b'{"choices":[1]}', b'{"choices":[{"message":5}]}']
)
def test_split_reply_passes_a_body_that_is_no_reply(body: bytes):
    unread = (body,) if body else ()
    assert split_reply(body, ClientView(tags=TERSE)) == (
        body,
        Reply(is_done=b"[" in body and body != b"[]", unread=unread),
    )


def test_split_reply_of_an_error():
    body = b'{"error":{"message":"<terse>x</terse>"}}'
    assert split_reply(body, ClientView(tags=TERSE)) == (body, Reply(error=b'{"message":"<terse>x</terse>"}'))


# State blocks


def test_state_block_is_stripped():
    pieces = ["Hi", " there.", "\n\n", "###", " STATE", "\n", "Goal", ": x", "\n", "Context: y"]
    sent, reply = run([*text_events(*pieces), event({}, "stop"), DONE], extract=STATE)
    assert sent == b"".join([*text_events("Hi", " there."), event({}, "stop"), DONE])
    (choice,) = reply.choices
    assert json.loads(choice.model_message)["content"] == "".join(pieces)
    assert json.loads(choice.client_message)["content"] == "Hi there."
    assert (choice.state, choice.terse) == ("Goal: x\nContext: y", ())


def test_line_ends_that_proved_to_be_text_go_out_as_they_came():
    chunks = [*text_events("Hi", "\n", "\n", "there ", "\n", "#", "# B"), event({}, "stop"), DONE]
    sent, reply = run(chunks, extract=STATE)
    assert sent == b"".join(chunks)
    assert reply.choices[0].state is None
    assert reply.choices[0].client_message == reply.choices[0].model_message


def test_tags_and_a_state_block_together():
    pieces = ["Done.", " <terse>did x</ter", "se>\n\n### ST", "ATE\nGoal: x"]
    sent, reply = run([*text_events(*pieces), event({}, "stop"), DONE], extract=BOTH)
    assert texts(sent) == {0: "Done. "}
    assert (reply.choices[0].terse, reply.choices[0].state) == (("did x",), "Goal: x")


def test_split_reply_with_a_state_block():
    text = "Done.\n\n### STATE\nGoal: x"
    body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
    sent, reply = split_reply(body, ClientView(tags=STATE))
    assert json.loads(sent)["choices"][0]["message"]["content"] == "Done."
    assert reply.choices[0].state == "Goal: x"
    assert split_reply(body, ClientView(tags=TERSE))[0] is body


@needs_recordings
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem[:60])
def test_recorded_streams_come_through_byte_for_byte_when_states_are_looked_for(path: Path):
    stream = path.read_bytes()
    expected = stream, run([stream])[1]
    for size in (7, 100, 1400, len(stream)):
        chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert run(chunks, extract=STATE) == expected
        assert run(chunks, extract=BOTH) == expected


STATE_PIECES = st.lists(
    st.sampled_from(
        ["### STATE", "\n### STATE\n", "#", "# B\n", "\n", "\r\n", " ", "a", "```", "```\n", "é", "x y", "", "<terse>"]
    ),
    max_size=15,
)


@settings(max_examples=300)
@given(STATE_PIECES, st.lists(st.integers(0, 10**5), max_size=12), st.booleans(), st.sampled_from([STATE, BOTH]))
def test_the_cuts_do_not_matter_to_states(pieces: list[str], places: list[int], crlf: bool, extract: TagKinds):
    stream = b"".join([*text_events(*pieces), event({}, "stop"), DONE])
    if crlf:
        stream = stream.replace(b"\n\n", b"\r\n\r\n")
    whole = run([stream], extract=extract)
    assert run(cut(stream, places), extract=extract) == whole
    (choice,) = whole[1].choices
    assert (json.loads(choice.model_message)["content"] or "") == "".join(pieces)
    assert (json.loads(choice.client_message)["content"] or "") == texts(whole[0])[0]


@pytest.mark.parametrize("gap", [b"\n", b"\n\n", b"\n\n\n"])
@pytest.mark.parametrize("extract", [NOTHING, TERSE])
def test_blank_lines_between_events_repeat_and_lose_nothing(gap: bytes, extract: TagKinds) -> None:
    plain = b'data: {"choices":[{"index":0,"delta":{"content":"word "},"finish_reason":null}]}\n\n'
    looked_at = plain.replace(b"word ", b'a < b \\"usage\\" ')
    stream = gap.join([plain, looked_at, plain, looked_at, plain, b"data: [DONE]\n\n"])
    whole, reply = run([stream], extract=extract, strip_usage=True)
    for place in range(len(stream)):
        sent, same = run([stream[:place], stream[place:]], extract=extract, strip_usage=True)
        assert sent.replace(b"\n", b"") == stream.replace(b"\n", b"") == whole.replace(b"\n", b"")
        assert payloads(sent) == payloads(stream)
        assert same == reply


@pytest.mark.parametrize("text", ["a # b", "a < b", "a b"])
@pytest.mark.parametrize("members", ["", ', "usage": null', ',"usage":{"a":1}'])
def test_the_time_for_a_block_of_many_events_is_linear(text: str, members: str) -> None:
    delta = json.dumps({"index": 0, "delta": {"content": text}, "finish_reason": None})
    event = f'data: {{"choices":[{delta}]{members}}}\n\n'.encode()
    stream = event * (1024 * 1024 // len(event))
    began = time.process_time()
    sent, _ = run([stream], extract=BOTH, strip_usage=True)
    assert time.process_time() - began < 2.5
    assert texts(sent) == texts(stream)


def test_data_on_several_lines_is_written_on_one() -> None:
    stream = b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"two"}}], "usage":null}\n\n'
    sent, _ = run([stream], strip_usage=True)
    assert payloads(sent) == [{"choices": [{"index": 0, "delta": {"content": "two"}}]}]
