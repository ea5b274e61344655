"""Items that a request refers to instead of sending them, because the provider is taken to have kept them."""

from __future__ import annotations

from collections.abc import Mapping

from tersely.dialects.openai_responses.items import item_type, items_of
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.members import split_body

MARK = b'"item_reference"'


def referenced_ids(body: bytes) -> list[str]:
    """Return the ids of the items that a request refers to.

    In its order. Nothing for a body that cannot be understood.
    """
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
