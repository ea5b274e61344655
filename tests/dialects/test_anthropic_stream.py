"""Replies in Anthropic's format on their way to the client: untouched where nothing is taken out, as if never tagged
where something is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.dialects.anthropic.read import read_message, read_reply, read_usage
from tersely.dialects.anthropic.stream import ReplyStream
from tersely.dialects.anthropic.whole import split_reply
from tersely.dialects.anthropic.write import as_input, restore_reply
from tersely.dialects.dialect import UNCHANGED, ClientView, Reply
from tersely.dialects.wire.sse import SseDecoder
from tersely.domain.text.tags import NOTHING, TagKinds
from tests.dialects.recordings import MISSING, cut, replies

STREAMS = replies("anthropic.messages", stream=True)
BODIES = replies("anthropic.messages", stream=False)
TERSE = TagKinds(terse=True)
STATE = TagKinds(state=True)
BOTH = TagKinds(terse=True, state=True)
needs_recordings = pytest.mark.skipif(not STREAMS, reason=MISSING)


def run(chunks: list[bytes], *, extract: TagKinds = TERSE) -> tuple[bytes, Reply]:
    reader = ReplyStream(ClientView(tags=extract))
    sent = b"".join([reader.feed(chunk) for chunk in chunks])
    return sent + reader.close(), reader.reply


def payloads(stream: bytes) -> list[dict[str, Any]]:
    decoder = SseDecoder()
    return [json.loads(event.data) for event in decoder.feed(stream) + decoder.close() if event.data]


def assembled(stream: bytes) -> list[dict[str, Any]]:
    """Return the message that the official SDKs put together from a stream: blocks are appended, deltas go to the block
    of their index.
    """
    blocks: list[dict[str, Any]] = []
    for payload in payloads(stream):
        if payload["type"] == "content_block_start":
            assert payload["index"] == len(blocks)
            blocks.append(payload["content_block"])
        elif payload["type"] == "content_block_delta":
            _grow(blocks[payload["index"]], payload["delta"])
    for block in blocks:
        if "partial" in block:
            block["input"] = json.loads(block.pop("partial") or "{}")
    return blocks


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            block["partial"] = block.get("partial", "") + delta["partial_json"]
        case "citations_delta":
            block["citations"] = [*(block.get("citations") or []), delta["citation"]]
        case other:
            raise AssertionError(other)


def event(payload: dict[str, Any]) -> bytes:
    return f"event: {payload['type']}\ndata: {json.dumps(payload, separators=(',', ':'))}\n\n".encode()


def delta(text: str, index: int = 0) -> bytes:
    return event({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}})


def start(index: int = 0, **block: Any) -> bytes:
    return event(
        {"type": "content_block_start", "index": index, "content_block": block or {"type": "text", "text": ""}}
    )


def stop(index: int = 0) -> bytes:
    return event({"type": "content_block_stop", "index": index})


def words(*pieces: str, index: int = 0) -> list[bytes]:
    return [start(index), *(delta(piece, index) for piece in pieces), stop(index)]


USAGE = {"input_tokens": 5, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 100, "output_tokens": 1}
HEAD = event(
    {
        "type": "message_start",
        "message": {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": USAGE},
    }
)
PING = event({"type": "ping"})
LAST = event(
    {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"input_tokens": None, "output_tokens": 9},
    }
)
DONE = event({"type": "message_stop"})
TAG = "<terse>did x</terse>"


# Recorded provider streams


@needs_recordings
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem[:60])
def test_recorded_streams_come_through_byte_for_byte(path: Path):
    stream = path.read_bytes()
    whole, reply = run([stream])
    assert whole == stream
    for extract in (NOTHING, TERSE, BOTH):
        for size in (1, 7, 100, 1400):
            chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
            assert run(chunks, extract=extract) == (whole, reply)
    (choice,) = reply.choices
    assert choice.client_message is choice.model_message
    message = json.loads(choice.model_message)
    assert message["role"] == "assistant"
    assert message["content"] == assembled(stream)
    assert reply.is_done
    assert choice.finish_reason
    usage = read_usage(reply.usage)
    assert usage.input
    assert usage.output


@needs_recordings
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_recorded_streams_with_planted_tags_come_out_as_without(data: st.DataObject):
    stream = data.draw(st.sampled_from(STREAMS)).read_bytes()
    blocks = assembled(stream)
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if any("```" in text or "~~~" in text for text in texts):
        return  # a tag inside of a fence is text
    planted = _plant(stream, data)
    sent, reply = run(cut(planted, data.draw(st.lists(st.integers(0, 10**6), max_size=30))))
    assert assembled(sent) == blocks
    assert json.loads(reply.choices[0].client_message)["content"] == blocks
    assert json.loads(reply.choices[0].model_message)["content"] == assembled(planted)
    # The events without words are the very same.
    assert [each for each in payloads(sent) if each["type"] != "content_block_delta"] == [
        each for each in payloads(stream) if each["type"] != "content_block_delta"
    ]


def _plant(stream: bytes, data: st.DataObject) -> bytes:
    """The stream with tags in the texts of some of its deltas, which may be cut into several events then."""
    events = [raw + b"\n\n" for raw in stream.split(b"\n\n") if raw.strip()]
    places = [place for place, raw in enumerate(events) if b'"text_delta"' in raw and _can_hold(raw)]
    for place in data.draw(st.lists(st.sampled_from(places), max_size=3, unique=True)) if places else ():
        (payload,) = payloads(events[place])
        text = payload["delta"]["text"]
        at = data.draw(st.integers(0, len(text)))
        inside = data.draw(st.sampled_from(["did x", "", "a < b", "x\ny", "é"]))
        tagged = f"{text[:at]}<terse>{inside}</terse>{text[at:]}"
        ends = sorted(data.draw(st.lists(st.integers(0, len(tagged)), max_size=4)))
        pieces = [tagged[start:end] for start, end in zip([0, *ends], [*ends, len(tagged)], strict=True)]
        events[place] = b"".join(delta(piece, payload["index"]) for piece in pieces)
    return b"".join(events)


def _can_hold(raw: bytes) -> bool:
    """A tag beside what may be half a tag, or in blanks alone, is another matter."""
    text = payloads(raw)[0]["delta"]["text"]
    return bool(text.strip()) and "<" not in text and ">" not in text and "/" not in text


@needs_recordings
@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem[:60])
def test_recorded_bodies_come_through_byte_for_byte(path: Path):
    body = path.read_bytes()
    for extract in (NOTHING, TERSE, BOTH):
        sent, reply = split_reply(body, ClientView(tags=extract))
        assert sent is body
        (choice,) = reply.choices
        expected = json.loads(body)
        assert json.loads(choice.model_message)["content"] == expected["content"]
        assert (choice.finish_reason, reply.id) == (expected["stop_reason"], expected["id"])
        assert read_usage(reply.usage).input


# Streams of our own


def test_tags_are_stripped_and_the_rest_keeps_its_bytes():
    before = [HEAD, start(), PING, delta("Hi "), delta("there")]
    after = [stop(), LAST, DONE]
    sent, reply = run([*before, delta("\n<ter"), delta("se>did x</"), delta("terse>"), *after])
    assert sent == b"".join([*before, delta("\n"), *after])
    (choice,) = reply.choices
    assert json.loads(choice.model_message)["content"][0]["text"] == f"Hi there\n{TAG}"
    assert json.loads(choice.client_message)["content"][0]["text"] == "Hi there\n"
    assert (choice.terse, choice.finish_reason, reply.is_done) == (("did x",), "end_turn", True)
    assert (reply.id, reply.model) == ("msg_1", "m")
    usage = read_usage(reply.usage)
    assert (usage.input, usage.cached, usage.output) == (125, 100, 9)


def test_state_blocks_are_stripped():
    sent, reply = run([HEAD, *words("Hello.\n\n", "### STA", "TE\ntask: x", "\nnext: y"), LAST, DONE], extract=BOTH)
    assert assembled(sent) == [{"type": "text", "text": "Hello."}]
    assert reply.choices[0].state == "task: x\nnext: y"


def test_text_that_only_begins_like_a_tag_passes_unchanged():
    chunks = [HEAD, *words("a ", "<", "b> ", "<", "terse", ">x", " <te"), LAST, DONE]
    for extract in (TERSE, BOTH):
        sent, reply = run(chunks, extract=extract)
        assert sent == b"".join(chunks)
        assert reply.choices[0].client_message is reply.choices[0].model_message


def test_a_text_without_a_word_left_is_not_shown():
    """The provider refuses empty texts, and clients send back what they were shown."""
    thought = [
        start(0, type="thinking", thinking="", signature=""),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
        event({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s=="}}),
        stop(0),
    ]
    call = start(2, type="tool_use", id="c", name="f", input={})
    json_delta = {"type": "input_json_delta", "partial_json": '{"a": 1.0}'}
    pieces = event({"type": "content_block_delta", "index": 2, "delta": json_delta})
    chunks = [HEAD, *thought, *words("\n", TAG, "\n", index=1), PING, call, pieces, stop(2), LAST, DONE]
    sent, reply = run(chunks)
    shown = assembled(sent)
    assert [block["type"] for block in shown] == ["thinking", "tool_use"]
    assert shown[1]["input"] == {"a": 1.0}
    assert PING in sent
    (choice,) = reply.choices
    assert json.loads(choice.client_message)["content"] == shown
    model = json.loads(choice.model_message)["content"]
    assert model[1] == {"type": "text", "text": f"\n{TAG}\n"}
    assert b'"input":{"a": 1.0}' in choice.model_message
    # What the client sends back gets the model's words again, in their place.
    restored = restore_reply(choice.client_message, choice.model_message)
    assert json.loads(restored)["content"] == model


def test_blank_text_passes_unchanged():
    chunks = [HEAD, *words("\n", "\n"), *words(index=1), *words("a", index=2), LAST, DONE]
    assert run(chunks)[0] == b"".join(chunks)


def test_a_block_that_begins_with_its_text():
    chunks = [HEAD, start(type="text", text=f"{TAG}a"), delta("b"), stop(), LAST, DONE]
    sent, reply = run(chunks)
    assert assembled(sent) == [{"type": "text", "text": "ab"}]
    assert json.loads(reply.choices[0].model_message)["content"] == [{"type": "text", "text": f"{TAG}ab"}]


def test_only_the_text_changes():
    raw = (
        b": hello\r\nevent: content_block_delta\r\nid: 7\r\ndata:  "
        b'{"type":"content_block_delta","index":0,"big":12345678901234567890123, '
        b'"delta":{"type":"text_delta","x": 1.50,"text":"a<terse>b</terse>\\u00e9"}   }  \r\n\r\n'
    )
    sent, _ = run([start(), raw, stop()])
    assert (
        sent
        == start()
        + (
            b": hello\r\nevent: content_block_delta\r\nid: 7\r\ndata:  "
            b'{"type":"content_block_delta","index":0,"big":12345678901234567890123, '
            b'"delta":{"type":"text_delta","x": 1.50,"text":"a\\u00e9"}   }  \r\n\r\n'
        )
        + stop()
    )


def test_escaped_brackets_and_halves_of_characters():
    first = delta("a?").replace(b"?", b"\\ud83d")
    second = delta(f"?{TAG}").replace(b"?", b"\\ude00").replace(b"<", b"\\u003c")
    sent, reply = run([HEAD, start(), first, second, stop(), LAST, DONE])
    assert first in sent
    assert b"terse" not in sent
    assert reply.choices[0].terse == ("did x",)
    assert read_reply(reply.choices[0].model_message).text.startswith("a")


def test_citations_and_unknown_events_keep_their_places():
    cite = {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {"n": 1.0}}}
    odd = event({"type": "content_block_delta", "index": 0, "delta": {"type": "odd_delta", "content": "z", "n": [1]}})
    new = event({"type": "brand_new", "index": 0, "x": 1})
    chunks = [HEAD, start(), delta("a"), event(cite), new, odd, delta("b"), stop(), LAST, DONE]
    sent, reply = run(chunks)
    assert sent == b"".join(chunks)
    (block,) = json.loads(reply.choices[0].model_message)["content"]
    assert block == {"type": "text", "text": "ab", "content": "z", "n": [1], "citations": [{"n": 1.0}]}


@pytest.mark.parametrize("ending", [[stop(), LAST, DONE], [LAST, DONE], [DONE], []])
def test_an_unclosed_tag_is_text(ending: list[bytes]):
    chunks = [HEAD, start(), delta("a <terse>b"), *ending]
    sent, reply = run(chunks)
    assert sent == b"".join(chunks)
    assert reply.is_done == (DONE in ending)
    assert bool(reply.choices[0].finish_reason) == (LAST in ending)


def test_error_in_a_stream_follows_the_held_back_text():
    error = event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    chunks = [HEAD, start(), delta("a <ter"), error]
    sent, reply = run(chunks)
    assert sent == b"".join(chunks)
    assert json.loads(reply.error)["type"] == "overloaded_error"
    assert not reply.is_done
    alone = run([error])[1]
    assert alone.choices == ()
    assert alone.error


def test_a_stream_that_breaks_off():
    thought = start(0, type="thinking", thinking="half a th", signature="")
    call = start(2, type="tool_use", id="c", name="f", input={})
    json_delta = {"type": "input_json_delta", "partial_json": '{"a": '}
    pieces = event({"type": "content_block_delta", "index": 2, "delta": json_delta})
    chunks = [HEAD, thought, *words("words", index=1), call, pieces, b'event: content_block_delta\ndata: {"type":"con']
    for extract in (NOTHING, TERSE):
        sent, reply = run(chunks, extract=extract)
        assert sent == b"".join(chunks)
        (choice,) = reply.choices
        assert (choice.finish_reason, reply.is_done) == ("", False)
        assert b'{\\"a\\": ' in choice.model_message  # nothing of it is lost
        assert json.loads(as_input(choice.model_message)) == {
            "role": "assistant",
            "content": [{"type": "text", "text": "words"}],
        }


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"not an event stream at all < >",
        b"data: {not json <\n\n",
        b"data: [1,2]\n\n",
        b'data: "<"\n\n',
        b"\xff\xfe<\n\n",
        b'data: {"type":"content_block_delta","index":"0","delta":5}\n\n',
        b'data: {"type":"content_block_delta","index":7,"delta":{"type":"text_delta","text":"<"}}\n\n',
        b'data: {"type":"content_block_start","index":0,"content_block":"<"}\n\n',
        b'data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":7}}\n\n',
        b'data: {"type":"message_delta","delta":null,"usage":[]}\n\n',
        b"data: " + b"[" * 100_000 + b"<\n\n",
        b"<html>\r\n\r\n</html>",
        b'{"error":{"message":"<"}}',
        b"data: {}\n\n\n\n\n",
    ],
)
def test_unknown_events_pass_through(junk: bytes):
    for chunks in ([junk], [bytes([byte]) for byte in junk[:300]] + [junk[300:]]):
        for extract in (NOTHING, TERSE):
            assert run(chunks, extract=extract)[0] == junk


@pytest.mark.parametrize("size", [50_000, 100_000, 400_000])
def test_an_event_beyond_the_limit_goes_through(size: int):
    reader = ReplyStream(ClientView(tags=TERSE), max_event=70_000)
    huge = delta("x" * 150_000)
    before = [HEAD, start(), delta("a" + TAG), delta("<")]
    stream = b"".join([*before, huge, stop(), *words("b", TAG, index=1), LAST, DONE])
    sent = b"".join([reader.feed(stream[at : at + size]) for at in range(0, len(stream), size)]) + reader.close()
    assert huge in sent
    assert sent.endswith(delta("b", 1) + stop(1) + LAST + DONE)
    assert b"terse" not in sent
    assert reader.reply.choices[0].terse == ("did x", "did x")


def test_a_stream_without_order_loses_nothing():
    late = [HEAD, *words("a <ter"), delta("b <ter"), start(), delta("c <ter"), start(), LAST, delta("d <ter"), DONE]
    for extract in (NOTHING, TERSE, BOTH):
        assert run(late, extract=extract)[0] == b"".join(late)


PIECES = st.lists(
    st.sampled_from(["<terse>", "</terse>", "<ter", "se>", "<", "a", "\n", "```", "```\n", "é", "</", "x y", "", " ",
                     "### STATE\n", "# x\n"]),
    max_size=15,
)  # fmt: skip


@settings(max_examples=300)
@given(PIECES, PIECES, st.lists(st.integers(0, 10**5), max_size=12), st.booleans(), st.sampled_from([TERSE, BOTH]))
def test_the_cuts_do_not_matter(first: list[str], second: list[str], places: list[int], crlf: bool, extract: TagKinds):
    stream = b"".join([HEAD, *words(*first), PING, *words(*second, index=1), LAST, DONE])
    whole = run([stream], extract=extract)
    if crlf:
        # Lines that end with a line feed alone are read in another way, with the same result.
        stream, lines = stream.replace(b"\n", b"\r\n"), whole
        whole = run([stream], extract=extract)
        assert whole == (lines[0].replace(b"\n", b"\r\n"), lines[1])
    assert run(cut(stream, places), extract=extract) == whole
    (choice,) = whole[1].choices
    assert [block["text"] for block in json.loads(choice.model_message)["content"]] == ["".join(first), "".join(second)]
    shown = json.loads(choice.client_message)["content"]
    assert shown == assembled(whole[0])
    assert (
        split_reply(_as_body(choice.model_message), ClientView(tags=extract))[1].choices[0].client_message
        == choice.client_message
    )
    if choice.client_message != choice.model_message:
        echo = read_message(restore_reply(choice.client_message, choice.model_message))
        assert echo.parts == read_message(as_input(choice.model_message)).parts


def _as_body(message: bytes) -> bytes:
    return message[:-1] + b',"type":"message"}'


# Replies that are not streamed


def test_split_reply():
    body = (
        b'{"id":"msg","model":"m", "content" : [ {"type":"thinking","thinking":"","signature":"s"},'
        b'{"text":"a<terse>x</terse>","type":"text", "n":1.0}, {"type":"text","text":"<terse>y</terse> "}],'
        b'"stop_reason":"max_tokens","usage":{"output_tokens": 1}, "x":1.0}'
    )
    sent, reply = split_reply(body, ClientView(tags=TERSE))
    assert sent == (
        b'{"id":"msg","model":"m", "content" : [{"type":"thinking","thinking":"","signature":"s"},'
        b'{"text":"a","type":"text","n":1.0}],"stop_reason":"max_tokens","usage":{"output_tokens": 1}, "x":1.0}'
    )
    (choice,) = reply.choices
    assert choice.terse == ("x", "y")
    assert (choice.finish_reason, reply.is_done, reply.usage) == ("max_tokens", True, b'{"output_tokens": 1}')
    assert split_reply(body, UNCHANGED)[0] is body


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"content":null}', b'{"content":[1]}'])
def test_split_reply_passes_a_body_that_is_no_reply(body: bytes):
    assert split_reply(body, ClientView(tags=TERSE)) == (body, Reply(unread=(body,) if body else ()))


def test_split_reply_of_an_error():
    body = b'{"type":"error","error":{"type":"api_error","message":"<terse>x</terse>"}}'
    assert split_reply(body, ClientView(tags=TERSE)) == (
        body,
        Reply(error=b'{"type":"api_error","message":"<terse>x</terse>"}'),
    )
