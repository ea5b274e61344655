"""Replies in OpenAI's responses format on their way to the client: untouched where nothing is taken out, as if never
tagged where something is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.dialects.dialect import ClientView, Overflow, Reply
from tersely.dialects.errors import classify_error
from tersely.dialects.openai_responses.read import read_message, read_usage
from tersely.dialects.openai_responses.stream import ReplyStream
from tersely.dialects.openai_responses.whole import split_reply
from tersely.dialects.openai_responses.write import as_input
from tersely.dialects.wire.sse import SseDecoder
from tersely.domain.text.tags import NOTHING, TagKinds
from tests.dialects.recordings import MISSING, cut, replies

STREAMS = replies("openai.responses", stream=True)
BODIES = replies("openai.responses", stream=False)
TERSE = TagKinds(terse=True)
BOTH = TagKinds(terse=True, state=True)
needs_recordings = pytest.mark.skipif(not STREAMS, reason=MISSING)

TAG = "<terse>did x</terse>"


def run(
    chunks: list[bytes], *, extract: TagKinds = TERSE, own_request: bytes = b"", **more: Any
) -> tuple[bytes, Reply]:
    reader = ReplyStream(ClientView(tags=extract, own_request=own_request), **more)
    sent = b"".join([reader.feed(chunk) for chunk in chunks])
    return sent + reader.close(), reader.reply


def payloads(stream: bytes) -> list[dict[str, Any]]:
    decoder = SseDecoder()
    return [json.loads(event.data) for event in decoder.feed(stream) + decoder.close() if event.data]


def assembled(stream: bytes) -> dict[tuple[int, int], str]:
    """The texts that a client puts together from the deltas."""
    texts: dict[tuple[int, int], str] = {}
    for each in payloads(stream):
        if each.get("type") == "response.output_text.delta":
            place = each["output_index"], each["content_index"]
            texts[place] = texts.get(place, "") + each["delta"]
    return texts


def ended(stream: bytes) -> list[dict[str, Any]]:
    """The items as the events that end them repeat them."""
    return [each["item"] for each in payloads(stream) if each["type"] == "response.output_item.done"]


def written(events: list[dict[str, Any]], newline: str = "\n") -> bytes:
    lines = [(each["type"], json.dumps(each, separators=(",", ":"), ensure_ascii=False)) for each in events]
    return "".join(f"event: {kind}{newline}data: {data}{newline * 2}" for kind, data in lines).encode()


def numbered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "sequence_number": number} for number, each in enumerate(events)]


def delta(text: str, place: int = 0, **more: Any) -> dict[str, Any]:
    where = {"item_id": f"msg_{place}", "output_index": place, "content_index": 0}
    return {"type": "response.output_text.delta", **where, "delta": text, "logprobs": [], **more}


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [], "text": text, **more}


def message(text: str, **more: Any) -> dict[str, Any]:
    content = [part(text, **more)]
    return {"id": "msg_0", "type": "message", "status": "completed", "role": "assistant", "content": content}


CALL = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "c1", "name": "f", "arguments": "{}"}
USAGE = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}


def response(status: str, *output: dict[str, Any], **more: Any) -> dict[str, Any]:
    known = {"id": "resp_1", "object": "response", "status": status, "error": None, "model": "m"}
    return {**known, "output": list(output), "usage": None, **more}


def whole(pieces: list[str], **more: Any) -> list[dict[str, Any]]:
    """All events of a reply that says ``pieces`` and calls a function; ``more`` goes into the whole part."""
    text = "".join(pieces)
    where = {"item_id": "msg_0", "output_index": 0, "content_index": 0}
    item = message(text, **more)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.in_progress", "response": response("in_progress")},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**item, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **where, "part": part("")},
        *(delta(piece) for piece in pieces),
        {"type": "response.output_text.done", **where, "text": text, "logprobs": more.get("logprobs", [])},
        {"type": "response.content_part.done", **where, "part": item["content"][0]},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.output_item.added", "output_index": 1, "item": {**CALL, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "item_id": "fc_1", "output_index": 1, "delta": "{}"},
        {"type": "response.output_item.done", "output_index": 1, "item": CALL},
        {"type": "response.completed", "response": response("completed", item, CALL, usage=USAGE)},
    ]
    return numbered(events)


# Recorded provider streams


@needs_recordings
@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem[:70])
def test_recorded_streams_come_through_byte_for_byte(path: Path):
    stream = path.read_bytes()
    expected = run([stream])
    assert expected[0] == stream
    for extract, sizes in ((NOTHING, (7, 1400)), (TERSE, (61,)), (BOTH, (211,))):
        for size in sizes:
            chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
            assert run(chunks, extract=extract) == expected
    reply = expected[1]
    (choice,) = reply.choices
    assert choice.client_message is choice.model_message
    assert json.loads(choice.model_message)["output"] == ended(stream)
    assert reply.is_done
    assert choice.finish_reason == ("max_output_tokens" if b"event: response.incomplete" in stream else "completed")
    usage = read_usage(reply.usage)
    assert usage.input is not None
    assert usage.output is not None
    message = read_message(choice.model_message)
    assert message.text == "\n".join(text for text in assembled(stream).values() if text)


@needs_recordings
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_recorded_streams_with_planted_tags_come_out_as_without(data: st.DataObject):
    stream = data.draw(st.sampled_from(STREAMS)).read_bytes()
    if any("```" in text or "~~~" in text for text in assembled(stream).values()):
        return  # a tag inside of a fence is text
    events = payloads(stream)
    newline = "\r\n" if data.draw(st.booleans()) else "\n"
    planted = _plant(events, data)
    chunks = cut(written(planted, newline), data.draw(st.lists(st.integers(0, 10**6), max_size=30)))
    sent, reply = run(chunks)
    plain = written(events, newline)
    assert assembled(sent) == assembled(plain)
    assert _others(sent) == _others(plain)
    for choice, expected in ((reply.choices[0].client_message, plain), (reply.choices[0].model_message, None)):
        assert json.loads(choice)["output"] == ended(expected or written(planted))
    numbers = [each["sequence_number"] for each in payloads(sent) if "sequence_number" in each]
    assert numbers == list(range(events[0].get("sequence_number", 0), len(numbers) + numbers[0])) if numbers else True


def _others(stream: bytes) -> list[dict[str, Any]]:
    """Everything but the words in deltas; numbers are looked at elsewhere."""
    events = [each for each in payloads(stream) if each.get("type") != "response.output_text.delta"]
    return [{key: value for key, value in each.items() if key != "sequence_number"} for each in events]


def _plant(events: list[dict[str, Any]], data: st.DataObject) -> list[dict[str, Any]]:
    """The events with tags in the texts of some deltas, which may be cut into several then, and in all that repeats
    these texts.
    """
    places = [at for at, each in enumerate(events) if each.get("type") == "response.output_text.delta"]
    places = [at for at in places if not set("<>/") & set(events[at]["delta"])]
    chosen = set(data.draw(st.lists(st.sampled_from(places), max_size=3, unique=True))) if places else set()
    before = assembled(written(events))
    planted: list[dict[str, Any]] = []
    for at, each in enumerate(events):
        if at not in chosen:
            planted.append(each)
            continue
        text = each["delta"]
        inside = data.draw(st.sampled_from(["did x", "", "a < b", "x\ny", "é"]))
        middle = data.draw(st.integers(0, len(text)))
        tagged = f"{text[:middle]}<terse>{inside}</terse>{text[middle:]}"
        ends = sorted(data.draw(st.lists(st.integers(0, len(tagged)), max_size=4)))
        pieces = [tagged[start:end] for start, end in zip([0, *ends], [*ends, len(tagged)], strict=True)]
        planted += [{**each, "delta": piece} for piece in pieces]
    after = assembled(written(planted))
    changes = {text: after[place] for place, text in before.items() if text != after[place]}
    return _numbered_like(events, [_renamed(each, changes, before) for each in planted])


def _renamed(event: dict[str, Any], changes: dict[str, str], before: dict[tuple[int, int], str]) -> dict[str, Any]:
    def change(value: Any) -> Any:
        if isinstance(value, dict):
            is_text = value.get("type") in {"output_text", "response.output_text.done"}
            changed = {key: change(each) for key, each in value.items()}
            return {**changed, "text": changes.get(value["text"], value["text"])} if is_text else changed
        return [change(each) for each in value] if isinstance(value, list) else value

    renamed: dict[str, Any] = change(event)
    texts = [text for text in before.values() if text in changes]
    return _with_places(renamed, texts, changes)


def _with_places(event: dict[str, Any], texts: list[str], changes: dict[str, str]) -> dict[str, Any]:
    """Annotations point into the text with the tags."""

    def change(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "url_citation" and texts:
            return {**value, **{key: _moved(value[key], texts[-1], changes) for key in ("start_index", "end_index")}}
        if isinstance(value, dict):
            return {key: change(each) for key, each in value.items()}
        return [change(each) for each in value] if isinstance(value, list) else value

    moved: dict[str, Any] = change(event)
    return moved


def _moved(place: int, text: str, changes: dict[str, str]) -> int:
    tagged, at, seen = changes[text], 0, 0
    while seen < place:
        if tagged[at] == "<" and tagged.startswith("<terse>", at):
            at = tagged.index("</terse>", at) + len("</terse>")
        else:
            at, seen = at + 1, seen + 1
    return at


def _numbered_like(events: list[dict[str, Any]], planted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if "sequence_number" not in events[0]:
        return planted
    first = events[0]["sequence_number"]
    return [{**each, "sequence_number": number} for number, each in enumerate(planted, first)]


@needs_recordings
@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem[:70])
def test_recorded_bodies_come_through_byte_for_byte(path: Path):
    body = path.read_bytes()
    expected = json.loads(body)
    for extract in (NOTHING, BOTH):
        sent, reply = split_reply(body, ClientView(tags=extract))
        assert sent is body
        assert json.loads(reply.choices[0].model_message)["output"] == expected["output"]
        assert (reply.choices[0].finish_reason, reply.id) == (expected["status"], expected["id"])
        assert read_usage(reply.usage).input
    tagged = json.dumps(_tagged(expected)).encode()
    sent, reply = split_reply(tagged, ClientView(tags=TERSE))
    assert json.loads(sent) == expected
    assert json.loads(reply.choices[0].client_message)["output"] == expected["output"]


def _tagged(value: Any) -> Any:
    """Tags behind every text, where they move nothing."""
    if isinstance(value, dict):
        tagged = {key: _tagged(each) for key, each in value.items()}
        return {**tagged, "text": value["text"] + TAG} if value.get("type") == "output_text" else tagged
    return [_tagged(each) for each in value] if isinstance(value, list) else value


# Streams of our own


def test_tags_are_stripped_from_deltas_and_their_repetitions():
    sent, reply = run([written(whole(["Hi ", "<ter", "se>did", " x</terse>", "there"]))])
    assert sent == written(whole(["Hi ", "there"]))
    (choice,) = reply.choices
    assert choice.terse == ("did x",)
    assert read_message(choice.model_message).text == f"Hi {TAG}there"
    assert json.loads(choice.client_message)["output"] == [message("Hi there"), CALL]
    assert (reply.id, reply.model, reply.is_done, choice.finish_reason) == ("resp_1", "m", True, "completed")
    usage = read_usage(reply.usage)
    assert (usage.input, usage.cached, usage.output) == (7, 4, 3)


@given(st.lists(st.integers(0, 10**6), max_size=20), st.sampled_from(["\n", "\r\n"]), st.booleans())
@settings(deadline=None)
def test_where_a_stream_is_cut_changes_nothing(places: list[int], newline: str, with_comments: bool):
    pieces = ["Grüße ", "<", "3 a<terse>é", " & <b>", "</terse>b", " <terse>x</terse>", "<terse>open"]
    stream = written(whole(pieces), newline)
    expected = written(whole(["Grüße ", "<", "3 a", "b", " ", "<terse>open"]), newline)
    if with_comments:
        comment = f": still here{newline * 2}".encode()
        stream, expected = comment + stream + comment, comment + expected + comment
    sent, reply = run(cut(stream, places))
    assert sent == expected
    assert reply == run([stream])[1]
    assert reply.choices[0].terse == ("é & <b>", "x")


def test_events_go_out_as_soon_as_their_text_is_certain():
    reader = ReplyStream(ClientView(tags=TERSE))
    first, second, third = delta("a "), delta("b <te"), delta("a> c")
    assert reader.feed(written([first])) == written([first])
    assert reader.feed(written([second])) == b""
    assert reader.feed(written([third])) == written([second, third])


def test_text_of_a_tag_alone_is_empty():
    sent, reply = run([written(whole([TAG]))])
    assert sent == written(whole([]))
    assert json.loads(reply.choices[0].client_message)["output"] == [message(""), CALL]


def test_state_block_is_stripped():
    sent, reply = run([written(whole(["Done.\n\n", "### STATE\nGoal: x", "\nNext: y"]))], extract=BOTH)
    assert "STATE" not in sent.decode()
    assert "Goal" in (reply.choices[0].state or "")
    assert ended(sent)[0]["content"][0]["text"] == assembled(sent)[0, 0]


def test_annotations_and_logprobs_follow():
    def citation(start: int, end: int) -> dict[str, Any]:
        return {"type": "url_citation", "url": "https://a.example", "start_index": start, "end_index": end}

    def tokens(*words: str) -> list[dict[str, Any]]:
        return [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]

    tagged = whole(
        ["see ", f"{TAG}this"],
        annotations=[citation(24, 28)],
        logprobs=tokens("see ", "<terse>", "did x", "</terse>", "this"),
    )
    tagged[5]["logprobs"] = tokens("<terse>", "did x", "</terse>", "this")
    where = {"item_id": "msg_0", "output_index": 0, "content_index": 0, "annotation_index": 0}
    added = {"type": "response.output_text.annotation.added", **where}
    tagged.insert(6, {**added, "annotation": citation(24, 28)})
    plain = whole(["see ", "this"], annotations=[citation(4, 8)], logprobs=tokens("see ", "this"))
    plain[5]["logprobs"] = tokens("this")
    plain.insert(6, {**added, "annotation": citation(4, 8)})
    assert payloads(run([written(numbered(tagged))])[0]) == numbered(plain)


def test_sequence_numbers_of_interleaved_texts():
    other = {"type": "response.web_search_call.searching", "output_index": 5, "item_id": "ws_1"}
    events = numbered([delta("a <", 0), delta(f"b{TAG}", 1), other, delta("terse>x</terse>c", 0)])
    sent, _ = run([written(events)])
    assert assembled(sent) == {(0, 0): "a c", (1, 0): "b"}
    assert [each["sequence_number"] for each in payloads(sent)] == [0, 1, 2, 3]


def test_refusals_thoughts_and_unknown_items_are_unchanged():
    events = [
        {"type": kind, "output_index": 0, "content_index": 0, "delta": TAG}
        for kind in ("response.refusal.delta", "response.reasoning_summary_text.delta", "response.brand_new.delta")
    ]
    stream = written(events) + b"data: [DONE]\n\n"
    assert run([stream])[0] == stream


@pytest.mark.parametrize("length", range(4, 12))
def test_a_stream_that_breaks_off_is_no_whole_reply(length: int):
    stream = written(whole(["a <ter", "b", " c"])[:length])[:-20]
    for extract in (NOTHING, TERSE):
        sent, reply = run(cut(stream, [100, 300, 1000]), extract=extract)
        assert sent == stream
        assert not reply.is_done
        if reply.choices:
            assert reply.choices[0].finish_reason == ""
            assert "a <terb c".startswith(read_message(reply.choices[0].model_message).text)


def test_of_a_reply_that_broke_off_half_a_call_is_not_sent_back():
    events = whole(["a", "b"])
    half = {**events[10], "delta": '{"x": '}
    reply = run([written([*events[:10], half])])[1]
    message = reply.choices[0].model_message
    assert [call.arguments for call in read_message(message).calls] == ['{"x": ']
    assert not read_message(as_input(message)).calls
    assert read_message(as_input(message)).text == "ab"


def test_a_failed_reply():
    error = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    failed = {"type": "response.failed", "response": response("failed", error=error)}
    stream = written(numbered([whole([])[0], failed]))
    sent, reply = run([stream])
    assert sent == stream
    assert (json.loads(reply.error), reply.is_done, reply.choices) == (error, False, ())
    assert classify_error(200, stream) == Overflow()


@pytest.mark.parametrize("nested", [True, False])
def test_error_in_a_stream_follows_the_held_back_text(nested: bool):
    details = {"message": "no", "code": "server_error"}
    error = {"type": "error", **({"error": details} if nested else details)}
    stream = written([delta("a <ter"), error])
    sent, reply = run([stream])
    assert sent == stream
    assert json.loads(reply.error)["message"] == "no"
    assert not reply.is_done


def test_an_incomplete_reply_says_why():
    end = response("incomplete", message("ab"), incomplete_details={"reason": "max_output_tokens"}, usage=USAGE)
    reply = run([written([*whole(["a", "b"])[:-1], {"type": "response.incomplete", "response": end}])])[1]
    assert (reply.is_done, reply.choices[0].finish_reason) == (True, "max_output_tokens")


def test_text_that_only_the_last_event_has_counts():
    end = {"type": "response.completed", "response": response("completed", message(f"a{TAG}"))}
    sent, reply = run([written([end])])
    assert payloads(sent)[0]["response"]["output"] == [message("a")]
    assert reply.choices[0].terse == ("did x",)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"not an event stream at all < >",
        b"data: {not json <\n\n",
        b"data: [1,2]\n\n",
        b'data: {"type":"response.output_item.done","output_index":"x","item":7}\n\n',
        b'data: {"type":"response.output_text.delta","delta":7,"sequence_number":null}\n\n',
        b'data: {"type":"response.output_text.annotation.added"}\n\n',
        b'data: {"type":"response.output_item.done","item":{"content":[7,{"type":"output_text"}]}}\n\n',
        b'data: {"type":"response.output_text.done","text":"a","annotations":[7],"logprobs":7}\n\n',
        b'data: {"type":"response.completed","response":{"output":[7],"usage":[]}}\n\n',
        b'data: {"response":7}\n\n: c\r\n\r\ndata: [DONE]\n\n',
        b"data: " + b"[" * 100_000 + b"\n\n",
    ],
)
def test_junk_goes_through(junk: bytes):
    assert run([junk])[0] == junk
    assert run(cut(junk, [3, 9]))[0] == junk
    assert split_reply(junk, ClientView(tags=TERSE))[0] == junk


def test_odd_members_of_a_text_are_left_alone():
    odd = {"annotations": [7, {"start_index": "x"}, {"start_index": 999}], "logprobs": [7, {"token": None}]}
    sent, reply = run([written(whole([f"a{TAG}"], **odd))])
    assert ended(sent)[0]["content"][0] == part("a", annotations=odd["annotations"], logprobs=[])
    assert as_input(reply.choices[0].model_message)


def test_an_event_that_is_too_large_goes_through():
    stream = written([delta("a <te"), delta("x" * 5000), delta(f"b{TAG}")])
    sent, _ = run(cut(stream, list(range(0, 6000, 500))), max_event=1000)
    assert sent == written([delta("a <te"), delta("x" * 5000), delta("b")])


# Replies that are not streamed


def test_a_whole_reply_is_read():
    body = json.dumps(response("completed", message(f"a{TAG}"), CALL, usage=USAGE, output_text=f"a{TAG}")).encode()
    sent, reply = split_reply(body, ClientView(tags=TERSE))
    assert json.loads(sent) == response("completed", message("a"), CALL, usage=USAGE, output_text="a")
    assert reply.choices[0].terse == ("did x",)
    assert (reply.id, reply.model, reply.is_done) == ("resp_1", "m", True)


def test_a_body_that_is_an_error():
    error = b'{"error":{"message":"no"}}'
    assert split_reply(error, ClientView(tags=TERSE)) == (error, Reply(error=b'{"message":"no"}'))


# What a response repeats of its request

ASKED = {"model": "m", "instructions": "S", "previous_response_id": "resp_0", "conversation": "conv_1"}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {}, "strict": True}


@pytest.mark.parametrize("own", [{"tools": [tool("own"), {"type": "web_search"}]}, {}])
def test_response_repeats_the_clients_own_request(own: dict[str, Any]):
    echoed = {"previous_response_id": None, "conversation": None, "tool_choice": "none"}
    theirs = own.get("tools", [])
    upstream = response("completed", message("a"), instructions="S\n\nT", tools=[*theirs, tool("ours")], **echoed)
    sent = json.dumps({**ASKED, **own}).encode()
    expected = response(
        "completed",
        message("a"),
        instructions="S",
        tools=theirs,
        previous_response_id="resp_0",
        conversation={"id": "conv_1"},
        tool_choice="auto",
    )
    shown, reply = split_reply(json.dumps(upstream).encode(), ClientView(own_request=sent))
    assert json.loads(shown) == expected
    assert json.loads(reply.choices[0].model_message)["output"] == [message("a")]
    events = [{"type": kind, "response": upstream} for kind in ("response.created", "response.completed")]
    for extract in (NOTHING, TERSE):
        told_stream, _ = run([written([events[0], delta("a <"), events[1]])], extract=extract, own_request=sent)
        assert [each["response"] for each in payloads(told_stream) if "response" in each] == [expected, expected]
        assert assembled(told_stream) == {(0, 0): "a <"}


def test_an_unchanged_request_is_repeated_to_the_byte():
    same = response("completed", message("a"), instructions="S", tools=[tool("own")], previous_response_id="resp_0")
    body = json.dumps(same, indent=1).encode()
    sent = json.dumps({**ASKED, "tools": [tool("own")]}).encode()
    assert split_reply(body, ClientView(own_request=sent))[0] == body
    stream = written(whole(["a", "b"]))
    assert run(cut(stream, [9, 700]), extract=NOTHING, own_request=b"{}")[0] == stream
