"""The dialect of OpenAI's responses."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.assemble import assemble
from tersely.dialects.dialect import HistoryMember, ItemReferences, StreamEvents
from tersely.dialects.openai_responses import read, stored_history, stream, tools, whole, write
from tersely.dialects.openai_responses.content import is_instructions, items_of
from tersely.dialects.openai_responses.tool_rounds import ROUNDS
from tersely.dialects.wire.sse import beginnings

_ENDS = (b"response.completed", b"response.failed", b"response.incomplete")

OPENAI_RESPONSES = replace(
    assemble(
        "openai_responses",
        read=read,
        write=write,
        tools=tools,
        stream=stream,
        whole=whole,
        rounds=ROUNDS,
        history=HistoryMember(
            path=("input",),
            read=read.read_appended,
            elements=items_of,
            reply_id=write.REPLY_ID,
            conversation=write.CONVERSATION,
            text_element=read.string_message,
            varying="client_metadata",
        ),
        streaming=StreamEvents(
            heartbeat=b": keep-alive\n\n",
            end_marks=beginnings(*_ENDS),
            end_texts=_ENDS,
            preamble=beginnings(b"response.created", b"response.in_progress", b"response.queued"),
            reply_key=b'"output"',
        ),
    ),
    without_history=write.without_history,
    lacks_history=stored_history.lacks_history,
    is_per_request=is_instructions,
    references=ItemReferences(
        mark=stored_history.MARK,
        referenced_ids=stored_history.referenced_ids,
        with_items=stored_history.with_items,
        items_by_id=stored_history.items_by_id,
    ),
    restore_response=stored_history.restore_response,
    continues_prefill=False,
)
