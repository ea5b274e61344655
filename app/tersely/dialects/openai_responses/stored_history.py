"""Histories and replies that the provider stores: references to them, refusals, and a reply that is fetched again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tersely.dialects.finish_reasons import CUT_OFF
from tersely.dialects.openai_responses.content import INSTRUCTIONS, item_type, items_of
from tersely.dialects.openai_responses.whole import replace_output
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body

MARK = b'"item_reference"'

# Providers, compatible hosts and gateways differ in status, code and text; most name the member.
_REFUSALS = frozenset({400, 403, 404, 405, 410, 422, 501})
_HISTORY = r"previous[ _]response|response(?:[ _]id| with id)|\bconversation|\bresp_"
_MISSING = (
    r"not[ _]found|n[o']t exist|no such|unknown|unrecogni[sz]ed|unsupported|not (?:been )?(?:support|implement|enabl)"
    r"|not (?:stored|available|permitted|allowed|persisted)|cannot be used|disabled|expired|data retention"
)
_LACKS = re.compile(rf"(?:{_HISTORY}).*(?:{_MISSING})|(?:{_MISSING}).*(?:{_HISTORY})", re.IGNORECASE | re.DOTALL)
_DOES_NOT = re.compile(r"does not support '?(?:previous_response_id|conversation)", re.IGNORECASE)
_LOOKED_AT = 16 * 1024
_STATUSES = frozenset({"incomplete", "failed", "cancelled", "queued", "in_progress"})


def referenced_ids(body: bytes) -> list[str]:
    """Return the ids of the items that a request refers to, in order; an empty list for an invalid body."""
    if MARK not in body:
        return []
    try:
        items = raw_json.split_array(split_body(body).get("input", b"[]"))
    except ValueError:
        return []
    return [found for item in items if (found := _referred(item))]


def with_items(body: bytes, known: Mapping[str, bytes]) -> bytes:
    """Return the request with the items themselves in place of references to them, as far as they are known by their
    ids.
    """
    members = split_body(body)
    items = raw_json.split_array(members["input"])
    members["input"] = raw_json.join_array([known.get(_referred(item), item) for item in items])
    return raw_json.join_object(members)


def items_by_id(reply: bytes) -> dict[str, bytes]:
    """Return the items of a reply that can be referred to."""
    found: dict[str, bytes] = {}
    for raw in items_of(reply):
        item = raw_json.load(raw)
        name = item.get("id") if isinstance(item, dict) else None
        if isinstance(name, str) and name:
            found[name] = raw
    return found


def _referred(raw: bytes) -> str:
    item = raw_json.load(raw) if MARK in raw else None
    name = item.get("id") if isinstance(item, dict) and item_type(item) == "item_reference" else None
    return name if isinstance(name, str) else ""


def lacks_history(status: int, body: bytes) -> bool:
    """Return whether an error reports a missing history: in a response, or (``status`` 200) at the beginning of a
    stream.

    Other errors, such as a busy conversation, do not count.
    """
    text = body[:_LOOKED_AT].decode(errors="replace")
    if status == 200:
        return '"error"' in text and "not_found" in text and bool(_LACKS.search(text))
    if status not in _REFUSALS:
        return False
    if _LACKS.search(text) or _DOES_NOT.search(text):
        return True
    return status == 404 and "not_found" in text and "model" not in text


def restore_response(
    body: bytes,
    message: bytes | None,
    *,
    instructions: Sequence[str],
    tools: Mapping[str, str],
    usage: bytes = b"",
    finish: str = "",
) -> bytes:
    """Return a stored response as its client was given it.

    ``message``: the items that the client was given (None: the response's own; empty: those but calls of ``tools``).
    ``usage`` and ``finish`` replace its usage and its status (empty: unchanged). ``instructions`` and ``tools`` (name
    -> description) were added to its request and are removed. The same bytes if nothing changes. Raises ``ValueError``
    for a body that is no response.
    """
    members = raw_json.split_object(body)
    listed = raw_json.split_array(members["tools"]) if members.get("tools", b"").startswith(b"[") else []
    own = [raw for raw in listed if _is_among(raw, tools)]
    if message:
        changed = replace_output(members, items_of(message))
    elif message is not None and own and members.get("output", b"").startswith(b"["):
        items = raw_json.split_array(members["output"])
        kept = [item for item in items if not _is_call_of(item, tools)]
        changed = members if kept == items else replace_output(members, kept)
    else:
        changed = members
    if usage and "usage" in members:
        changed = {**changed, "usage": usage}
    if ended := _as_ended(members, finish):
        changed = {**changed, **ended}
    instructions_text = raw_json.load(members.get(INSTRUCTIONS, b"null"))
    if isinstance(instructions_text, str) and (text := _without(instructions_text, instructions)) != instructions_text:
        changed = {**changed, INSTRUCTIONS: raw_json.dump(text or None)}
    if own:
        changed = {**changed, "tools": raw_json.join_array([raw for raw in listed if raw not in own])}
    return body if changed is members else raw_json.like_original(body, raw_json.join_object(changed))


def _as_ended(members: Mapping[str, bytes], finish: str) -> dict[str, bytes]:
    """Return the members of a response that say how it ended: the host has them of its first round."""
    if finish == "completed":
        ended = {"status": raw_json.dump(finish), "incomplete_details": b"null"}
    elif finish in CUT_OFF and finish not in _STATUSES:
        ended = {"status": b'"incomplete"', "incomplete_details": raw_json.dump({"reason": finish})}
    else:
        return {}
    return {name: value for name, value in ended.items() if members.get(name, b"null") != value}


def _is_call_of(raw: bytes, tools: Mapping[str, str]) -> bool:
    item = raw_json.load(raw)
    return isinstance(item, dict) and item_type(item) == "function_call" and item.get("name") in tools


def _without(instructions_text: str, instructions: Sequence[str]) -> str:
    """Remove Tersely's instructions from the end of the client's own."""
    for text in instructions:
        if instructions_text.endswith(text):
            return instructions_text.removesuffix(text).removesuffix("\n\n")
    return instructions_text


def _is_among(raw: bytes, tools: Mapping[str, str]) -> bool:
    tool = raw_json.load(raw)
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        return False
    return tool["name"] in tools and tools[tool["name"]] == tool.get("description")
