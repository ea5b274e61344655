"""A streamed reply of chat completions, read for a person."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from tersely.server.errors import CommandError

DATA, DONE = "data:", "[DONE]"


async def read_reply(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the text of a reply as it arrives, and at its end the calls that it makes.

    Raises `CommandError` for a reply that reports an error or breaks off.
    """
    calls: dict[int, dict[str, str]] = {}
    is_ended = False
    async for line in lines:
        if not line.startswith(DATA):
            continue
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            is_ended = True
            break
        try:
            event = json.loads(data)
            if event.get("error"):
                raise CommandError(f"the model's host failed: {_words(event['error'])}")
            choice = (event.get("choices") or [{}])[0]
            is_ended = is_ended or bool(choice.get("finish_reason"))
            texts = _read_delta(choice.get("delta") or {}, calls)
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as broken:
            raise CommandError("the reply cannot be read") from broken
        for text in texts:
            yield text
    if not is_ended:
        raise CommandError("the reply broke off")
    for call in calls.values():
        yield f"[call of {call['name']} with {call['arguments'] or '{}'}: there are no tools here]\n"


def _words(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)


def _read_delta(delta: dict[str, Any], calls: dict[int, dict[str, str]]) -> list[str]:
    """Return the texts of a delta. Parts of calls are added to ``calls``, by their index."""
    for piece in delta.get("tool_calls") or ():
        call = calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
        function = piece.get("function") or {}
        for name in call:
            call[name] += function.get(name) or ""
    return [text for name in ("content", "refusal") if (text := delta.get(name))]
