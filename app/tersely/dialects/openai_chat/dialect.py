"""The dialect of OpenAI's chat completions."""

from __future__ import annotations

from tersely.dialects.assemble import assemble, read_each
from tersely.dialects.dialect import HistoryMember, StreamEvents
from tersely.dialects.openai_chat import read, stream, tools, whole, write
from tersely.dialects.openai_chat.tool_rounds import ROUNDS

OPENAI_CHAT = assemble(
    "openai_chat",
    read=read,
    write=write,
    tools=tools,
    stream=stream,
    whole=whole,
    rounds=ROUNDS,
    history=HistoryMember(path=("messages",), read=read_each(read.read_message)),
    streaming=StreamEvents(
        heartbeat=b": keep-alive\n\n",
        end_marks=(b"data: [DONE]", b"data:[DONE]"),
        end_texts=(b"[DONE]",),
        is_mark_whole=True,
        reply_key=b'"choices"',
    ),
)
