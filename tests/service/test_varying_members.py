"""The member of a request that its client changes with each call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.service.proxy.live_sessions.varying_members import find_varying

NAME = "client_metadata"
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just(NAME), inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.dictionaries(st.text(max_size=6).filter(lambda name: name not in {"", NAME, "input"}), VALUES, max_size=3)
STYLES = st.sampled_from(({}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}))


def _body(
    history: list[Any], before: dict[str, Any], value: Any, after: dict[str, Any], style: dict[str, Any]
) -> bytes:
    whole = {"input": history, **before, NAME: value}
    return json.dumps(whole | {name: each for name, each in after.items() if name not in whole}, **style).encode(
        "utf-8", "surrogatepass"
    )


def _split(body: bytes, history: list[Any], style: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return the two parts of a body: up to the end of its last message, and the rest."""
    front = json.dumps({"input": history}, **style).encode("utf-8", "surrogatepass").rstrip(b" \n}").rstrip(b"]")
    end = len(front.rstrip(b" \n"))
    return body[:end], body[end:]


@given(
    before=MEMBERS, after=MEMBERS, old=VALUES, new=VALUES, more=st.lists(VALUES, min_size=1, max_size=2), style=STYLES
)
def test_a_body_with_another_value_has_the_suffix_with_that_value(
    before: dict[str, Any], after: dict[str, Any], old: Any, new: Any, more: list[Any], style: dict[str, Any]
) -> None:
    history: list[Any] = [1]
    first = _body(history, before, old, after, style)
    prefix, suffix = _split(first, history, style)
    member = find_varying(NAME, suffix, suffix)
    assert member is not None
    second = _body([*history, *more], before, new, after, style)
    value = member.value_in(second, len(prefix))
    if value is None:
        return  # left to the full path: a text is no UTF-8, or lists are nested too deeply
    assert json.loads(value) == new
    assert second.endswith(member.suffix(value))
    assert member.sent_suffix(value) == member.suffix(value)


def test_the_value_is_found_in_most_bodies() -> None:
    style: dict[str, Any] = {}
    first = _body([1], {"tools": [{"a": 1}]}, {"turn": 1}, {"stream": True}, style)
    prefix, suffix = _split(first, [1], style)
    member = find_varying(NAME, suffix, b"")
    assert member is not None
    value = member.value_in(_body([1, 2], {"tools": [{"a": 1}]}, {"turn": 2}, {"stream": True}, style), len(prefix))
    assert value == b'{"turn": 2}'
    assert member.sent_suffix(value) == b""


@pytest.mark.parametrize(
    "suffix",
    [b'],"tools":[]}', b'],"tools":{"client_metadata":1}}', b'],"client_metadata":1,"client_metadata":2}', b"]"],
)
def test_a_suffix_without_the_member_varies_in_nothing(suffix: bytes) -> None:
    assert find_varying(NAME, suffix, b"") is None


@pytest.mark.parametrize(
    "rest", [b'1,"n":2}', b'1],"n":2}', b',"n":2}', b' 1,"n":2}', b'{"a":,"n":2}', b'"\xff","n":2}']
)
def test_what_is_no_single_value_is_left_to_the_full_path(rest: bytes) -> None:
    member = find_varying(NAME, b'],"client_metadata":0,"n":2}', b"")
    assert member is not None
    found = member.value_in(b'{"input":[1,2],"client_metadata":' + rest, 11)
    assert found == (b"1" if rest.startswith(b"1,") else None)
