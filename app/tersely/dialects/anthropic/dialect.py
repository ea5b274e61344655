"""The dialect of Anthropic's messages."""

from __future__ import annotations

from tersely.dialects.anthropic import read, stream, tools, whole, write
from tersely.dialects.anthropic.tool_rounds import ROUNDS
from tersely.dialects.assemble import assemble, read_each
from tersely.dialects.dialect import HistoryMember, StreamEvents
from tersely.dialects.wire.sse import beginnings

ANTHROPIC = assemble(
    "anthropic",
    read=read,
    write=write,
    tools=tools,
    stream=stream,
    whole=whole,
    rounds=ROUNDS,
    history=HistoryMember(path=("messages",), read=read_each(read.read_message)),
    streaming=StreamEvents(
        heartbeat=b'event: ping\ndata: {"type": "ping"}\n\n',
        end_marks=beginnings(b"message_stop"),
        end_texts=(b"message_stop",),
        preamble=beginnings(b"message_start", b"ping"),
        reply_key=b'"content"',
    ),
)
