"""Accumulators: the pieces of a streamed reply make up the reply, in the model's and in the client's view."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.anthropic.accumulator import GrowingBlock, StringDelta, choice_of
from tersely.dialects.anthropic.content import insert_text, is_blank, replace_text, split_content
from tersely.dialects.anthropic.write import PARTIAL
from tersely.dialects.openai_chat.accumulator import ChoiceState
from tersely.dialects.openai_chat.stream_events import Choice, read_chunk, read_chunks
from tersely.dialects.openai_responses.accumulator import ItemAccumulator, read_delta
from tersely.dialects.undescribed import UnreadPayloads
from tersely.dialects.wire import raw_json
from tersely.domain.text.tags import NOTHING, TagKinds

TERSE = TagKinds(terse=True)
PIECES = st.lists(st.text(min_size=1, max_size=5), max_size=6)


def raw(value: Any) -> bytes:
    return json.dumps(value).encode()


def members(value: dict[str, Any]) -> dict[str, bytes]:
    return raw_json.split_object(raw(value))


@given(PIECES)
def test_text_block_of_anthropic_is_the_sum_of_its_deltas(pieces: list[str]) -> None:
    block = GrowingBlock(members({"type": "text", "text": "Go: "}), NOTHING)
    for piece in pieces:
        block.grow_by(StringDelta(type="text_delta", text=piece))
    assert block.text == "Go: " + "".join(pieces)
    assert json.loads(block.write()) == {"type": "text", "text": block.text}


def test_call_of_anthropic_has_its_input_once_it_is_closed() -> None:
    block = GrowingBlock(members({"type": "tool_use", "id": "t", "name": "f", "input": {}}), NOTHING)
    for piece in ('{"a"', ":1}"):
        block.grow_by(StringDelta(type="input_json_delta", partial_json=piece))
    assert json.loads(block.write())[PARTIAL] == '{"a":1}'
    block.is_open = False
    assert json.loads(block.write()) == {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}


def test_choice_of_anthropic_shows_the_client_no_tag_and_no_empty_block() -> None:
    texts = ["Done. <terse>did it</terse>", "<terse>more</terse>"]
    raws = [raw({"type": "text", "text": text}) for text in texts]
    blocks = [GrowingBlock(raw_json.split_object(each), TERSE) for each in raws]
    for block in blocks:
        assert block.stripper is not None
        block.show(block.stripper.feed(block.text) + block.stripper.close())
    choice = choice_of(blocks, "end_turn")
    assert [each["text"] for each in json.loads(choice.model_message)["content"]] == texts
    assert [each["text"].strip() for each in json.loads(choice.client_message)["content"]] == ["Done."]
    assert choice.terse == ("did it", "more")


def test_content_of_anthropic_is_a_string_or_a_list_of_blocks() -> None:
    assert split_content(b'"hi"') == [b'{"type":"text","text":"hi"}']
    assert split_content(b'""') == []
    assert split_content(b'[ {"type":"x"} ]') == [b'{"type":"x"}']
    assert is_blank(b'{"type":"text","text":" \\n"}')
    assert not is_blank(b'{"type":"image"}')


def test_texts_of_anthropic_stand_behind_results_and_before_calls() -> None:
    result, call = b'{"type":"tool_result"}', b'{"type":"tool_use"}'
    old, other = b'{"type":"text","text":"a"}', b'{"type":"text","text":"b"}'
    new = b'{"type":"text","text":"new"}'
    assert insert_text([result, old], "new") == [result, new, old]
    assert replace_text([old, call, other], "new") == [new, call]
    assert replace_text([call], "new") == [new, call]
    assert replace_text([old, call], " ") == [call]


def choice(**delta: Any) -> Choice:
    chunk = read_chunk(raw({"choices": [{"index": 0, "delta": delta}]}), UnreadPayloads())
    assert chunk is not None
    assert chunk.choices
    return chunk.choices[0]


@given(PIECES)
def test_content_of_chat_completions_is_the_sum_of_its_deltas(pieces: list[str]) -> None:
    state = ChoiceState(NOTHING)
    for piece in pieces:
        state.add(choice(content=piece))
    state.finish()
    found = state.to_choice(0)
    assert json.loads(found.model_message)["content"] == ("".join(pieces) or None)
    assert found.client_message == found.model_message


def test_calls_of_chat_completions_grow_by_index() -> None:
    state = ChoiceState(NOTHING)
    for call in (
        {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": ":1}"}},
    ):
        state.add(choice(tool_calls=[call]))
    calls = json.loads(state.to_choice(0).model_message)["tool_calls"]
    assert [(each["id"], each["function"]["name"], each["function"]["arguments"]) for each in calls] == [
        ("c1", "f", '{"a":1}'),
        ("c2", "g", "{}"),
    ]


def test_terse_tag_of_chat_completions_is_stripped_across_deltas() -> None:
    state = ChoiceState(TERSE)
    for piece in ("Done. <ter", "se>did", " it</terse>"):
        state.add(choice(content=piece))
        state.take()
    state.finish()
    found = state.to_choice(2)
    assert (found.index, found.terse) == (2, ("did it",))
    assert json.loads(found.client_message)["content"].strip() == "Done."


def test_chunks_are_read_together_and_unreadable_ones_are_kept() -> None:
    unread = UnreadPayloads()
    payloads = [raw({"id": "x", "choices": []}), b"not json", raw({"odd": 1}), raw({"usage": {"total_tokens": 3}})]
    chunks = read_chunks(payloads, unread)
    assert [chunk.id for chunk in chunks][:1] == ["x"]
    assert chunks[-1].has_outcome
    assert unread.payloads == [b"not json", raw({"odd": 1})]


@given(PIECES)
def test_text_of_a_response_is_the_sum_of_its_deltas(pieces: list[str]) -> None:
    items = ItemAccumulator()
    items.add("response.output_item.added", members({"output_index": 0, "item": {"type": "message", "content": []}}))
    for piece in pieces:
        delta = read_delta(
            raw({"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "delta": piece})
        )
        assert delta is not None
        items.add_delta(delta)
    assert items.text((0, 0)) == "".join(pieces)


def test_finished_item_of_a_response_replaces_its_deltas() -> None:
    items = ItemAccumulator()
    delta = read_delta(b'{"type":"response.output_text.delta","output_index":0,"content_index":0,"delta":"half"}')
    assert delta is not None
    items.add_delta(delta)
    done = {"type": "message", "content": [{"type": "output_text", "text": "whole"}]}
    items.add("response.output_item.done", members({"output_index": 0, "item": done}))
    assert items.text((0, 0)) == ""
    assert [json.loads(each) for each in items.items] == [done]


def test_event_of_a_response_without_a_type_or_an_item_is_refused() -> None:
    for kind, event in (("", {}), ("response.output_item.added", {"item": 1}), ("response.output_text.delta", {})):
        with pytest.raises(ValueError, match=r"item|type|delta"):
            ItemAccumulator().add(kind, members(event))
