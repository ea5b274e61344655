"""Strip tags from replies that are not streamed."""

from __future__ import annotations

from tersely.dialects.anthropic.accumulator import ASSISTANT, container_of
from tersely.dialects.anthropic.content import read_block, string_member, with_text_member
from tersely.dialects.dialect import ClientView, Reply, ReplyChoice
from tersely.dialects.undescribed import UNDESCRIBED, unread_body
from tersely.dialects.wire import raw_json
from tersely.domain.text.tags import TagKinds, strip_tags


def split_reply(body: bytes, view: ClientView) -> tuple[bytes, Reply]:
    """Return the body for the client of a reply that is not streamed, and the reply.

    The same bytes if nothing is stripped; else only the affected texts are replaced. A body that is no message (an
    error under status 200, invalid JSON) is returned unchanged, and its reply has no choices.
    """
    try:
        members = raw_json.split_object(body)
    except ValueError:
        return body, Reply(unread=unread_body(body))
    try:
        shown, choice = _split_content(members["content"], string_member(members, "stop_reason"), view.tags)
    except UNDESCRIBED:
        error = members.get("error", b"null")
        if error != b"null":
            return body, Reply(error=error)
        return body, Reply(unread=unread_body(body))
    usage = members.get("usage", b"null")
    reply = Reply(
        id=string_member(members, "id"),
        model=string_member(members, "model"),
        choices=(choice,),
        usage=b"" if usage == b"null" else usage,
        is_done=True,
        unread=() if members.get("role", ASSISTANT) == ASSISTANT else unread_body(body),
        container=container_of(members),
    )
    if choice.client_message is choice.model_message:
        return body, reply
    return raw_json.like_original(body, raw_json.with_member(body, members, "content", shown)), reply


def _split_content(content: bytes, finish: str, tags: TagKinds) -> tuple[bytes, ReplyChoice]:
    """Return the content for the client, and the choice. A block that stripping leaves blank is left out."""
    shown: list[bytes] = []
    terse: list[str] = []
    state: str | None = None
    is_cut = False
    raws = raw_json.split_array(content)
    for block in map(read_block, raws):
        text = string_member(block.members, "text") if tags and block.type == "text" else ""
        stripped = strip_tags(text, tags)
        terse += stripped.terse
        state = state if stripped.state is None else stripped.state
        if stripped.shown == text:
            shown.append(block.raw)
            continue
        is_cut = True
        if stripped.shown.strip():
            shown.append(with_text_member(block.members, stripped.shown))
    message = client_message = _message(raw_json.join_array(raws))
    content = raw_json.join_array(shown)
    if is_cut:
        client_message = _message(content)
    choice = ReplyChoice(
        index=0,
        model_message=message,
        client_message=client_message,
        terse=tuple(terse),
        state=state,
        finish_reason=finish,
    )
    return content, choice


def _message(content: bytes) -> bytes:
    return raw_json.join_object({"role": ASSISTANT, "content": content})
