"""Replies of our own: what is written is read back by the dialect that wrote it."""

from __future__ import annotations

import pytest

from tersely.dialects.dialect import UNCHANGED, Request
from tersely.dialects.local_reply import EVENT_STREAM, JSON, LocalReply
from tersely.dialects.registry import DIALECTS, REPLY_WRITERS
from tersely.domain.messages import Dialect as DialectName

TEXT = 'One line,\n\nanother with "quotes", <terse>tags</terse> and é\U0001f600.'


def test_every_dialect_has_a_writer_of_local_replies() -> None:
    assert REPLY_WRITERS.keys() == DIALECTS.keys()


@pytest.mark.parametrize("name", sorted(DIALECTS))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_array", [False, True])
def test_a_local_reply_is_read_back(name: DialectName, stream: bool, as_array: bool) -> None:
    dialect = DIALECTS[name]
    request = Request(model="m", messages=(), stream=stream, include_usage=True)

    written = REPLY_WRITERS[name](
        LocalReply(text=TEXT, request=request, name="tersely_1", created=1, as_array=as_array)
    )

    is_array = as_array and dialect.streaming.has_arrays
    assert written.content_type == (EVENT_STREAM if stream and not is_array else JSON)
    if stream:
        reader = dialect.open_stream(UNCHANGED)
        assert reader.feed(written.body) + reader.close() == written.body
        reply = reader.reply
    else:
        body, reply = dialect.split_reply(written.body, UNCHANGED)
        assert body == written.body
    (choice,) = reply.choices
    assert dialect.read_reply(choice.client_message).text == TEXT
    assert choice.finish_reason.lower() in {"stop", "end_turn", "completed"}
    assert reply.error in {b"", b"null"}
    usage = dialect.read_usage(reply.usage)
    assert (usage.input, usage.output) == (0, 0)
