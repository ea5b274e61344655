"""The dialects by name. A new one is a package with the three modules and an entry here."""

from __future__ import annotations

from dataclasses import replace

from app.dialects.anthropic import asking as anthropic_asking
from app.dialects.anthropic import read as anthropic_read
from app.dialects.anthropic import rounds as anthropic_rounds
from app.dialects.anthropic import saying as anthropic_saying
from app.dialects.anthropic import stream as anthropic_stream
from app.dialects.anthropic import tools as anthropic_tools
from app.dialects.anthropic import write as anthropic_write
from app.dialects.asking import Asking
from app.dialects.dialect import Dialect, References, Streaming
from app.dialects.errors import classify_error
from app.dialects.gemini import asking as gemini_asking
from app.dialects.gemini import read as gemini_read
from app.dialects.gemini import rounds as gemini_rounds
from app.dialects.gemini import saying as gemini_saying
from app.dialects.gemini import stream as gemini_stream
from app.dialects.gemini import tools as gemini_tools
from app.dialects.gemini import write as gemini_write
from app.dialects.gemini_gca import read as gca_read
from app.dialects.gemini_gca import saying as gca_saying
from app.dialects.gemini_gca import stream as gca_stream
from app.dialects.gemini_gca import tools as gca_tools
from app.dialects.gemini_gca import write as gca_write
from app.dialects.openai_chat import asking, read, rounds, saying, stream, tools, whole, write
from app.dialects.openai_responses import asking as responses_asking
from app.dialects.openai_responses import items as responses_items
from app.dialects.openai_responses import kept as responses_kept
from app.dialects.openai_responses import read as responses_read
from app.dialects.openai_responses import references as responses_references
from app.dialects.openai_responses import rounds as responses_rounds
from app.dialects.openai_responses import saying as responses_saying
from app.dialects.openai_responses import stream as responses_stream
from app.dialects.openai_responses import tools as responses_tools
from app.dialects.openai_responses import write as responses_write
from app.dialects.saying import ReplyWriter
from app.domain.messages import Dialect as DialectName

_RESPONSE_ENDS = (b"response.completed", b"response.failed", b"response.incomplete")


def _beginnings(*types: bytes) -> tuple[bytes, ...]:
    """How the first line of an event of one of these types may begin."""
    lines = (b"event: %b", b"event:%b", b'data: {"type":"%b"', b'data: {"type": "%b"', b'data:{"type":"%b"')
    return tuple(line % kind for line in lines for kind in types)


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
    split_reply=whole.split_reply,
    classify_error=classify_error,
    streaming=Streaming(
        heartbeat=b": keep-alive\n\n",
        end_marks=(b"data: [DONE]", b"data:[DONE]"),
        end_words=(b"[DONE]",),
        is_mark_whole=True,
        reply_key=b'"choices"',
    ),
    rounds=rounds.ROUNDS,
)

OPENAI_RESPONSES = Dialect(
    name="openai_responses",
    read_request=responses_read.read_request,
    read_message=responses_read.read_message,
    read_reply=responses_read.read_message,
    read_usage=responses_read.read_usage,
    write_request=responses_write.write_request,
    write_text=responses_write.write_text,
    write_message=responses_write.write_message,
    as_input=responses_write.as_input,
    as_reply=responses_write.as_reply,
    restore_reply=responses_write.restore_reply,
    with_text=responses_write.with_text,
    with_results=responses_write.with_results,
    with_prefix=responses_write.with_prefix,
    add_tools=responses_tools.add_tools,
    forbid_tools=responses_tools.forbid_tools,
    error_body=write.error_body,
    error_event=responses_write.error_event,
    open_stream=responses_stream.ReplyStream,
    split_reply=responses_stream.split_reply,
    classify_error=classify_error,
    without_history=responses_write.without_history,
    lacks_history=responses_kept.lacks_history,
    is_said_anew=responses_items.is_instructions,
    references=References(
        mark=responses_references.MARK,
        referred=responses_references.referred,
        with_items=responses_references.with_items,
        items_by_id=responses_references.items_by_id,
    ),
    streaming=Streaming(
        heartbeat=b": keep-alive\n\n",
        end_marks=_beginnings(*_RESPONSE_ENDS),
        end_words=_RESPONSE_ENDS,
        preamble=_beginnings(b"response.created", b"response.in_progress", b"response.queued"),
        reply_key=b'"output"',
    ),
    rounds=responses_rounds.ROUNDS,
)

ANTHROPIC = Dialect(
    name="anthropic",
    read_request=anthropic_read.read_request,
    read_message=anthropic_read.read_message,
    read_reply=anthropic_read.read_reply,
    read_usage=anthropic_read.read_usage,
    write_request=anthropic_write.write_request,
    write_text=anthropic_write.write_text,
    write_message=anthropic_write.write_message,
    as_input=anthropic_write.as_input,
    as_reply=anthropic_write.as_reply,
    restore_reply=anthropic_write.restore_reply,
    with_text=anthropic_write.with_text,
    with_results=anthropic_write.with_results,
    with_prefix=anthropic_write.with_prefix,
    add_tools=anthropic_tools.add_tools,
    forbid_tools=anthropic_tools.forbid_tools,
    error_body=anthropic_write.error_body,
    error_event=anthropic_write.error_event,
    open_stream=anthropic_stream.ReplyStream,
    split_reply=anthropic_stream.split_reply,
    classify_error=classify_error,
    rounds=anthropic_rounds.ROUNDS,
    streaming=Streaming(
        heartbeat=b'event: ping\ndata: {"type": "ping"}\n\n',
        end_marks=_beginnings(b"message_stop"),
        end_words=(b"message_stop",),
        preamble=_beginnings(b"message_start", b"ping"),
        reply_key=b'"content"',
    ),
)

GEMINI = Dialect(
    name="gemini",
    read_request=gemini_read.read_request,
    read_message=gemini_read.read_message,
    read_reply=gemini_read.read_reply,
    read_usage=gemini_read.read_usage,
    write_request=gemini_write.write_request,
    write_text=gemini_write.write_text,
    write_message=gemini_write.write_message,
    as_input=gemini_write.as_input,
    as_reply=gemini_write.as_reply,
    restore_reply=gemini_write.restore_reply,
    with_text=gemini_write.with_text,
    with_results=gemini_write.with_results,
    with_prefix=gemini_write.with_prefix,
    add_tools=gemini_tools.add_tools,
    forbid_tools=gemini_tools.forbid_tools,
    error_body=gemini_write.error_body,
    error_event=gemini_write.error_event,
    open_stream=gemini_stream.ReplyStream,
    split_reply=gemini_stream.split_reply,
    classify_error=classify_error,
    rounds=gemini_rounds.rounds(),
    # Gemini's own clients break at a comment.
    streaming=Streaming(finish_key=b'"finishReason"', reply_key=b'"candidates"', has_arrays=True),
)

GEMINI_GCA = replace(
    GEMINI,
    name="gemini_gca",
    read_request=gca_read.read_request,
    write_request=gca_write.write_request,
    as_reply=gca_write.as_reply,
    add_tools=gca_tools.add_tools,
    forbid_tools=gca_tools.forbid_tools,
    open_stream=gca_stream.open_stream,
    split_reply=gca_stream.split_reply,
    rounds=gemini_rounds.rounds(gca_stream.WRAPPER),
)

DIALECTS: dict[DialectName, Dialect] = {
    each.name: each for each in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC, GEMINI, GEMINI_GCA)
}

# A plain question in Code Assist's envelope would need the caller's project.
ASKING: dict[DialectName, Asking] = {
    OPENAI_CHAT.name: asking.ASKING,
    OPENAI_RESPONSES.name: responses_asking.ASKING,
    ANTHROPIC.name: anthropic_asking.ASKING,
    GEMINI.name: gemini_asking.ASKING,
}

SAYING: dict[DialectName, ReplyWriter] = {
    OPENAI_CHAT.name: saying.write_reply,
    OPENAI_RESPONSES.name: responses_saying.write_reply,
    ANTHROPIC.name: anthropic_saying.write_reply,
    GEMINI.name: gemini_saying.write_reply,
    GEMINI_GCA.name: gca_saying.write_reply,
}
