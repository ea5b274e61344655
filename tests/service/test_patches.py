"""Patches: a text is written as copies from an older text and bytes of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.store.history.patches import (
    LARGEST,
    MOST_MISSED,
    NUMBER_BYTES,
    Patch,
    apply_patch,
    find_patch,
    is_patch,
    size_of,
)

ANY_SIZE = 10**9
LONG = 'It is done. The order of the steps is in README.md, and "quotes" stay as they are. ' * 5
TEXTS = st.text(alphabet='ab"\\ é', max_size=60)
MESSAGES = st.recursive(
    st.one_of(st.none(), st.integers(), TEXTS, st.sampled_from([LONG, LONG[3:], "call_" + "7" * 20])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=12,
)


def found(old: bytes, new: bytes) -> Patch:
    patch = find_patch(old, new, ANY_SIZE)
    assert patch is not None
    return patch


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_any_bytes_come_back(old: bytes, new: bytes) -> None:
    patch = found(old, new)
    assert is_patch(patch)
    assert apply_patch(old, patch) == new


@given(MESSAGES, MESSAGES, st.booleans())
def test_any_message_comes_back(old: object, new: object, sort: bool) -> None:
    before, after = json.dumps([old, new]).encode(), json.dumps([new, old, new], sort_keys=sort).encode()
    for one, other in ((before, after), (after, before), (before, json.dumps(old, indent=1).encode())):
        patch = found(one, other)
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
        patches.add(found(old, new))
    assert patches == {(11, -2)}


def test_members_in_another_order_cost_their_names() -> None:
    """As an SDK writes its objects: by name, with members that were null left out."""
    part = {"text": LONG, "type": "output_text"}
    item = {"content": [part], "id": "msg_" + "0" * 16, "role": "assistant", "type": "message"}
    new = json.dumps(item).encode()
    patch = found(reply(LONG), new)
    assert apply_patch(reply(LONG), patch) == new
    assert size_of(patch) < 140


def test_few_bytes_are_put_in_at_one_place() -> None:
    old = b'{"role":"assistant","content":"' + LONG.encode() + b'","refusal":null,"annotations":[]}'
    new = old.replace(b',"refusal":null,"annotations":[]', b"")
    assert found(old, new) == (0, len(new) - 1 - len(old), -1, 0)
    tagged = new.replace(b'"}', b'<terse>done</terse>"}')
    assert found(new, tagged) == (0, -2, b"<terse>done</terse>", -2, 0)


@pytest.mark.parametrize("patch", [(0, 0, 0, 0), (0, 3, 1, 3), (0, 0, b"x", -1, 0)])
def test_a_patch_copies_no_more_than_there_is(patch: tuple[int | bytes, ...]) -> None:
    with pytest.raises(ValueError, match="copies more"):
        apply_patch(b"abc", patch)


def test_a_text_that_stands_twice_is_put_in_or_copied_once() -> None:
    old, new = json.dumps([LONG]).encode(), json.dumps(["x" * 90, LONG, LONG, "y" * 90]).encode()
    assert apply_patch(old, found(old, new)) == new


def strings(texts: Iterable[str], gap: str = ",") -> bytes:
    return gap.join(f'"{text}"' for text in texts).encode()


COUNT = LARGEST // 28
SLOW = {
    "nothing in common": (
        strings(f"{n:032}" for n in range(LARGEST // 36)),
        strings(f"{-n:032}" for n in range(7_000)),
    ),
    "spaced otherwise": (strings(f"{n:020}" for n in range(COUNT)), strings((f"{n:020}" for n in range(COUNT)), ", ")),
    "the other way round": (
        strings(f"{n:020}" for n in range(COUNT)),
        strings(f"{n:020}" for n in reversed(range(COUNT))),
    ),
    "no end of a string": (b"x" * 99, b'"aaaaaaaaaaaaaaa\\' * 15_000),
    "quotes": (b'"' * LARGEST, b"x" * 50 + b'"' * (LARGEST - 60) + b"y"),
    "nearly the same": (b"a" * LARGEST, strings("a" * 100 + str(n) for n in range(2_400))),
}


@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("most", [256, ANY_SIZE])
def test_large_texts_take_little_time(case: str, most: int) -> None:
    old, new = SLOW[case]
    new = b"z" * 80 + new[: LARGEST - 160] + b"y" * 80
    assert MOST_MISSED * 1000 < max(len(old), len(new)) <= LARGEST
    began = time.process_time()
    patch = find_patch(old, new, most)
    assert time.process_time() - began < (0.3 if most == 256 else 1)
    assert patch is None or apply_patch(old, patch) == new
