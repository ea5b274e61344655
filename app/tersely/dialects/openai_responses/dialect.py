"""OpenAI's responses, put together."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect, ItemReferences, Streaming
from tersely.dialects.openai_chat.write import error_body
from tersely.dialects.openai_responses import (
    item_references as references,
)
from tersely.dialects.openai_responses import (
    items,
    read,
    stream,
    tools,
    write,
)
from tersely.dialects.openai_responses import (
    missing_history as kept,
)
from tersely.dialects.openai_responses import (
    stored_response as recall,
)
from tersely.dialects.openai_responses import (
    tool_rounds as rounds,
)
from tersely.dialects.undescribed import split_safely
from tersely.dialects.wire.sse import beginnings

_ENDS = (b"response.completed", b"response.failed", b"response.incomplete")

OPENAI_RESPONSES = Dialect(
    name="openai_responses",
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
    error_body=error_body,
    error_event=write.error_event,
    open_stream=stream.ReplyStream,
    split_reply=split_safely(stream.split_reply),
    without_history=write.without_history,
    lacks_history=kept.lacks_history,
    is_per_request=items.is_instructions,
    references=ItemReferences(
        mark=references.MARK,
        referenced_ids=references.referenced_ids,
        with_items=references.with_items,
        items_by_id=references.items_by_id,
    ),
    restore_response=recall.restore_response,
    continues_prefill=False,
    streaming=Streaming(
        heartbeat=b": keep-alive\n\n",
        end_marks=beginnings(*_ENDS),
        end_texts=_ENDS,
        preamble=beginnings(b"response.created", b"response.in_progress", b"response.queued"),
        reply_key=b'"output"',
    ),
    rounds=rounds.ROUNDS,
)
