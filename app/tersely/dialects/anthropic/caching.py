"""Set cache breakpoints: the client's own stay, and Tersely's use the remaining ones.

Tools and instructions keep theirs from epoch to epoch, so that a new epoch reads them from the cache. The others are at
the ends of head and tail. A mark moves from call to call, and the message that it leaves must not change otherwise: a
string cannot carry a mark, so all strings are written as lists.

The rules of the API: at most four marks in tools, system and messages together, including the automatic one
(``cache_control`` as a member of the request); a longer-lived mark never follows a shorter-lived one; thinking and
empty text cannot carry one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tersely.dialects.anthropic.content import block_type, is_blank, split_content, string_member
from tersely.dialects.wire import raw_json

MAX_BREAKPOINTS = 4

# Indexes of the parts in front of the messages, whose indexes are 0 and up.
_SYSTEM = -1
_TOOLS = -2
_MARK = b'"cache_control"'
# Clients may write a letter of the name as an escape.
_ESCAPED_LETTER = re.compile(rb"\\u00[567]")
_BLANK = re.compile(rb'"(?:\s|\\[nrt])*"')
_CACHEABLE = frozenset({"text", "image", "document", "search_result", "tool_use", "tool_result"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Breakpoint:
    index: int
    ttl: str


def may_carry_breakpoint(raw: bytes) -> bool:
    """Return False if JSON text certainly has no breakpoint."""
    return _MARK in raw or has_escaped_letter(raw)


def has_escaped_letter(raw: bytes) -> bool:
    """Return whether JSON text writes a letter as an escape, perhaps one of a breakpoint's name."""
    return b"\\u00" in raw and _ESCAPED_LETTER.search(raw) is not None


def limit_breakpoints(members: dict[str, bytes], messages: list[bytes]) -> list[bytes]:
    """Return ``messages`` with at most the permitted number of breakpoints. The earliest are removed.

    Messages that were stored at different times may carry one each, although their client never sent them together.
    """
    fixed = len(_fixed_breakpoints(members)) + _is_set(members.get("cache_control"))
    counts = [len(_lifetimes(raw)) for raw in messages]
    excess = fixed + sum(counts) - MAX_BREAKPOINTS
    kept = list(messages)
    for index, count in enumerate(counts):
        if excess <= 0:
            break
        if count:
            kept[index] = _without_breakpoints(messages[index])
            excess -= count
    return kept


def add_breakpoints(members: dict[str, bytes], messages: Sequence[bytes], indexes: Sequence[int]) -> list[bytes]:
    """Return ``messages`` with a breakpoint at each of ``indexes``, at the instructions and at the tools, as
    far as there is room.

    ``members`` are the request's others; ``system`` and ``tools`` in it are patched. Later messages come first, because
    the prefix that ends there is longer. A place that contains a mark already counts as done.
    """
    marked = [_with_list(raw) for raw in messages]
    if members.get("system", b"").startswith(b'"'):
        members["system"] = raw_json.join_array(split_content(members["system"]))
    fixed = _fixed_breakpoints(members)
    fixed += [_Breakpoint(index=index, ttl=ttl) for index, raw in enumerate(messages) for ttl in _lifetimes(raw)]
    if _is_set(members.get("cache_control")):
        fixed.append(_Breakpoint(index=len(messages) - 1, ttl=_lifetime(members["cache_control"])))
    for index in sorted({_carrier(messages, index) for index in indexes} | {_SYSTEM, _TOOLS}, reverse=True):
        if len(fixed) >= MAX_BREAKPOINTS:
            break
        if any(each.index == index for each in fixed):
            continue
        following = min((each for each in fixed if each.index >= index), key=lambda each: each.index, default=None)
        ttl = following.ttl if following else ""
        holder = members if index < 0 else raw_json.split_object(marked[index])
        name = {_TOOLS: "tools", _SYSTEM: "system"}.get(index, "content")
        blocks = _with_breakpoint(holder.get(name, b""), ttl, _carries_as_tool if index == _TOOLS else _carries)
        if blocks is None:
            continue
        holder[name] = blocks
        if index >= 0:
            marked[index] = raw_json.join_object(holder)
        fixed.append(_Breakpoint(index=index, ttl=ttl))
    return marked


def _with_list(raw: bytes) -> bytes:
    """Return a message whose string content is written as a list of one block, which can carry a mark.

    Blank strings stay, since they are refused as a block, and so do instructions between the messages, which never
    carry one.
    """
    members = raw_json.split_object(raw)
    content = members.get("content", b"")
    if not content.startswith(b'"') or _BLANK.fullmatch(content) or members.get("role") == b'"system"':
        return raw
    members["content"] = b'[{"type":"text","text":' + content + b"}]"
    return raw_json.join_object(members)


def _carrier(messages: Sequence[bytes], index: int) -> int:
    """Instructions between the messages are left alone: the message in front of them carries the breakpoint."""
    while index > 0 and string_member(raw_json.split_object(messages[index]), "role") == "system":
        index -= 1
    return index


def _fixed_breakpoints(members: dict[str, bytes]) -> list[_Breakpoint]:
    """Return the breakpoints of tools and instructions."""
    found: list[_Breakpoint] = []
    for name, index in (("tools", _TOOLS), ("system", _SYSTEM)):
        value = members.get(name, b"null")
        if value.startswith(b"[") and may_carry_breakpoint(value):
            found += [_Breakpoint(index=index, ttl=ttl) for ttl in _block_lifetimes(value)]
    return found


def _lifetimes(raw: bytes) -> list[str]:
    """Return how long the breakpoints of a message live, each; nothing: as long as the provider likes."""
    if not may_carry_breakpoint(raw):
        return []
    content = raw_json.split_object(raw).get("content", b"null")
    return _block_lifetimes(content) if content.startswith(b"[") else []


def _block_lifetimes(blocks: bytes) -> list[str]:
    found: list[str] = []
    for block in raw_json.split_array(blocks):
        if not may_carry_breakpoint(block):
            continue
        members = raw_json.split_object(block)
        inner = members.get("content", b"")
        if inner.startswith(b"["):
            found += _block_lifetimes(inner)
        if _is_set(members.get("cache_control")):
            found.append(_lifetime(members["cache_control"]))
    return found


def _is_set(value: bytes | None) -> bool:
    return value is not None and value != b"null"


def _lifetime(control: bytes) -> str:
    value = raw_json.load(control)
    ttl = value.get("ttl") if isinstance(value, dict) else None
    return ttl if isinstance(ttl, str) else ""


def _without_breakpoints(raw: bytes) -> bytes:
    members = raw_json.split_object(raw)
    return raw_json.join_object({**members, "content": _without(members["content"])})


def _without(blocks: bytes) -> bytes:
    kept: list[bytes] = []
    for block in raw_json.split_array(blocks):
        if not may_carry_breakpoint(block):
            kept.append(block)
            continue
        members = raw_json.split_object(block)
        members.pop("cache_control", None)
        if members.get("content", b"").startswith(b"["):
            members["content"] = _without(members["content"])
        kept.append(raw_json.join_object(members))
    return raw_json.join_array(kept)


def _with_breakpoint(items: bytes, ttl: str, carries: Callable[[bytes], bool]) -> bytes | None:
    """Return the list ``items`` with a breakpoint on the last one that can carry one; None if none can."""
    split = raw_json.split_array(items) if items.startswith(b"[") else []
    control = raw_json.dump({"type": "ephemeral", "ttl": ttl} if ttl else {"type": "ephemeral"})
    for index in reversed(range(len(split))):
        if carries(split[index]):
            members = raw_json.split_object(split[index])
            split[index] = raw_json.join_object({**members, "cache_control": control})
            return raw_json.join_array(split)
    return None


def _carries(block: bytes) -> bool:
    return block_type(block) in _CACHEABLE and not is_blank(block)


def _carries_as_tool(tool: bytes) -> bool:
    """Tools that are only loaded when searched for are no part of the prompt's beginning."""
    return raw_json.split_object(tool).get("defer_loading", b"false") in {b"false", b"null"}
