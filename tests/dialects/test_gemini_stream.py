"""Gemini's replies on their way to the client, in both framings and both wrappings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.dialects.dialect import ClientView, Dialect, Reply
from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.gemini.stream import ReplyStream
from tersely.dialects.gemini_gca.dialect import GEMINI_GCA
from tersely.domain.text.tags import NOTHING, TagKinds
from tests.dialects.gemini_traffic import (
    REPLIES,
    as_array,
    as_sse,
    event,
    needs_recordings,
    others,
    payloads,
    text,
    texts,
    wrap_stream,
    wrapped,
)
from tests.dialects.recordings import cut

TERSE = TagKinds(terse=True)
BOTH = TagKinds(terse=True, state=True)

FRAMINGS: list[Callable[[Sequence[dict[str, Any]]], bytes]] = [as_sse, as_array]
by_framing = pytest.mark.parametrize("frame", FRAMINGS, ids=["sse", "array"])


def run(chunks: Sequence[bytes], extract: TagKinds = TERSE, dialect: Dialect = GEMINI) -> tuple[bytes, Reply]:
    reader = dialect.open_stream(ClientView(tags=extract, strip_usage=True))
    sent = b"".join([reader.feed(chunk) for chunk in chunks])
    return sent + reader.close(), reader.reply


def message(reply: Reply, *, of_client: bool = False) -> Any:
    (choice,) = reply.choices
    return json.loads(choice.client_message if of_client else choice.model_message)


# Recorded provider replies


@needs_recordings
@pytest.mark.parametrize("dialect", [GEMINI, GEMINI_GCA], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("path", REPLIES, ids=lambda path: path.stem[:60])
def test_recorded_replies_come_through_byte_for_byte(path: Path, dialect: Dialect):
    stream = path.read_bytes()
    if dialect is GEMINI_GCA:
        stream = wrap_stream(stream)
    whole, reply = run([stream], dialect=dialect)
    assert whole == stream
    for extract in (NOTHING, TERSE, BOTH):
        for size in (1, 7, 100, 1400):
            chunks = [stream[start : start + size] for start in range(0, len(stream), size)]
            is_same = run(chunks, extract, dialect) == (whole, reply)
            assert is_same, size  # to show the difference of long bytes takes minutes
        assert dialect.split_reply(stream, ClientView(tags=extract))[0] == whole
    assert reply.is_done
    assert dialect.read_usage(reply.usage).output
    last = payloads(stream)[-1]
    assert json.loads(reply.usage) == last.get("response", last)["usageMetadata"]
    for choice in reply.choices:
        assert choice.client_message == choice.model_message
        assert dialect.read_reply(choice.model_message).text.replace("\n", "") == texts(stream)[choice.index].replace(
            "\n", ""
        )


@needs_recordings
@pytest.mark.parametrize("path", REPLIES, ids=lambda path: path.stem[:60])
def test_signatures_and_calls_of_recorded_replies_stay_whole(path: Path):
    stream = path.read_bytes()
    _, reply = run([stream])
    parts = json.loads(reply.choices[0].model_message)["parts"]
    assert [part for part in parts if part.keys() - {"text", "thought"}] == [
        part
        for payload in payloads(stream)
        for part in payload["candidates"][0].get("content", {}).get("parts", ())
        if part.keys() - {"text", "thought"}
    ]


@needs_recordings
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_recorded_streams_with_planted_tags_come_out_as_without(data: st.DataObject):
    stream = data.draw(st.sampled_from(REPLIES)).read_bytes()
    events = payloads(stream)
    plain = texts(stream)
    if "```" in plain.get(0, "") or "~~~" in plain.get(0, ""):
        return  # a tag inside of a fence is text
    tags = data.draw(st.lists(st.sampled_from(["did x", "", "a < b", "x\ny", "é😀"]), min_size=1, max_size=3))
    unplanted = words_in(events)
    if len(unplanted) < len(tags):
        return
    for inside in tags:
        part = unplanted.pop(data.draw(st.integers(0, len(unplanted) - 1)))
        plant(events, part, f"<terse>{inside}</terse>", data)
    frame = data.draw(st.sampled_from(FRAMINGS))
    dialect = data.draw(st.sampled_from([GEMINI, GEMINI_GCA]))
    sending = frame(wrapped(events) if dialect is GEMINI_GCA else events)
    sent, reply = run(cut(sending, data.draw(st.lists(st.integers(0, 10**6), max_size=30))), dialect=dialect)
    assert texts(sent) == plain
    assert others(sent) == others(stream)
    assert "<terse>" in texts(sending)[0]
    assert sorted(reply.choices[0].terse) == sorted(filter(None, (" ".join(tag.split()) for tag in tags)))
    assert dialect.read_reply(reply.choices[0].client_message).text.replace("\n", "") == plain[0].replace("\n", "")
    assert "".join(part.get("text", "") for part in json.loads(reply.choices[0].model_message)["parts"])
    assert run([sending], dialect=dialect)[1] == reply


def words_in(events: list[Any]) -> list[dict[str, Any]]:
    """The parts of the first candidate into which a tag can be planted."""
    parts = [part for each in events for part in each["candidates"][0].get("content", {}).get("parts", ())]
    return [part for part in parts if part.keys() == {"text"} and "<" not in part["text"]]


def plant(events: list[Any], part: dict[str, Any], tag: str, data: st.DataObject) -> None:
    """Put ``tag`` somewhere into the words of ``part``, in one piece or over parts and events."""
    place, parts, at = next(
        (place, parts, at)
        for place, each in enumerate(events)
        for parts in [each["candidates"][0].get("content", {}).get("parts", ())]
        for at, other in enumerate(parts)
        if other is part
    )
    words = parts[at]["text"]
    where = data.draw(st.integers(0, len(words)))
    inside = data.draw(st.integers(0, len(tag)))
    first, second = words[:where] + tag[:inside], tag[inside:] + words[where:]
    how = data.draw(st.sampled_from(["whole", "parts", "events"]))
    if how == "whole":
        parts[at] = text(first + second)
    elif how == "parts":
        parts[at : at + 1] = [text(first), text(second)]
    else:
        later = events[place]["candidates"][0]
        before = event(*parts[:at], text(first), index=later.get("index", 0))
        after = {**later, "content": {"parts": [text(second), *parts[at + 1 :]], "role": "model"}}
        events[place : place + 1] = [before, {**events[place], "candidates": [after]}]


# Made up


@by_framing
def test_a_tag_split_between_two_parts_of_one_event(frame: Callable[..., bytes]):
    events = [event(text("Hi <ter"), text("se>did x</terse> you")), event(text("!"), finish="STOP")]
    sent, reply = run([frame(events)])
    assert texts(sent) == {0: "Hi  you!"}
    assert reply.choices[0].terse == ("did x",)
    assert message(reply)["parts"] == [text("Hi <terse>did x</terse> you!")]
    assert message(reply, of_client=True)["parts"] == [text("Hi  you!")]


@by_framing
def test_candidates_are_texts_of_their_own(frame: Callable[..., bytes]):
    events = [
        event(text("a <terse>x"), index=0),
        event(text("b <ter"), index=1),
        event(text("</terse> c"), finish="STOP", index=0),
        event(text("m d"), finish="STOP", index=1),
    ]
    sent, reply = run([frame(events)])
    assert texts(sent) == {0: "a  c", 1: "b <term d"}
    assert [choice.terse for choice in reply.choices] == [("x",), ()]


def test_text_that_only_begins_like_a_tag_passes_unchanged():
    stream = as_sse([event(text("a <ter")), event({"functionCall": {"name": "f", "args": {}}}), event(text("m"))])
    reader = ReplyStream(ClientView(tags=TERSE))
    assert reader.feed(stream[:-10]) == b""
    assert reader.feed(stream[-10:]) == stream


def test_event_of_a_tag_alone_is_dropped():
    events = [event(text("Hi")), event(text("<terse>x</terse>")), event(text(""), finish="STOP")]
    assert run([as_sse(events)])[0] == as_sse([events[0], events[2]])
    last = [event(text("Hi")), event(text("<terse>x</terse>"), finish="STOP", usageMetadata={"promptTokenCount": 1})]
    sent, reply = run([as_sse(last)])
    assert payloads(sent)[1]["candidates"][0] == {
        **last[1]["candidates"][0],
        "content": {"parts": [text("")], "role": "model"},
    }
    assert json.loads(reply.usage) == {"promptTokenCount": 1}


def test_tag_beside_a_call_is_stripped_and_the_signature_stays():
    call = {"functionCall": {"name": "f", "args": {"x": 1.0}}, "thoughtSignature": "c2ln"}
    sent, reply = run(
        [as_sse([event(text("<terse>x</terse>"), call, text("", thoughtSignature="b3Ro"), finish="STOP")])]
    )
    assert payloads(sent)[0]["candidates"][0]["content"]["parts"] == [call, text("", thoughtSignature="b3Ro")]
    assert b'"args": {"x": 1.0}' in sent
    assert message(reply)["parts"][0] == text("<terse>x</terse>")


def test_thoughts_are_not_looked_into():
    stream = as_sse([event(text("<terse>x</terse>", thought=True)), event(text("Hi"), finish="STOP")])
    sent, reply = run([stream])
    assert sent == stream
    assert message(reply)["parts"] == [text("<terse>x</terse>", thought=True), text("Hi")]


@by_framing
def test_a_state_block_at_the_end(frame: Callable[..., bytes]):
    events = [event(text("Done.\n")), event(text("\n### STATE\ngoal: x\n")), event(text("next: y"), finish="STOP")]
    sent, reply = run([frame(events)], BOTH)
    assert texts(sent) == {0: "Done."}
    assert reply.choices[0].state == "goal: x\nnext: y"
    assert "### STATE" in message(reply)["parts"][0]["text"]


@by_framing
def test_error_in_a_stream_follows_the_held_back_text(frame: Callable[..., bytes]):
    error = {"error": {"code": 503, "message": "overloaded", "status": "UNAVAILABLE"}}
    stream = frame([event(text("a <terse>b")), error])
    sent, reply = run(cut(stream, list(range(0, len(stream), 3))))
    assert sent == stream
    assert json.loads(reply.error) == error["error"]
    assert not reply.is_done


@pytest.mark.parametrize(
    "events", [[{"error": {"code": 400, "message": "no", "status": "X"}}], [{"candidates": 5}], [{}]]
)
@by_framing
def test_a_body_that_is_no_reply_passes_through(events: list[dict[str, Any]], frame: Callable[..., bytes]):
    sent, reply = run([frame(events)])
    assert sent == frame(events)
    assert reply.choices == ()
    assert not reply.is_done


def test_a_blocked_prompt_is_an_end():
    stream = as_sse([{"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}}])
    sent, reply = run([stream])
    assert (sent, reply.is_done, reply.choices) == (stream, True, ())
    assert GEMINI.read_usage(reply.usage).input == 4


@by_framing
def test_broken_off_stream_is_not_done(frame: Callable[..., bytes]):
    whole = frame([event(text("Hi <terse>x")), event(text("y</terse>"), finish="STOP")])
    for end in range(len(whole)):
        sent, reply = run([whole[:end]])
        if not reply.is_done:
            assert whole.startswith(sent)
            assert sent == whole[:end]


def test_a_reply_that_is_not_streamed():
    body = json.dumps(event(text("Hi<terse>x</terse>"), finish="STOP", more=[1.0]), indent=1).encode()
    sent, reply = GEMINI.split_reply(body, ClientView(tags=TERSE))
    assert texts(sent) == {0: "Hi"}
    assert json.loads(sent)["more"] == [1.0]
    assert (reply.id, reply.model, reply.is_done, reply.choices[0].terse) == ("r1", "m", True, ("x",))
    assert GEMINI.split_reply(b"not json", ClientView(tags=TERSE)) == (b"not json", Reply(unread=(b"not json",)))


@pytest.mark.parametrize(
    ("stream", "unread"),
    [
        (b"", ()),
        (b"  \n", ()),
        (b"data: nonsense\n\n", (b"nonsense",)),
        (b": hi\n\n", ()),
        (b"<html>", (b"<html>",)),
        (b"\xff\xfe", (b"\xff\xfe",)),
        (b"[", ()),
        (b"[\n]", ()),
    ],
)
def test_anything_else_goes_through(stream: bytes, unread: tuple[bytes, ...]):
    for extract in (NOTHING, TERSE):
        assert run(cut(stream, list(range(len(stream)))), extract) == (stream, Reply(unread=unread))


def test_an_event_beyond_the_limit_goes_through():
    for frame in FRAMINGS:
        stream = frame([event(text("a <terse>")), event(text("x" * 2000)), event(text("<terse>y</terse>"))])
        reader = ReplyStream(ClientView(tags=TERSE), max_event=1000)
        assert (
            b"".join(reader.feed(piece) for piece in cut(stream, list(range(0, len(stream), 50)))) + reader.close()
            == stream
        )


@given(
    st.lists(st.text(alphabet='a<terse>/\n#{}[]\\"é😀 ', max_size=30), min_size=1, max_size=6),
    st.lists(st.integers(0, 10**6), max_size=20),
    st.sampled_from([NOTHING, TERSE, BOTH]),
    st.sampled_from(FRAMINGS),
)
def test_where_a_stream_is_cut_makes_no_difference(
    pieces: list[str], places: list[int], extract: TagKinds, frame: Callable[..., bytes]
):
    stream = frame([*(event(text(piece)) for piece in pieces), event(text(""), finish="STOP")])
    assert run(cut(stream, places), extract) == run([stream], extract)
    sent, reply = run([stream], extract)
    whole = GEMINI.split_reply(
        json.dumps(event(text("".join(pieces)), finish="STOP")).encode(), ClientView(tags=extract)
    )[1]
    assert texts(sent)[0] == GEMINI.read_reply(whole.choices[0].client_message).text
    assert (reply.choices[0].terse, reply.choices[0].state) == (whole.choices[0].terse, whole.choices[0].state)
