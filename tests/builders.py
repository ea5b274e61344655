"""Small constructors for messages, with the wire form that OpenAI's chat dialect gives them, and for stored links."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tersely.dialects.openai_chat.write import write_message
from tersely.domain.history.chain import set_injected_apart
from tersely.domain.history.links import StoredLink
from tersely.domain.messages import Message, Part, Role, Text, ToolCall, ToolResult


def message(role: Role, *parts: Part) -> Message:
    """A message of these parts, as a dialect reads it: injected blocks stand apart."""
    raw = write_message(Message(role=role, parts=parts, raw=b""))
    own, injected = set_injected_apart(role, parts)
    return Message(role=role, parts=own, raw=raw, injected=injected)


def system(text: str) -> Message:
    return message("system", Text(text=text))


def user(text: str) -> Message:
    return message("user", Text(text=text))


def call(call_id: str, name: str = "tool", arguments: dict[str, Any] | str | None = None) -> ToolCall:
    """A tool call; ``arguments`` as a dict or as the JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return ToolCall(id=call_id, name=name, arguments=text)


def assistant(text: str | None = None, *calls: ToolCall) -> Message:
    """``assistant("words")``, ``assistant(None, call("c1"))``, ``assistant("words", call("c1"),
    call("c2"))``.
    """
    words: tuple[Part, ...] = (Text(text=text),) if text else ()
    return message("assistant", *words, *calls)


def result(call_id: str, text: str = "ok") -> Message:
    return message("tool", ToolResult(call_id=call_id, text=text))


def stored_links(
    kinds: str | Sequence[str], *, superseded: Collection[int] = (), follows: Mapping[int, int] | None = None
) -> list[StoredLink]:
    """Return links in order, numbered from 1: questions (q), tool results (t), replies of calls (a, b), replies that
    the client sent (i). Each follows the one before, but for those that ``follows`` names.
    """
    roles: dict[str, Role] = {"q": "user", "t": "tool"}
    return [
        StoredLink(
            seq=seq,
            position=float(seq),
            turn=seq,
            tokens=1,
            role=roles.get(kind, "assistant"),
            status="superseded" if seq in superseded else "live",
            digest=str(seq).encode(),
            relayed=kind in "ab",
            call=0,
            follows=(follows or {}).get(seq, seq - 1),
        )
        for seq, kind in enumerate(kinds, start=1)
    ]
