"""Bodies that grow at the end of one array."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.wire.array_member import find_array_end, read_more

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
STYLES = st.sampled_from(({}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}))


@given(
    before=st.dictionaries(st.text(max_size=8).filter(lambda name: name != "messages"), VALUES, max_size=3),
    known=st.lists(VALUES, min_size=1, max_size=4),
    new=st.lists(VALUES, min_size=1, max_size=4),
    style=STYLES,
    is_first=st.booleans(),
    is_nested=st.booleans(),
)
def test_array_member_splits_a_body_where_the_next_one_grows(
    before: dict[str, Any], known: list[Any], new: list[Any], style: dict[str, Any], is_first: bool, is_nested: bool
) -> None:
    def body(messages: list[Any]) -> bytes:
        members = {"messages": messages, **before} if is_first else {**before, "messages": messages}
        whole = {"user": "u", **before, "request": members, "messages": [1]} if is_nested else members
        return json.dumps(whole, **style).encode(errors="surrogatepass")

    first, second = body(known), body(known + new)
    end = find_array_end(first, ("request", "messages") if is_nested else ("messages",))
    assert end is not None
    prefix, suffix = first[:end], first[end:]
    assert second.startswith(prefix)
    assert second.endswith(suffix)
    more = read_more(second[len(prefix) : len(second) - len(suffix)])
    assert more is not None
    assert [json.loads(raw) for raw in more] == new


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"messages":[]}',
        b'{"messages":[ ]}',
        b'{"messages":{}}',
        b'{"other":[1]}',
        b'{"messages":[1],"messages":[2]}',
        b'{"messages":[1]',
        b'{"messages":[1]} x',
    ],
)
def test_array_member_leaves_other_bodies_to_their_reader(body: bytes) -> None:
    assert find_array_end(body, ("messages",)) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[1]}',
        b'{"request":[1]}',
        b'{"request":{"messages":[]}}',
        b'{"request":{"messages":[1],"messages":[2]}}',
        b'{"request":{"messages":[1]},"request":{"messages":[2]}}',
    ],
)
def test_a_nested_array_is_named_once(body: bytes) -> None:
    assert find_array_end(body, ("request", "messages")) is None


@pytest.mark.parametrize(
    "more", [b"", b"1", b",", b",1,", b",1]", b',"messages":1', b',"a":1', b",\xff", b',"\xff"', b"," + b"[" * 500]
)
def test_array_member_refuses_values_without_elements(more: bytes) -> None:
    assert read_more(more) is None


@pytest.mark.parametrize("text", ["{[" * 300, '"{' * 500, "\\" * 401 + '"[{' * 401, "\\[" * 500])
def test_brackets_in_texts_open_nothing(text: str) -> None:
    item = json.dumps({"role": "tool", "content": text}).encode()
    assert read_more(b"," + item) == [item]


@given(st.lists(st.text(alphabet='"\\[{x'), min_size=1, max_size=5), st.integers(390, 410))
def test_only_open_brackets_outside_texts_count(texts: list[str], depth: int) -> None:
    item = b"[" * depth + json.dumps(texts).encode() + b"]" * depth
    more = b"," + item + b"," + json.dumps("[" * 401).encode()
    assert (read_more(more) is None) == (depth + 1 > 400)
