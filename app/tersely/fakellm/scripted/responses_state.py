"""The state that OpenAI's Responses keep between calls: replies, conversations, and the order of reasoning items."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tersely.fakellm.strict.openai_chat import Refusal
from tersely.fakellm.strict.openai_responses import check_pairing

Item = dict[str, Any]

_KEPT = 256
_LED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A stored reply, and all items up to and including it."""

    body: bytes
    items: Sequence[Item]


class StoredHistories:
    """The stored histories of a host. One that ``is_forgetful`` stores only their order, and refuses requests that
    refer to them.
    """

    def __init__(self, *, is_forgetful: bool = False) -> None:
        self.is_forgetful = is_forgetful
        self.replies: OrderedDict[str, StoredResponse] = OrderedDict()
        self.conversations: OrderedDict[str, list[Item]] = OrderedDict()
        self._thoughts: OrderedDict[str, None] = OrderedDict()
        self._led: OrderedDict[str, str] = OrderedDict()

    def whole(self, request: Mapping[str, Any]) -> dict[str, Any] | Refusal:
        """Return the request with the referenced history in front of its input."""
        reply_id, conversation = request.get("previous_response_id"), _conversation(request)
        if reply_id and conversation:
            names = "'previous_response_id' or 'conversation'"
            message = f"Mutually exclusive parameters: Ensure you are only providing one of: {names}."
            return Refusal(message=message, code="mutually_exclusive_parameters")
        before: Sequence[Item] = ()
        if reply_id:
            if reply_id not in self.replies:
                return Refusal(
                    message=f"Previous response with id '{reply_id}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = self.replies[reply_id].items
        elif conversation:
            if conversation not in self.conversations:
                return Refusal(message=f"Conversation with id '{conversation}' not found.", status=404)
            before = self.conversations[conversation]
        own = _items(request)
        if refusal := self._check(own, [*before, *own]) or check_pairing([*before, *own]):
            return refusal
        return {**request, "input": [*before, *own]} if before else dict(request)

    def keep(self, request: Mapping[str, Any], whole: Mapping[str, Any], body: bytes) -> None:
        """Remember a reply, given as its body; ``whole`` is the request with its history."""
        reply = json.loads(body)
        output: list[Item] = reply["output"]
        self._note(output)
        if self.is_forgetful:
            return
        if request.get("store") is not False:
            self.replies[reply["id"]] = StoredResponse(body=body, items=[*_items(whole), *output])
            while len(self.replies) > _KEPT:
                self.replies.popitem(last=False)
        if conversation := _conversation(request):
            self.conversations[conversation] += [*_items(request), *output]

    def input_items(self, name: str) -> list[Item] | None:
        """Return the items that a stored reply answers, the newest first; None if no such reply is stored. An item
        without an id gets one.
        """
        kept = self.replies.get(name)
        if kept is None:
            return None
        count = len(kept.items) - len(json.loads(kept.body)["output"])
        named = [
            {"type": "message", **item, "id": item.get("id") or f"msg_in_{name.removeprefix('resp_')}_{number}"}
            for number, item in enumerate(kept.items[:count])
        ]
        return named[::-1]

    def open(self, items: Sequence[Item]) -> str | None:
        """Return the id of a new conversation; None if the host has none."""
        if self.is_forgetful:
            return None
        name = f"conv_{len(self.conversations) + 1}"
        self.conversations[name] = list(items)
        return name

    def _note(self, output: Sequence[Item]) -> None:
        thought = ""
        for item in output:
            if item.get("type") == "reasoning":
                thought = item["id"]
                if not self.is_forgetful:
                    self._thoughts[thought] = None
            elif thought and item.get("id"):
                self._led[item["id"]] = thought
            else:
                self._led.pop(item.get("id", ""), None)  # scripts may use an id twice
        for known in (self._thoughts, self._led):
            while len(known) > _LED:
                known.popitem(last=False)

    def _check(self, own: Sequence[Item], whole: Sequence[Item]) -> Refusal | None:
        there = {item.get("id") for item in whole}
        for item in own:
            name, kind = item.get("id"), item.get("type", "message")
            if kind == "reasoning" and not item.get("encrypted_content") and name not in self._thoughts:
                return Refusal(
                    message=f"Item with id '{name}' not found. Items are not persisted when `store` is set to false. "
                    "Try again with `store` set to true, or remove this item from your input.",
                    param="input",
                    status=404,
                )
            thought = self._led.get(name) if isinstance(name, str) else None
            if thought is not None and thought not in there:
                message = f"Item '{name}' of type '{kind}' was provided without its required 'reasoning' item: "
                return Refusal(message=f"{message}'{thought}'.", param="input")
        return None


def _items(request: Mapping[str, Any]) -> list[Item]:
    items = request.get("input")
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _conversation(request: Mapping[str, Any]) -> str:
    named = request.get("conversation")
    name = named.get("id") if isinstance(named, dict) else named
    return name if isinstance(name, str) else ""
