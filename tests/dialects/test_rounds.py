"""Replies in rounds: the client's view shows no trace of what was ours, whatever was called and however it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.anthropic.dialect import ANTHROPIC
from tersely.dialects.dialect import UNCHANGED, Dialect, Reply
from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.dialects.tool_rounds import add_usage, tool_names
from tersely.service.proxy.recording.round_transcript import RoundTranscript
from tests.dialects.recordings import MISSING, replies

OURS = frozenset({"context_search", "save_memo"})
NAMES = ("context_search", "save_memo", "context_search_more", "context", "add", "s")
MARK = "OURS"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The model's words in one round; ``calls`` are (name, arguments)."""

    text: str
    calls: tuple[tuple[str, str], ...]


def _call(name: str, argument: str) -> tuple[str, str]:
    return name, json.dumps({"q": f"{MARK}{argument}" if name in OURS else argument})


words = st.text(alphabet='ab "\\\n{}€', max_size=12)
calls = st.builds(_call, st.sampled_from(NAMES), words)
last_rounds = st.builds(lambda text, made: Round(text=text, calls=tuple(made)), words, st.lists(calls, max_size=4))
inner_rounds = st.builds(
    lambda text, made: Round(text=text, calls=tuple(made)),
    words,
    st.lists(st.builds(_call, st.sampled_from(sorted(OURS)), words), min_size=1, max_size=3),
)
histories = st.builds(lambda inner, last: [*inner, last], st.lists(inner_rounds, max_size=3), last_rounds)


def _event(value: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def chat_stream(number: int, round_: Round, step: int) -> bytes:
    """A round as OpenAI streams it, in pieces of ``step`` characters; names come whole, or not."""
    out: list[bytes] = []

    def chunk(delta: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        out.append(_event({"id": f"c{number}", "created": number, "model": "m", "choices": [choice]}))

    chunk({"role": "assistant", "content": ""})
    for at in range(0, len(round_.text), step):
        chunk({"content": round_.text[at : at + step]})
    for index, (name, arguments) in enumerate(round_.calls):
        cut = step if step % 2 else len(name)
        first = {"index": index, "id": f"id{number}_{index}", "type": "function"}
        chunk({"tool_calls": [{**first, "function": {"name": name[:cut], "arguments": ""}}]})
        if name[cut:]:
            chunk({"tool_calls": [{"index": index, "function": {"name": name[cut:]}}]})
        for at in range(0, len(arguments), step):
            chunk({"tool_calls": [{"index": index, "function": {"arguments": arguments[at : at + step]}}]})
    chunk({}, "tool_calls" if round_.calls else "stop")
    out.append(_event({"id": f"c{number}", "created": number, "model": "m", "choices": [], "usage": USAGE}))
    return b"".join(out) + b"data: [DONE]\n\n"


def anthropic_stream(number: int, round_: Round, step: int) -> bytes:
    """A round as Anthropic streams it."""
    usage = {"input_tokens": 7, "output_tokens": 1}
    message = {"id": f"c{number}", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    out = [_event({"type": "message_start", "message": message}, "message_start")]
    blocks: list[tuple[dict[str, Any], str, str, str]] = []
    if round_.text:
        blocks.append(({"type": "text", "text": ""}, "text_delta", "text", round_.text))
    for index, (name, arguments) in enumerate(round_.calls):
        start = {"type": "tool_use", "id": f"id{number}_{index}", "name": name, "input": {}}
        blocks.append((start, "input_json_delta", "partial_json", arguments))
    for index, (start, kind, member, text) in enumerate(blocks):
        out.append(
            _event({"type": "content_block_start", "index": index, "content_block": start}, "content_block_start")
        )
        for at in range(0, len(text), step):
            delta = {"type": kind, member: text[at : at + step]}
            out.append(_event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta"))
        out.append(_event({"type": "content_block_stop", "index": index}, "content_block_stop"))
    ending = {"stop_reason": "tool_use" if round_.calls else "end_turn", "stop_sequence": None}
    out.append(_event({"type": "message_delta", "delta": ending, "usage": {"output_tokens": 3}}, "message_delta"))
    return b"".join(out) + _event({"type": "message_stop"}, "message_stop")


def gemini_stream(number: int, round_: Round, step: int) -> bytes:
    """A round as Gemini streams it; the last event has something to say or not."""
    parts: list[dict[str, Any]] = [{"text": round_.text[at : at + step]} for at in range(0, len(round_.text), step)]
    parts += [
        {"functionCall": {"id": f"id{number}_{index}", "name": name, "args": json.loads(arguments)}}
        for index, (name, arguments) in enumerate(round_.calls)
    ]
    if step % 2 or not parts:
        parts.append({"text": ""})
    usage = {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10}
    out: list[bytes] = []
    for place, part in enumerate(parts):
        end = {"finishReason": "STOP"} if place == len(parts) - 1 else {}
        candidate = {"content": {"parts": [part], "role": "model"}, **end, "index": 0}
        out.append(_event({"candidates": [candidate], "usageMetadata": usage, "responseId": f"c{number}"}))
    return b"".join(out)


def response_items(number: int, round_: Round) -> list[dict[str, Any]]:
    """The items of a round: thoughts (of ours, where they led to calls of ours alone), words, calls."""
    calls = [
        {"type": "function_call", "id": f"fc{number}_{index}", "call_id": f"id{number}_{index}", "name": name}
        | {"arguments": arguments, "status": "completed"}
        for index, (name, arguments) in enumerate(round_.calls)
    ]
    hides = not round_.text and calls and all(call["name"] in OURS for call in calls)
    thought = f"{MARK} secret" if hides else "thinking"
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "id": f"rs{number}", "summary": [{"type": "summary_text", "text": thought}]}
        | {"encrypted_content": thought}
    ]
    if round_.text:
        part = {"type": "output_text", "text": round_.text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "id": f"msg{number}", "role": "assistant", "content": [part]})
    return items + calls


def responses_stream(number: int, round_: Round, step: int) -> bytes:
    """A round as OpenAI streams it in its responses."""
    items = response_items(number, round_)
    events: list[dict[str, Any]] = []
    usage = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    begun = {"id": f"c{number}", "created_at": number, "model": "m", "output": [], "usage": None}
    events += [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]
    for place, item in enumerate(items):
        at = {"item_id": item["id"], "output_index": place}
        empty: dict[str, Any] = {"reasoning": {"summary": []}, "message": {"content": []}}.get(item["type"], {})
        empty = empty or {"arguments": "", "name": "" if step % 3 == 0 else item["name"]}
        events.append({"type": "response.output_item.added", "output_index": place, "item": item | empty})
        kind, text, inner = {
            "reasoning": ("reasoning_summary_text", item.get("encrypted_content"), {"summary_index": 0}),
            "message": ("output_text", round_.text, {"content_index": 0}),
            "function_call": ("function_call_arguments", item.get("arguments"), {}),
        }[item["type"]]
        if item["type"] == "message":
            part = item["content"][0] | {"text": ""}
            events.append({"type": "response.content_part.added", **at, **inner, "part": part})
        assert text is not None
        for start in range(0, len(text), step):
            events.append({"type": f"response.{kind}.delta", **at, **inner, "delta": text[start : start + step]})
        events.append({"type": f"response.{kind}.done", **at, **inner, "text": text})
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    ended = begun | {"output": items, "usage": usage, "status": "completed"}
    events.append({"type": "response.completed", "response": ended})
    return b"".join(_event(each | {"sequence_number": n}, each["type"]) for n, each in enumerate(events))


def cut_at(stream: bytes, step: int) -> list[bytes]:
    """Return a stream in pieces of so many bytes."""
    return [stream[at : at + step] for at in range(0, len(stream), step)]


def cut_between_events(stream: bytes, count: int) -> list[bytes]:
    """Return a stream in pieces of so many events, as a model host sends it."""
    events = [event + b"\n\n" for event in stream.split(b"\n\n")[:-1]]
    return [b"".join(events[at : at + count]) for at in range(0, len(events), count)]


def compacted(stream: bytes) -> bytes:
    """Return a stream without the blanks in its JSON."""
    lines = []
    for line in stream.split(b"\n"):
        name, _, value = line.partition(b": ")
        is_json = name == b"data" and value.startswith(b"{")
        short = json.dumps(json.loads(value), separators=(",", ":"), ensure_ascii=False).encode() if is_json else value
        lines.append(name + b": " + short if name else line)
    return b"\n".join(lines)


def with_crlf(stream: bytes) -> bytes:
    """Return a stream whose lines end with CRLF: each of its events is taken apart."""
    return stream.replace(b"\n", b"\r\n")


def relayed(
    dialect: Dialect, streams: list[bytes], step: int, cut: Callable[[bytes, int], list[bytes]] = cut_at
) -> tuple[bytes, Reply]:
    """The client's stream of several rounds, and the reply as it is kept."""
    assert dialect.rounds is not None
    shown, transcript = dialect.rounds.open(OURS), RoundTranscript(dialect=dialect, tools=OURS)
    out, reply = b"", Reply()
    for number, stream in enumerate(streams):
        reader = dialect.open_stream(UNCHANGED)
        for piece in cut(stream, step):
            out += shown.feed(reader.feed(piece))
        out += shown.feed(reader.close())
        reply = reader.reply
        if number < len(streams) - 1:
            transcript = transcript.with_round(reply, [])
            out += shown.next_round(transcript.finished)
    out += shown.close()
    return out, transcript.combine(reply).reply


def read_back(dialect: Dialect, stream: bytes) -> Reply:
    """Return the message that a client makes of its stream."""
    reader = dialect.open_stream(UNCHANGED)
    reader.feed(stream)
    reader.close()
    return reader.reply


in_all_dialects = pytest.mark.parametrize(
    ("dialect", "write"),
    [
        (OPENAI_CHAT, chat_stream),
        (ANTHROPIC, anthropic_stream),
        (GEMINI, gemini_stream),
        (OPENAI_RESPONSES, responses_stream),
    ],
    ids=["openai_chat", "anthropic", "gemini", "openai_responses"],
)


@in_all_dialects
@given(rounds=histories, step=st.integers(1, 40), cut=st.integers(1, 300))
def test_clients_view_has_no_trace_of_own_tools(dialect, write, rounds: list[Round], step: int, cut: int):
    out, kept = relayed(dialect, [write(n, round_, step) for n, round_ in enumerate(rounds)], cut)

    assert MARK.encode() not in out
    assert not any(f'"{name}"'.encode() in out for name in OURS)
    seen = read_back(dialect, out)
    assert seen.is_done
    assert seen.id == "c0"
    theirs = [call for call in rounds[-1].calls if call[0] not in OURS]
    if seen.choices:
        message = dialect.read_reply(seen.choices[0].client_message)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == [
            (name, json.loads(arguments)) for name, arguments in theirs
        ]
        ends = {"tool_calls", "tool_use", "STOP"} if theirs else {"stop", "end_turn", "STOP"}
        ends |= {"completed"}
        assert seen.choices[0].finish_reason in ends
        if kept.choices:
            mine = dialect.read_reply(kept.choices[0].client_message)
            assert (mine.text, mine.calls) == (message.text, message.calls)
    assert dialect.read_usage(seen.usage).input == 7 * len(rounds)
    assert dialect.read_usage(seen.usage).output == 3 * len(rounds)


@in_all_dialects
@given(
    rounds=histories,
    step=st.integers(1, 40),
    cut=st.integers(1, 300),
    count=st.integers(1, 9),
    is_compact=st.booleans(),
)
def test_events_that_pass_whole_are_relayed_as_those_that_are_taken_apart(
    dialect, write, rounds: list[Round], step: int, cut: int, count: int, is_compact: bool
):
    streams = [write(n, round_, step) for n, round_ in enumerate(rounds)]
    if is_compact:
        streams = [compacted(stream) for stream in streams]

    quick = [
        relayed(dialect, streams, count, cut_between_events),
        relayed(dialect, streams, cut),
    ]

    out, kept = relayed(dialect, [with_crlf(stream) for stream in streams], cut)
    assert quick == 2 * [(out.replace(b"\r\n", b"\n"), kept)]


@given(rounds=histories, step=st.integers(1, 40), cut=st.integers(1, 300))
def test_responses_client_sees_one_stream_that_it_can_resend(rounds: list[Round], step: int, cut: int):
    streams = [responses_stream(number, round_, step) for number, round_ in enumerate(rounds)]
    out, kept = relayed(OPENAI_RESPONSES, streams, cut)

    events = payloads(out)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert [kinds.count(f"response.{kind}") for kind in ("created", "in_progress", "completed")] == [1, 1, 1]
    assert {event["response"]["id"] for event in events if "response" in event} == {"c0"}
    begun = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert begun == list(range(len(begun))) == list(done)
    output = events[-1]["response"]["output"]
    assert output == list(done.values())
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"] for item in output}
    ids = [item["id"] for item in output]
    for place, name in enumerate(ids):
        round_ = rounds[int(name.lstrip("mrsgfc").partition("_")[0])]
        if name.startswith("rs") and (round_.text or round_.calls):
            assert ids[place + 1].startswith((f"msg{name[2:]}", f"fc{name[2:]}_"))
    if kept.choices:
        assert json.loads(kept.choices[0].client_message) == {"output": output}
    assert kept.id == "c0"

    bodies = [
        json.dumps({"id": f"c{number}", "created_at": number, "status": "completed"} | {"output": items}).encode()
        for number, items in enumerate(response_items(number, round_) for number, round_ in enumerate(rounds))
    ]
    assert OPENAI_RESPONSES.rounds is not None
    messages = [OPENAI_RESPONSES.split_reply(body, UNCHANGED)[1].choices[0].client_message for body in bodies]
    shown = [OPENAI_RESPONSES.rounds.without_calls(message, OURS) for message in messages]
    joined = OPENAI_RESPONSES.rounds.merge_messages(shown)
    whole = json.loads(OPENAI_RESPONSES.rounds.write_body(bodies[0], bodies[-1], joined, b'{"n":1}'))
    assert whole == {"id": "c0", "created_at": 0, "status": "completed", "output": output, "usage": {"n": 1}}


def test_a_reply_without_our_tools_passes_byte_for_byte():
    for stream in (
        chat_stream(0, Round(text="hello", calls=(("add", "{}"), ("sub", '{"a": 1}'))), 4),
        chat_stream(0, Round(text="hello", calls=()), 4),
    ):
        assert relayed(OPENAI_CHAT, [stream], 50)[0] == stream


@given(round_=last_rounds, step=st.integers(1, 40), cut=st.integers(1, 300))
def test_response_without_own_calls_passes_byte_for_byte(round_: Round, step: int, cut: int):
    theirs = Round(text=round_.text, calls=tuple(call for call in round_.calls if call[0] not in OURS))
    stream = responses_stream(0, theirs, step)
    assert relayed(OPENAI_RESPONSES, [stream], cut)[0] == stream


RECORDED = replies("openai.responses", stream=True)
needs_recordings = pytest.mark.skipif(not RECORDED, reason=MISSING)


def one_round(names: frozenset[str], stream: bytes, size: int) -> bytes:
    assert OPENAI_RESPONSES.rounds is not None
    shown = OPENAI_RESPONSES.rounds.open(names)
    out = b"".join(shown.feed(stream[at : at + size]) for at in range(0, len(stream), size))
    return out + shown.close()


def payloads(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]


@needs_recordings
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem[:70])
@pytest.mark.parametrize("size", [61, 1 << 20])
def test_recorded_streams_of_responses_come_through_and_any_of_their_calls_can_be_hidden(path: Path, size: int):
    stream = path.read_bytes()
    assert one_round(OURS, stream, size) == stream

    before = payloads(stream)
    items = [event["item"] for event in before if event["type"] == "response.output_item.done"]
    for name in {item["name"] for item in items if item["type"] in {"function_call", "custom_tool_call"}}:
        events = payloads(one_round(frozenset({name}), stream, size))
        hidden = {item["id"] for item in items if item.get("name") == name}
        left = [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"]
        assert not hidden & set(left)
        assert not any(each in json.dumps(events) for each in hidden)
        if "sequence_number" in before[0]:
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        places = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
        assert sorted(places) == list(range(len(places)))
        assert [item["id"] for item in events[-1]["response"]["output"]] in ([], left)


@pytest.mark.parametrize("is_numbered", [True, False])
def test_words_of_an_item_beside_which_a_call_of_ours_came_are_renumbered(is_numbered: bool):
    def delta(output_index: int) -> dict[str, Any]:
        at = {"output_index": output_index, "content_index": 0}
        return {"type": "response.output_text.delta", **at, "delta": "word"}

    def added(output_index: int, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "response.output_item.added", "output_index": output_index, "item": item}

    text = {"type": "message", "role": "assistant", "content": []}
    call = {"type": "function_call", "call_id": "c", "name": "context_search", "arguments": ""}
    events = [added(0, text), delta(0), added(1, call), delta(0), added(2, text), delta(2)]
    if is_numbered:
        events = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    assert OPENAI_RESPONSES.rounds is not None
    shown = OPENAI_RESPONSES.rounds.open(OURS)

    out = payloads(b"".join([shown.feed(_event(event, event["type"])) for event in events]))

    assert [event["output_index"] for event in out] == [0, 0, 0, 1, 1]
    assert [event.get("sequence_number") for event in out] == ([0, 1, 2, 3, 4] if is_numbered else 5 * [None])


def test_a_client_tool_with_one_of_our_names_stays_the_clients():
    approval = {"type": "mcp_approval_request", "id": "mcpr_1", "name": "save_memo", "arguments": "{}"}
    spaced = {"type": "function_call", "call_id": "c", "name": "save_memo", "namespace": "notes", "arguments": "{}"}
    custom = {"id": "c", "type": "custom", "custom": {"name": "save_memo", "input": "x"}}
    for dialect, body in (
        (OPENAI_RESPONSES, {"output": [approval]}),
        (OPENAI_RESPONSES, {"output": [spaced]}),
        (OPENAI_CHAT, {"choices": [{"message": {"role": "assistant", "content": "", "tool_calls": [custom]}}]}),
    ):
        reply = dialect.split_reply(json.dumps(body).encode(), UNCHANGED)[1]
        assert RoundTranscript(dialect=dialect, tools=OURS).own_calls(reply) == ([], True)


def test_items_of_responses_that_come_without_a_beginning_are_known_all_the_same():
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "save_memo", "arguments": MARK}
    own = call | {"id": "fc2", "name": "add", "arguments": "{}"}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_item.done", "output_index": 0, "item": call},
        {"type": "response.output_item.done", "output_index": 1, "item": own},
        {"type": "response.completed", "response": {"id": "r", "output": [call, own]}},
    ]
    out = payloads(one_round(OURS, b"".join(_event(each) for each in events), 10))
    assert out == [
        events[0],
        events[2] | {"output_index": 0},
        {"type": "response.completed", "response": {"id": "r", "output": [own]}},
    ]


def test_tools_of_responses_are_found_among_the_items():
    def named(name: str) -> list[dict[str, Any]]:
        return [{"type": "namespace", "name": "space", "tools": [{"type": "function", "name": name}]}]

    body = {
        "tools": named("a"),
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": named("b")},
            {"type": "tool_search_output", "call_id": "s", "tools": named("c")},
            {"type": "message", "role": "user", "content": 'it said "additional_tools"', "tools": named("d")},
        ],
    }
    assert OPENAI_RESPONSES.rounds is not None
    assert OPENAI_RESPONSES.rounds.tools_outside_list(json.dumps(body).encode()) == {"space", "b", "c"}
    for other in (b"", b"{", b'{"input": "say \\"additional_tools\\""}', b'{"input": "additional_tools"}'):
        assert OPENAI_RESPONSES.rounds.tools_outside_list(other) == frozenset()


def test_names_are_read_in_every_dialect():
    chat = [{"type": "function", "function": {"name": "a"}}, {"type": "custom", "custom": {"name": "b"}}]
    assert tool_names(json.dumps(chat).encode()) == {"a", "b"}
    assert tool_names(b'[{"name": "a", "input_schema": {"name": "b"}}]') == {"a"}
    assert tool_names(b'[{"functionDeclarations": [{"name": "a"}]}, {"googleSearch": {}}]') == {"a"}
    spaces = [{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}, {"type": "web_search"}]
    assert tool_names(json.dumps(spaces).encode()) == {"a", "b"}
    assert tool_names(b"") == tool_names(b"{") == tool_names(b"7") == frozenset()


def test_usages_are_added_up():
    one = b'{"prompt_tokens": 1, "details": {"cached": 2}, "tier": "x", "none": null}'
    other = b'{"prompt_tokens": 10, "details": {"cached": 20, "audio": 3}, "tier": "y", "none": 4}'
    assert json.loads(add_usage(one, other)) == {
        "prompt_tokens": 11,
        "details": {"cached": 22, "audio": 3},
        "tier": "y",
        "none": 4,
    }
    assert add_usage(b"", one) == add_usage(one, b"") == one
