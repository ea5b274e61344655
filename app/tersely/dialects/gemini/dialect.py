"""Gemini's generateContent, put together."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect, Streaming
from tersely.dialects.gemini import read, stream, tools, write
from tersely.dialects.gemini import tool_rounds as rounds
from tersely.dialects.undescribed import split_safely

GEMINI = Dialect(
    name="gemini",
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
    split_reply=split_safely(stream.split_reply),
    rounds=rounds.rounds(),
    # Gemini's own clients fail at a comment and at an `event:` line.
    streaming=Streaming(finish_key=b'"finishReason"', reply_key=b'"candidates"', has_arrays=True, is_data_only=True),
)
