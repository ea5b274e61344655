"""Strip tags from replies that are not streamed."""

from __future__ import annotations

from tersely.dialects.dialect import ClientView, Reply, ReplyChoice
from tersely.dialects.openai_chat.accumulator import text_of
from tersely.dialects.openai_chat.stream_events import string_of
from tersely.dialects.openai_content import replace_text
from tersely.dialects.undescribed import unread_body
from tersely.dialects.wire import raw_json
from tersely.domain.text.tags import StrippedText, TagKinds, strip_tags

_NOTHING = StrippedText("")


def split_reply(body: bytes, view: ClientView) -> tuple[bytes, Reply]:
    """Return the body for the client of a reply that is not streamed, and the reply.

    The same bytes if nothing is stripped; else only the content of the affected messages is replaced. A body that is no
    reply (an error under status 200, invalid JSON) is returned unchanged, and its reply has no choices.
    """
    try:
        members = raw_json.split_object(body)
        raw_choices = raw_json.split_array(members["choices"])
    except (ValueError, KeyError):
        error = _error_of(body)
        return body, Reply(error=error, unread=() if error else unread_body(body))
    choices: list[ReplyChoice] = []
    shown_choices = [*raw_choices]
    is_understood = True
    for index, raw in enumerate(raw_choices):
        try:
            shown_choices[index], choice = _split_choice(raw, index, view.tags)
        except (ValueError, KeyError):
            is_understood = False
            continue
        choices.append(choice)
    usage, error = members.get("usage", b"null"), members.get("error", b"null")
    reply = Reply(
        id=string_of(members.get("id")),
        model=string_of(members.get("model")),
        choices=tuple(choices),
        usage=b"" if usage == b"null" else usage,
        error=b"" if error == b"null" else error,
        is_done=True,
        unread=() if is_understood else unread_body(body),
    )
    if not any(choice.client_message is not choice.model_message for choice in choices):
        return body, reply
    shown = raw_json.with_items(members["choices"], raw_choices, shown_choices)
    return raw_json.like_original(body, raw_json.with_member(body, members, "choices", shown)), reply


def _split_choice(raw: bytes, position: int, tags: TagKinds) -> tuple[bytes, ReplyChoice]:
    members = raw_json.split_object(raw)
    text = members["message"]
    if not text.startswith(b"{"):
        raise ValueError("a message that is not an object")
    shown, stripped = _strip_tags(text, tags) if tags else (text, _NOTHING)
    index = raw_json.load(members.get("index", b"null"))
    choice = ReplyChoice(
        index=index if isinstance(index, int) else position,
        model_message=text,
        client_message=shown,
        terse=stripped.terse,
        state=stripped.state,
        finish_reason=string_of(members.get("finish_reason")),
    )
    return (raw if shown is text else raw_json.with_member(raw, members, "message", shown)), choice


def _strip_tags(message: bytes, tags: TagKinds) -> tuple[bytes, StrippedText]:
    """Return the message for the client, the same bytes if nothing is stripped; and its text without tags."""
    members = raw_json.split_object(message)
    content = raw_json.load(members.get("content", b"null"))
    text = "".join(map(text_of, content)) if isinstance(content, list) else text_of(content)
    stripped = strip_tags(text, tags)
    if stripped.shown == text:
        return message, stripped
    if isinstance(content, list):
        shown = raw_json.join_array(replace_text(raw_json.split_array(members["content"]), stripped.shown))
    else:
        shown = raw_json.dump(stripped.shown)
    return raw_json.with_member(message, members, "content", shown), stripped


def _error_of(body: bytes) -> bytes:
    try:
        error = raw_json.split_object(body).get("error", b"null")
    except ValueError:
        return b""
    return b"" if error == b"null" else error
