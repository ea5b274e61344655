"""Restore the request fields that a response repeats to the client's own, without what Tersely added."""

from __future__ import annotations

from tersely.dialects.wire import raw_json

_CHAIN = ("previous_response_id", "conversation")


class RequestFields:
    """The fields of the request as the client ``sent`` it; empty: nothing was added."""

    def __init__(self, sent: bytes = b"") -> None:
        self._sent = raw_json.split_object(sent) if sent else {}
        self._tools = {"", *map(_tool_name, _array(self._sent.get("tools")))}

    def __bool__(self) -> bool:
        """Return whether anything may have to be put back."""
        return bool(self._sent)

    def restore(self, response: dict[str, bytes]) -> dict[str, bytes]:
        """Return a response's members with the client's instructions, history reference and tools; the rest is
        unchanged.
        """
        if not self._sent:
            return response
        changed = dict(response)
        own = self._sent.get("instructions", b"null")
        said = response.get("instructions", b"null")
        if said.startswith(b'"') and not _is_same(said, own):
            changed["instructions"] = own
        for name in _CHAIN:
            if name in self._sent and response.get(name) == b"null":
                value = self._sent[name]
                named = name == "conversation" and value.startswith(b'"')
                changed[name] = raw_json.join_object({"id": value}) if named else value
        tools = _array(response.get("tools"))
        kept = [raw for raw in tools if _tool_name(raw) in self._tools]
        if kept != tools:
            changed["tools"] = raw_json.join_array(kept)
        choice = self._sent.get("tool_choice", b'"auto"')
        if response.get("tool_choice") == b'"none"' and not _is_same(choice, b'"none"'):
            changed["tool_choice"] = choice
        return changed


def _tool_name(raw: bytes) -> str:
    """Return the name of a function tool; the provider's own tools have none."""
    value = raw_json.load(raw)
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    return name if isinstance(name, str) else ""


def _array(raw: bytes | None) -> list[bytes]:
    return raw_json.split_array(raw) if raw and raw.startswith(b"[") else []


def _is_same(one: bytes, other: bytes) -> bool:
    return bool(raw_json.load(one) == raw_json.load(other))
