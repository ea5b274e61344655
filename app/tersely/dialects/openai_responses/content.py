"""The items of a conversation: their kinds, and how they form messages.

A model's reply consists of several items (thoughts, texts, calls). They form one message here, whose raw form is
``{"output": [...]}``, as in the reply itself; a lone item is its own raw form. Every other item is a message.
Instructions, which are outside of the items, form the message ``{"instructions": ...}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tersely.dialects.wire import raw_json
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Role

INSTRUCTIONS = "instructions"
RUN = "output"

CONTEXT_TYPES = frozenset({"additional_tools", "configuration_update", "compaction_trigger"})
"""Items that Codex sends to the provider between messages. They are nobody's message, so no link of a history."""

_ROLES: dict[str, Role] = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant"}
_NEAR_START = 24
"""Bytes within which the only key of our own wrappings stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """The form of a call in one type of item.

    ``name``: the call's name if no member has it. ``input``: the member with its arguments. ``id``: the member that
    results refer to.
    """

    input: str
    name: str = ""
    id: str = "call_id"


CALLS = {
    "function_call": CallKind(input="arguments"),
    "custom_tool_call": CallKind(input="input"),
    "computer_call": CallKind(input="action", name="computer"),
    "local_shell_call": CallKind(input="action", name="local_shell"),
    "shell_call": CallKind(input="action", name="shell"),
    "apply_patch_call": CallKind(input="operation", name="apply_patch"),
    "tool_search_call": CallKind(input="arguments", name="tool_search"),
    "mcp_approval_request": CallKind(input="arguments", id="id"),
}


def item_type(item: dict[str, Any]) -> str:
    """Return the type of an item; messages may come without."""
    kind = item.get("type")
    return kind if isinstance(kind, str) and kind else "message"


def role_of(item: dict[str, Any]) -> Role:
    """Return the role of an item. Items without a role that answer no call are the model's.

    Raises ``InvalidRequest`` for an unknown role.
    """
    kind, role = item_type(item), item.get("role")
    if role is not None or kind == "message":
        known = _ROLES.get(role) if isinstance(role, str) else None
        if known is None:
            raise InvalidRequest(f"unknown role {role!r}", field="role")
        return known
    if kind in CONTEXT_TYPES:
        return "developer"
    return "tool" if answered_call(item) else "assistant"


def call_id(item: dict[str, Any]) -> str:
    """Return the id of a call that the client must answer; empty for every other item."""
    kind = CALLS.get(item_type(item))
    if kind is None or _runs_at_provider(item):
        return ""
    return _string(item.get(kind.id)) or _string(item.get("id"))


def answered_call(item: dict[str, Any]) -> str:
    """Return the id of the call that an item answers; empty for every other item."""
    kind = item_type(item)
    if kind == "mcp_approval_response":
        return _string(item.get("approval_request_id"))
    if kind == "local_shell_call_output":
        return _string(item.get("call_id")) or _string(item.get("id"))
    return _string(item.get("call_id")) if kind.endswith("_output") else ""


def items_of(raw: bytes) -> list[bytes]:
    """Return the items of a message, verbatim."""
    if b'"output"' not in raw[:_NEAR_START]:
        return [raw]
    members = raw_json.split_object(raw)
    return raw_json.split_array(members[RUN]) if is_run(members) else [raw]


def is_run(members: Iterable[str]) -> bool:
    """Return whether these are the members of a message of several items, or of a whole response."""
    return RUN in members and "type" not in members


def is_instructions(raw: bytes) -> bool:
    """Return whether a message consists of instructions."""
    return b'"instructions"' in raw[:_NEAR_START] and raw_json.split_object(raw).keys() == {INSTRUCTIONS}


def as_message(items: Sequence[bytes]) -> bytes:
    """Return the raw form of a message of ``items``."""
    return items[0] if len(items) == 1 else as_run(items)


def as_run(items: Sequence[bytes]) -> bytes:
    """Return the raw form of a reply of ``items``."""
    return raw_json.join_object({RUN: raw_json.join_array(list(items))})


def group(items: Iterable[bytes]) -> list[bytes]:
    """Group items into messages: neighbouring items of the model are one. Raises ``InvalidRequest`` for an invalid
    item.
    """
    messages: list[bytes] = []
    run: list[bytes] = []
    at_provider: set[str] = set()
    for raw in items:
        item = raw_json.load(raw)
        if not isinstance(item, dict):
            raise InvalidRequest("an item that is not an object", field="input")
        if _runs_at_provider(item) and item.get("call_id"):
            at_provider.add(_string(item["call_id"]))
        if role_of(item) == "assistant" or answered_call(item) in at_provider:
            run.append(raw)
            continue
        messages += [as_message(run)] if run else []
        run = []
        messages.append(raw)
    return [*messages, as_message(run)] if run else messages


def _runs_at_provider(item: dict[str, Any]) -> bool:
    """Return whether a call is answered by the provider itself, in the same reply."""
    kind = item_type(item)
    if kind == "tool_search_call":
        return item.get("execution") != "client" or not item.get("call_id")
    environment = item.get("environment") if kind == "shell_call" else None
    kind = _string(environment.get("type")) if isinstance(environment, dict) else ""
    return kind.startswith("container")


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""
