"""The dialect of Gemini's generateContent."""

from __future__ import annotations

from tersely.dialects.assemble import assemble
from tersely.dialects.dialect import HistoryMember, StreamEvents
from tersely.dialects.gemini import read, stream, tools, whole, write
from tersely.dialects.gemini.tool_rounds import rounds

GEMINI = assemble(
    "gemini",
    read=read,
    write=write,
    tools=tools,
    stream=stream,
    whole=whole,
    rounds=rounds(),
    history=HistoryMember(path=("contents",), read=read.read_appended, guides_writing=True),
    # Gemini's own clients fail at a comment and at an `event:` line.
    streaming=StreamEvents(finish_key=b'"finishReason"', reply_key=b'"candidates"', has_arrays=True, is_data_only=True),
)
