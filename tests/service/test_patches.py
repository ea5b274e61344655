"""Patches: what a client sends back is pieces of what is stored."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.store.history.patches import LARGEST, MOST_MISSED, NUMBER_BYTES, apply_patch, find_patch, is_patch, size_of

LONG = 'It is done. The order of the steps is in README.md, and "quotes" stay as they are. ' * 5
TEXTS = st.text(alphabet='ab"\\ é', max_size=60)
MESSAGES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS, st.sampled_from([LONG, LONG[3:], "call_" + "7" * 20])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_any_bytes_come_back(old: bytes, new: bytes) -> None:
    patch = find_patch(old, new)
    assert is_patch(patch)
    assert apply_patch(old, patch) == new


@given(MESSAGES, MESSAGES, st.booleans())
def test_any_message_comes_back(old: object, new: object, sort: bool) -> None:
    before, after = json.dumps([old, new]).encode(), json.dumps([new, old, new], sort_keys=sort).encode()
    for one, other in ((before, after), (after, before), (before, json.dumps(old, indent=1).encode())):
        patch = find_patch(one, other)
        assert apply_patch(one, patch) == other
        assert size_of(patch) <= len(other) + 4 * NUMBER_BYTES


def reply(text: str, **more: object) -> bytes:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    item = {"id": "msg_" + "0" * 16, "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    return json.dumps({"output": [item | more]}, separators=(",", ":")).encode()


def test_an_item_of_a_reply_is_a_piece_of_it_whatever_its_length() -> None:
    patches = set()
    for text in (LONG, LONG * 2, LONG * 9):
        old = reply(text)
        new = old.removeprefix(b'{"output":[').removesuffix(b"]}")
        patches.add(find_patch(old, new))
    assert patches == {(11, -2)}


def test_members_in_another_order_cost_their_names() -> None:
    """As an SDK writes its objects: by name, with members that were null left out."""
    part = {"text": LONG, "type": "output_text"}
    item = {"content": [part], "id": "msg_" + "0" * 16, "role": "assistant", "type": "message"}
    new = json.dumps(item).encode()
    patch = find_patch(reply(LONG), new)
    assert apply_patch(reply(LONG), patch) == new
    assert size_of(patch) < 140


def test_few_bytes_are_put_in_at_one_place() -> None:
    old = b'{"role":"assistant","content":"' + LONG.encode() + b'","refusal":null,"annotations":[]}'
    new = old.replace(b',"refusal":null,"annotations":[]', b"")
    assert find_patch(old, new) == (0, len(new) - 1 - len(old), -1, 0)
    tagged = new.replace(b'"}', b'<terse>done</terse>"}')
    assert find_patch(new, tagged) == (0, -2, b"<terse>done</terse>", -2, 0)


@pytest.mark.parametrize("patch", [(0, 0, 0, 0), (0, 3, 1, 3), (0, 0, b"x", -1, 0)])
def test_a_patch_copies_no_more_than_there_is(patch: tuple[int | bytes, ...]) -> None:
    with pytest.raises(ValueError, match="copies more"):
        apply_patch(b"abc", patch)


def test_a_text_that_stands_twice_is_put_in_or_copied_once() -> None:
    old, new = json.dumps([LONG]).encode(), json.dumps(["x" * 90, LONG, LONG, "y" * 90]).encode()
    assert apply_patch(old, find_patch(old, new)) == new


def test_large_texts_with_nothing_in_common_are_left_soon() -> None:
    old = b",".join(b'"%032d"' % n for n in range(LARGEST // 36))
    new = b",".join(b'"%032d"' % -n for n in range(1, LARGEST // 36))
    assert len(new) > MOST_MISSED * 1000
    began = time.process_time()
    assert apply_patch(old, find_patch(old, new)) == new
    assert time.process_time() - began < 0.5
