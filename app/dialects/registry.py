"""The dialects by name. A new one is a package with the three modules and an entry here."""

from __future__ import annotations

from app.dialects.asking import Asking
from app.dialects.dialect import Dialect
from app.dialects.errors import classify_error
from app.dialects.openai_chat import asking, read, stream, write
from app.domain.messages import Dialect as DialectName

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
    with_text=write.with_text,
    with_results=write.with_results,
    with_prefix=write.with_prefix,
    error_body=write.error_body,
    open_stream=stream.ReplyStream,
    split_reply=stream.split_reply,
    classify_error=classify_error,
)

DIALECTS: dict[DialectName, Dialect] = {OPENAI_CHAT.name: OPENAI_CHAT}

ASKING: dict[DialectName, Asking] = {OPENAI_CHAT.name: asking.ASKING}
