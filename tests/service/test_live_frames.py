"""The body of a live call around messages of a known shape is the one that the dialect writes as a whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tersely.dialects.anthropic.dialect import ANTHROPIC
from tersely.service.proxy.live_sessions.frames import Frame, WrittenBody, placeholder_of

MARKS = st.sampled_from([None, None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])
TEXTS = st.sampled_from(["a", " ", "", 'x"cache_control"', "}]}", "é\n"])


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    block: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"type": "text", "text": draw(TEXTS)},
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": draw(TEXTS)}]},
                {"type": "tool_use", "id": "t", "name": "n", "input": {"cache_control": {"a": 1}}},
                {"type": "thinking", "thinking": draw(TEXTS), "signature": "s"},
            ]
        )
    )
    mark = draw(MARKS)
    return block if mark is None else block | {"cache_control": mark}


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    role = draw(st.sampled_from(["user", "assistant"]))
    content = draw(st.one_of(TEXTS, st.lists(blocks(), min_size=1, max_size=2)))
    spaces = draw(st.sampled_from([(",", ":"), (",", ":"), (", ", ": ")]))
    written = json.dumps({"role": role, "content": content}, separators=spaces)
    return written.replace("cache_c", draw(st.sampled_from(["cache_c", "cache_c", "cache_\\u0063"]))).encode()


TAILS = st.lists(st.lists(messages(), min_size=1, max_size=3), min_size=2, max_size=8)
MIDDLE = b'{"role":"user","content":"b"},{"role":"assistant","content":[{"type":"text","text":"c"}]}'


@settings(max_examples=300, deadline=None)
@given(TAILS, st.booleans(), st.booleans())
def test_a_known_shape_changes_nothing(tails: list[list[bytes]], has_breakpoints: bool, is_marked: bool):
    mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    rest = {"model": "m", "system": [{"type": "text", "text": "s", **mark}], "tools": [{"name": "n"}]}
    frame = Frame(
        body=json.dumps({"messages": [], **rest}).encode(),
        front=(b'{"role":"user","content":"a"}',),
        frozen=1,
        front_elements=1,
        middle=(MIDDLE,),
        placeholder=placeholder_of("stands for the middle"),
        instructions="be brief" if has_breakpoints else None,
        has_breakpoints=has_breakpoints,
    )
    for tail in [*tails, *tails]:
        alone = structs.replace(frame, around={})
        assert joined(frame.write(ANTHROPIC, tail)) == joined(alone.write(ANTHROPIC, tail))


def joined(written: WrittenBody | None) -> WrittenBody | None:
    """A body in one piece."""
    return None if written is None else structs.replace(written, pieces=(b"".join(written.pieces),))


def test_a_usual_shape_is_known():
    frame = Frame(
        body=b'{"model":"m"}',
        front=(b'{"role":"user","content":"a"}',),
        frozen=1,
        front_elements=1,
        middle=(MIDDLE,),
        placeholder=placeholder_of("stands for the middle"),
        instructions=None,
        has_breakpoints=True,
    )
    for text in (b"x", b"y"):
        question = (
            b'{"role":"user","content":[{"type":"text","text":"%b","cache_control":{"type":"ephemeral"}}]}' % text
        )
        written = frame.write(ANTHROPIC, [question])
        assert written is not None
        assert b"".join(written.pieces).count(question) == 1
    assert len(frame.around) == 1


def test_messages_that_stay_are_written_behind_each_other():
    frame = Frame(
        body=b'{"model":"m"}',
        front=(b'{"role":"user","content":"a"}',),
        frozen=1,
        front_elements=1,
        middle=(MIDDLE,),
        placeholder=placeholder_of("stands for the middle"),
        instructions=None,
        has_breakpoints=False,
    )
    added = [b'{"role":"user","content":"%d"}' % number for number in range(60)]
    grown = frame
    for at in range(0, len(added), 2):
        grown = grown.with_middle(added[at : at + 2]).with_middle([])
    tail = [b'{"role":"user","content":[{"type":"text","text":"q"}]}']
    whole = structs.replace(frame, middle=(b",".join((MIDDLE, *added)),))
    assert joined(grown.write(ANTHROPIC, tail)) == joined(whole.write(ANTHROPIC, tail)) is not None
