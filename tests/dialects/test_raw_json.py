"""JSON taken apart with its bytes kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.wire import raw_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet=st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=5), st.sampled_from([None, 1]))
def test_members_keep_their_bytes(value: dict[str, object], indent: int | None):
    raw = json.dumps(value, indent=indent).encode()
    members = raw_json.split_object(raw)
    assert list(members) == list(value)
    assert all(piece in raw for piece in members.values())
    assert repr(raw_json.load(raw_json.join_object(members))) == repr(json.loads(raw))


@given(st.lists(JSON, max_size=6), st.sampled_from([None, 1]))
def test_items_keep_their_bytes(value: list[object], indent: int | None):
    raw = json.dumps(value, indent=indent).encode()
    items = raw_json.split_array(raw)
    assert len(items) == len(value)
    assert repr([raw_json.load(item) for item in items]) == repr(value)
    assert repr(raw_json.load(raw_json.join_array(items))) == repr(value)


@given(
    st.dictionaries(st.sampled_from("abc"), JSON, min_size=1), st.sampled_from("abcd"), JSON, st.sampled_from([None, 1])
)
def test_a_member_gets_another_value(value: dict[str, object], name: str, other: object, indent: int | None):
    raw = json.dumps(value, indent=indent).encode()
    changed = raw_json.with_member(raw, raw_json.split_object(raw), name, json.dumps(other).encode())
    assert repr(json.loads(changed)) == repr({**json.loads(raw), name: other})


@given(st.lists(JSON, max_size=5), st.lists(st.none() | JSON, min_size=5, max_size=5), st.sampled_from([None, 1]))
def test_items_get_other_values(value: list[object], others: list[object], indent: int | None):
    raw = json.dumps(value, indent=indent).encode()
    items = raw_json.split_array(raw)
    changed = [
        item if other is None else json.dumps(other).encode() for item, other in zip(items, others, strict=False)
    ]
    expected = [old if other is None else other for old, other in zip(value, others, strict=False)]
    assert repr(json.loads(raw_json.with_items(raw, items, changed))) == repr(expected)


def test_a_value_is_replaced_where_it_stands():
    raw = b'{ "a" : "x", "b" : ["y" , "z"] }'
    members = raw_json.split_object(raw)
    assert raw_json.with_member(raw, members, "a", b'"w"') == b'{ "a" : "w", "b" : ["y" , "z"] }'
    assert raw_json.with_items(members["b"], [b'"y"', b'"z"'], [b'"y"', b"1"]) == b'["y" , 1]'


@pytest.mark.parametrize(
    ("raw", "members"),
    [
        (b'{"a": 1.0 , "b":[ 1,{"c":"]}"} ],"a" : 2}', {"a": b"2", "b": b'[ 1,{"c":"]}"} ]'}),
        (
            b' { "x" : "\\ud800,\\"}" , "y": 12345678901234567890123 } ',
            {"x": b'"\\ud800,\\"}"', "y": b"12345678901234567890123"},
        ),
        (b'{"a":NaN}', {"a": b"NaN"}),
        (b'\xef\xbb\xbf{"a":"\\udfff"}', {"a": b'"\\udfff"'}),
        (b'{"\\ud800":[]}', {"\ud800": b"[]"}),
        (b"{}", {}),
        (b'{"u\\u0000":"\\u0000"}', {"u\x00": b'"\\u0000"'}),
    ],
)
def test_split_object(raw: bytes, members: dict[str, bytes]):
    assert raw_json.split_object(raw) == members


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b'{"a":1}x', b'{"a":"\\ud800"', b"\xff", b'["\\ud800"]', b"nul"]
)
def test_json_that_is_no_object_is_refused(raw: bytes):
    with pytest.raises(ValueError, match=r"."):
        raw_json.split_object(raw)


@pytest.mark.parametrize("raw", [b"[" * 200_000, b'{"a":' * 200_000, b'["\\ud800",' + b"[" * 200_000 + b"]" * 200_001])
def test_deep_nesting_is_an_error_and_no_crash(raw: bytes):
    for read in (raw_json.split_array, raw_json.split_object, raw_json.load):
        with pytest.raises(ValueError, match=r"."):
            read(raw)


WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)


@given(WORDS, WORDS, WORDS, JSON, st.sampled_from([None, 1]), st.booleans())
def test_rewritten_json_keeps_its_form(
    one: str, cut: str, other: str, beside: object, indent: int | None, ascii_only: bool
):
    members: dict[str, object] = {"a": [beside, one + cut + other], "n": 1.50, "z": beside}
    before, expected = (
        json.dumps({**members, "a": [beside, text]}, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "replace")
        for text in (one + cut + other, one + other)
    )
    after = raw_json.dump(raw_json.load(expected))
    written = raw_json.like_original(before, after)
    assert repr(raw_json.load(written)) == repr(raw_json.load(after))


@pytest.mark.parametrize(
    ("before", "after", "written"),
    [
        (b'{ "a" : "x\\u00e9<t>y\\/" }', b'{"a":"x\xc3\xa9y/"}', b'{ "a" : "x\\u00e9y\\/" }'),
        (
            b'{ "a" : "\\ud83d\\ude00<t>" , "i":2}',
            b'{"a":"\xf0\x9f\x98\x80","i":1}',
            b'{ "a" : "\\ud83d\\ude00" , "i":1}',
        ),
        (b'{"a": "one" }', b'{"a":"else"}', b'{"a": "else" }'),
        (b'{"a": [1, 2]}', b'{"a":[1]}', b'{"a":[1]}'),
        (b'{"a": [1]}', b'{"a":{1}}', b'{"a":{1}}'),
        (b'{"a": null }', b'{"a":"x"}', b'{"a": "x" }'),
    ],
)
def test_blanks_and_escapes_stay(before: bytes, after: bytes, written: bytes):
    assert raw_json.like_original(before, after) == written
