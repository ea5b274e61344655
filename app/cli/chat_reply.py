"""A streamed reply of chat completions, read for a person."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from app.cli.refusals import Refused

DATA, DONE = "data:", "[DONE]"


async def read_reply(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """The text of a reply as it comes, and at its end the calls that it makes.

    Raises `Refused` for a reply that tells of an error, or that breaks off.
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
        choice = _choice(data)
        is_ended = is_ended or bool(choice.get("finish_reason"))
        delta = choice.get("delta") or {}
        for text in (delta.get("content"), delta.get("refusal")):
            if isinstance(text, str) and text:
                yield text
        for call in delta.get("tool_calls") or ():
            _add(calls, call)
    if not is_ended:
        raise Refused("the reply broke off")
    for call in calls.values():
        yield f"[call of {call['name']} with {call['arguments'] or '{}'}: there are no tools here]\n"


def _choice(data: str) -> dict[str, Any]:
    """The first choice of an event; an empty one where it has none. Raises `Refused`."""
    try:
        event = json.loads(data)
        error = event.get("error")
        choices = event.get("choices") or [{}]
        choice: dict[str, Any] = choices[0]
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError) as broken:
        raise Refused("the reply cannot be read") from broken
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        raise Refused(f"the model's host failed: {message}")
    return choice


def _add(calls: dict[int, dict[str, str]], piece: Any) -> None:
    known = calls.setdefault(piece.get("index", 0), {"name": "", "arguments": ""})
    for name, text in (piece.get("function") or {}).items():
        if name in known and isinstance(text, str):
            known[name] += text
