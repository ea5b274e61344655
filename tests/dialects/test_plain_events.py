"""Events that are read later, since no tag can begin in them: whatever comes at once, the outcome is the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.anthropic.dialect import ANTHROPIC
from tersely.dialects.dialect import ClientView, Dialect, Reply
from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.dialects.openai_responses.dialect import OPENAI_RESPONSES
from tersely.domain.text.tags import TagKinds
from tests.dialects.test_rounds import (
    Round,
    anthropic_stream,
    chat_stream,
    compacted,
    cut_between_events,
    responses_stream,
    with_crlf,
)

WORDS = st.lists(
    st.sampled_from(["word ", "é", "<", "<terse>", "did x", "</terse>", "\n", "# ", "## State", '"', "\\", "{"]),
    max_size=12,
).map("".join)
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "find"]), WORDS.map(lambda text: json.dumps({"q": text}))), max_size=3
)
ROUNDS = st.builds(lambda text, calls: Round(text=text, calls=tuple(calls)), WORDS, CALLS)
# Events that nobody has described, and a delta of an unknown form, somewhere between the others.
ODD = st.sampled_from(
    [
        b"",
        b"\n",
        b"\n\n",
        b": still here\n\n",
        b'event: response.new.delta\ndata: {"type":"response.new.delta","delta":{"a":1}}\n\n',
        b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":[1]}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"new","a":1}}\n\n',
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":77,"delta":null}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":9,"function":null}]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{"content":"\\"usage\\" <"}}]}\n\n\n',
        b'data: {"choices":[],"usage":null,"error":{"a":1}}\n\n',
        b'data: {"usage":null,"choices":[]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":1}}\n\n',
        b"data: [1\n\n",
    ]
)


def read(dialect: Dialect, view: ClientView, pieces: list[bytes]) -> tuple[bytes, Reply]:
    reader = dialect.open_stream(view)
    out = b"".join([reader.feed(piece) for piece in pieces]) + reader.close()
    return out, reader.reply


def squeezed(stream: bytes) -> bytes:
    """The stream without blank lines that end no event."""
    return re.sub(rb"\n{3,}", b"\n\n", stream)


@pytest.mark.parametrize(
    ("dialect", "write"),
    [(OPENAI_CHAT, chat_stream), (ANTHROPIC, anthropic_stream), (OPENAI_RESPONSES, responses_stream)],
    ids=["openai_chat", "anthropic", "openai_responses"],
)
@given(
    round_=ROUNDS,
    step=st.integers(1, 20),
    odd=ODD,
    place=st.integers(0, 200),
    count=st.integers(1, 9),
    tags=st.sampled_from([TagKinds(), TagKinds(terse=True), TagKinds(terse=True, state=True)]),
    is_compact=st.booleans(),
    strip_usage=st.booleans(),
)
def test_events_that_are_read_later_are_read_as_those_that_are_taken_apart(
    dialect: Dialect,
    write: Any,
    round_: Round,
    step: int,
    odd: bytes,
    place: int,
    count: int,
    tags: TagKinds,
    is_compact: bool,
    strip_usage: bool,
):
    stream = write(0, round_, step)
    if is_compact:
        stream = compacted(stream)
    events = cut_between_events(stream, 1)
    events.insert(place % (len(events) + 1), odd)
    stream, view = b"".join(events), ClientView(tags=tags, strip_usage=strip_usage)

    out, reply = read(dialect, view, [with_crlf(stream)])
    pieces, same = read(dialect, view, cut_between_events(stream, count))
    assert (squeezed(pieces), same) == (squeezed(out.replace(b"\r\n", b"\n")), reply)
