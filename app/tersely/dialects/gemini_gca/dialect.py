"""The dialect of Gemini Code Assist: Gemini's format in an envelope."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.gemini.dialect import GEMINI
from tersely.dialects.gemini.tool_rounds import rounds
from tersely.dialects.gemini_gca import read, stream, tools, whole, write
from tersely.dialects.undescribed import split_safely

GEMINI_GCA = replace(
    GEMINI,
    name="gemini_gca",
    read_request=read.read_request,
    write_request=write.write_request,
    as_reply=write.as_reply,
    history=replace(GEMINI.history, path=("request", *GEMINI.history.path)),
    add_tools=tools.add_tools,
    forbid_tools=tools.forbid_tools,
    open_stream=stream.ReplyStream,
    split_reply=split_safely(whole.split_reply),
    rounds=rounds(stream.WRAPPER),
)
