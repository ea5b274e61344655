"""Replies of model hosts in each dialect, as bytes: text, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tersely.fakellm.scripted import ScriptedReply
from tersely.fakellm.scripted.anthropic import ANTHROPIC
from tersely.fakellm.scripted.gemini import GCA, GEMINI
from tersely.fakellm.scripted.openai_chat import CHAT
from tersely.fakellm.scripted.openai_responses import RESPONSES
from tersely.fakellm.scripted.replies import ScriptedExchange, TokenCounts
from tests.support.upstreams import RawUpstream, http_head

# Id, name and arguments of a call.
Called = tuple[str, str, dict[str, Any]]

HOSTS: dict[str, Any] = {
    "openai_chat": CHAT,
    "openai_responses": RESPONSES,
    "anthropic": ANTHROPIC,
    "gemini": GEMINI,
    "gemini_gca": GCA,
}
_GEMINI_USAGE = {"promptTokenCount": 5_000, "candidatesTokenCount": 700, "totalTokenCount": 5_700}
# 5,000 tokens in, 700 out.
USAGES: dict[str, dict[str, int]] = {
    "openai_chat": {"prompt_tokens": 5_000, "completion_tokens": 700, "total_tokens": 5_700},
    "openai_responses": {"input_tokens": 5_000, "output_tokens": 700, "total_tokens": 5_700},
    "anthropic": {"input_tokens": 5_000, "output_tokens": 700},
    "gemini": _GEMINI_USAGE,
    "gemini_gca": _GEMINI_USAGE,
}


def reply_with(dialect: str, text: str, *calls: Called, finish: str = "", **members: Any) -> ScriptedReply:
    """A reply with text and calls. ``members`` are added to each call."""
    return ScriptedReply(
        message=_message(dialect, text, calls, members),
        finish_reason=finish,
        usage=USAGES[dialect] if not finish else {},
    )


def body_with(dialect: str, text: str, *calls: Called, streams: bool = False, number: int = 0, **members: Any) -> bytes:
    """The body of such a reply, or its events. ``number`` makes its id."""
    exchange = ScriptedExchange(
        request={},
        reply=reply_with(dialect, text, *calls, **members),
        counted=TokenCounts(input=10, cached=0, output=5),
        id=f"id{number}",
        model="m",
    )
    host = HOSTS[dialect]
    return b"".join(host.events(exchange)) if streams else bytes(host.whole(exchange))


def answer_with(host: RawUpstream, *replies: bytes) -> None:
    """Let a host answer its next requests with these bytes; then the connection ends."""
    left = list(replies)

    async def handler(_: Any, __: Any, writer: Any) -> None:
        writer.write(left.pop(0))
        await writer.drain()

    host.handler = handler
    host.requests.clear()


def response(body: bytes, content_type: str = "application/json") -> bytes:
    """A response with a body."""
    return http_head(content_type) + body


def _message(dialect: str, text: str, calls: Sequence[Called], members: dict[str, Any]) -> dict[str, Any]:
    if dialect == "openai_chat":
        functions = [(call_id, {"name": name, "arguments": json.dumps(given)}) for call_id, name, given in calls]
        made = [{"id": call_id, "type": "function", "function": each, **members} for call_id, each in functions]
        return {"content": text, **({"tool_calls": made} if made else {})}
    if dialect == "openai_responses":
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items: list[dict[str, Any]] = [{"type": "message", "role": "assistant", "status": "completed"}]
        items[0] |= {"id": f"msg_{text[:4]}", "content": content}
        for call_id, name, given in calls:
            item = {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "status": "completed"}
            items.append({**item, "name": name, "arguments": json.dumps(given), **members})
        return {"output": items}
    if dialect == "anthropic":
        blocks = [
            {"type": "tool_use", "id": call_id, "name": name, "input": given, **members}
            for call_id, name, given in calls
        ]
        return {"content": [{"type": "text", "text": text}, *blocks]}
    parts = [
        {"functionCall": {"id": call_id, "name": name, "args": given, **members}} for call_id, name, given in calls
    ]
    return {"parts": [{"text": text}, *parts]}
