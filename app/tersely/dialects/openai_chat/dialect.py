"""OpenAI's chat completions, put together."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect, Streaming
from tersely.dialects.openai_chat import read, stream, tools, whole, write
from tersely.dialects.openai_chat import tool_rounds as rounds
from tersely.dialects.undescribed import split_safely

OPENAI_CHAT = Dialect(
    name="openai_chat",
    read_request=read.read_request,
    read_message=read.read_message,
    read_reply=read.read_reply,
    read_usage=read.read_usage,
    write_request=write.write_request,
    write_text=write.write_text,
    write_message=write.write_message,
    as_input=write.as_input,
    as_reply=write.as_reply,
    restore_reply=write.restore_reply,
    with_text=write.with_text,
    with_results=write.with_results,
    with_prefix=write.with_prefix,
    add_tools=tools.add_tools,
    forbid_tools=tools.forbid_tools,
    error_body=write.error_body,
    error_event=write.error_event,
    open_stream=stream.ReplyStream,
    split_reply=split_safely(whole.split_reply),
    streaming=Streaming(
        heartbeat=b": keep-alive\n\n",
        end_marks=(b"data: [DONE]", b"data:[DONE]"),
        end_texts=(b"[DONE]",),
        is_mark_whole=True,
        reply_key=b'"choices"',
    ),
    rounds=rounds.ROUNDS,
)
