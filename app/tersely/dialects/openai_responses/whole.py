"""Strip tags from whole texts: a reply that is not streamed, and the repetitions at the end of a stream.

Only the affected texts are replaced, and the data that points into them: annotation positions and ``logprobs`` tokens.
Everything else keeps its bytes. The request fields that a response repeats are restored to the client's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from tersely.dialects.dialect import ClientView, Reply, ReplyChoice
from tersely.dialects.openai_responses.accumulator import (
    incomplete_reason,
    output_items,
    string,
)
from tersely.dialects.openai_responses.content import as_run
from tersely.dialects.undescribed import UNDESCRIBED, unread_body
from tersely.dialects.wire import raw_json
from tersely.dialects.wire.pieces import Piece, PieceFilter
from tersely.domain.text.tags import StrippedText, strip_tags

_CHAIN = ("previous_response_id", "conversation")
_OFFSETS = ("start_index", "end_index", "index")
_REMEMBERED = 8
"""A stream repeats each text three times."""


def split_reply(body: bytes, view: ClientView) -> tuple[bytes, Reply]:
    """Return the body for the client of a reply that is not streamed, and the reply.

    The same bytes if nothing is stripped; else only the affected texts are replaced. A body that is no response (an
    error under status 200, invalid JSON) is returned unchanged, and its reply has no choices.
    """
    stripper = ResponseTagStripper(view)
    try:
        members = raw_json.split_object(body)
        error = members.get("error", b"null")
        error = b"" if error == b"null" else error
    except ValueError:
        return body, Reply(unread=unread_body(body))
    try:
        listed = raw_json.split_array(members.get("output", b""))
        items = output_items({"output": members["output"]})
        status = string(members.get("status"))
        choice = stripper.choice(items, incomplete_reason(members) or status)
        shown = stripper.response(body) if stripper else body
    except UNDESCRIBED:
        return body, Reply(error=error, unread=() if error else unread_body(body))
    usage = members.get("usage", b"null")
    reply = Reply(
        id=string(members.get("id")),
        model=string(members.get("model")),
        choices=(choice,) if items or not error else (),
        usage=b"" if usage == b"null" else usage,
        error=error,
        is_done=status in {"completed", "incomplete", ""} and not error,
        unread=() if len(items) == len(listed) else unread_body(body),
    )
    return body if shown is body else raw_json.like_original(body, shown), reply


class ResponseTagStripper:
    """Strips the tags of a client's view, and restores the fields of the client's own request."""

    def __init__(self, view: ClientView) -> None:
        self._tags = view.tags
        self._request_fields = RequestFields(view.own_request)
        self._known: dict[str, StrippedText] = {}

    def choice(self, items: list[bytes], finish: str) -> ReplyChoice:
        """Return the choice of ``items``, which are in the model's view."""
        run = as_run(items)
        shown = [self.item(raw) for raw in items] if self._tags else items
        stripped = [self.text(text) for raw in items for text in _texts(raw)] if self._tags else []
        states = [each.state for each in stripped if each.state is not None]
        return ReplyChoice(
            index=0,
            model_message=run,
            client_message=run if shown == items else as_run(shown),
            terse=tuple(entry for each in stripped for entry in each.terse),
            state=states[-1] if states else None,
            finish_reason=finish,
        )

    def __bool__(self) -> bool:
        """Return whether anything may have to be taken out."""
        return bool(self._tags or self._request_fields)

    def response(self, raw: bytes) -> bytes:
        """Return a whole response; the same bytes if nothing is stripped."""
        members = raw_json.split_object(raw)
        changed = self._request_fields.restore(members)
        output = members.get("output", b"")
        if self._tags and output.startswith(b"["):
            changed = self._with_output(changed, raw_json.split_array(output))
        return raw if changed == members else raw_json.join_object(changed)

    def _with_output(self, members: dict[str, bytes], items: list[bytes]) -> dict[str, bytes]:
        shown = [self.item(item) for item in items]
        return members if shown == items else replace_output(members, shown)

    def item(self, raw: bytes) -> bytes:
        """Return an item of the output."""
        if b'"output_text"' not in raw:
            return raw
        members = raw_json.split_object(raw)
        content = members.get("content", b"")
        if not content.startswith(b"["):
            return raw
        parts = raw_json.split_array(content)
        shown = [self.part(part) for part in parts]
        return raw if shown == parts else raw_json.join_object({**members, "content": raw_json.join_array(shown)})

    def part(self, raw: bytes) -> bytes:
        """Return a part of a message's content."""
        if not raw.startswith(b"{"):
            return raw
        members = raw_json.split_object(raw)
        if members.get("type") != b'"output_text"':
            return raw
        shown = self.words(members)
        return raw if shown is members else raw_json.join_object(shown)

    def words(self, members: dict[str, bytes]) -> dict[str, bytes]:
        """Return the members of an object with a whole ``text``; the same object if nothing is stripped."""
        text = _string(members.get("text"))
        shown = self.text(text).shown
        if shown == text:
            return members
        changed = {**members, "text": raw_json.dump(shown)}
        offsets: list[int] | None = None
        for name, adapt in (("annotations", _move_all), ("logprobs", _keep_shown)):
            if members.get(name, b"[]") != b"[]" and members[name].startswith(b"["):
                offsets = offsets or self.offsets(text)
                changed[name] = adapt(members[name], offsets)
        return changed

    def text(self, text: str) -> StrippedText:
        """Return a whole text."""
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[text] = strip_tags(text, self._tags)
        return known

    def offsets(self, text: str) -> list[int]:
        """Return where each character of ``text``, and its end, is in the shown text."""
        pieces = [Piece(character) for character in text]
        sieve = PieceFilter(self._tags)
        for piece in pieces:
            sieve.feed(piece)
        sieve.close()
        return list(accumulate((len(piece.shown) for piece in pieces), initial=0))


def replace_output(members: dict[str, bytes], items: list[bytes]) -> dict[str, bytes]:
    """Return the members of a response with other items, and with their text in ``output_text`` if it has that."""
    changed = {**members, "output": raw_json.join_array(items)}
    if members.get("output_text", b"").startswith(b'"'):
        changed["output_text"] = raw_json.dump("".join(text for item in items for text in _texts(item)))
    return changed


def shift_annotation(annotation: bytes, offsets: list[int]) -> bytes:
    """Return an annotation with its positions in the visible text."""
    if not annotation.startswith(b"{"):
        return annotation
    members = raw_json.split_object(annotation)
    for name in _OFFSETS:
        value = raw_json.load(members.get(name, b"null"))
        if type(value) is int and 0 <= value < len(offsets):
            members[name] = raw_json.dump(offsets[value])
    return raw_json.join_object(members)


def keep_tokens(logprobs: bytes, shown: str) -> bytes:
    """Return the tokens of one delta that form its visible part ``shown``."""
    kept: list[bytes] = []
    offset = 0
    for raw in raw_json.split_array(logprobs):
        token = _token(raw)
        if token and shown.startswith(token, offset):
            kept.append(raw)
            offset += len(token)
    return raw_json.join_array(kept)


def _move_all(annotations: bytes, offsets: list[int]) -> bytes:
    return raw_json.join_array([shift_annotation(raw, offsets) for raw in raw_json.split_array(annotations)])


def _keep_shown(logprobs: bytes, offsets: list[int]) -> bytes:
    kept: list[bytes] = []
    start = 0
    last = len(offsets) - 1
    for raw in raw_json.split_array(logprobs):
        end = start + len(_token(raw))
        if offsets[min(end, last)] > offsets[min(start, last)]:
            kept.append(raw)
        start = end
    return raw_json.join_array(kept)


def _token(raw: bytes) -> str:
    value: Any = raw_json.load(raw)
    token = value.get("token") if isinstance(value, dict) else None
    return token if isinstance(token, str) else ""


def _texts(item: bytes) -> Iterable[str]:
    if b'"output_text"' not in item:
        return
    content = raw_json.load(item).get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") == "output_text" and isinstance(part.get("text"), str):
            yield part["text"]


def _string(raw: bytes | None) -> str:
    return raw_json.string(raw)


class RequestFields:
    """The fields of the request as the client ``sent`` it; empty: Tersely added nothing."""

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
        text = response.get("instructions", b"null")
        if text.startswith(b'"') and not _is_same(text, own):
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
