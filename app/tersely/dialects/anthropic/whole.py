"""Strip tags from replies that are not streamed."""

from __future__ import annotations

from tersely.dialects.anthropic.accumulator import ASSISTANT, GrowingBlock, choice_of, container_of
from tersely.dialects.anthropic.content import string_member
from tersely.dialects.dialect import ClientView, Reply
from tersely.dialects.undescribed import UNDESCRIBED, unread_body
from tersely.dialects.wire import raw_json
from tersely.domain.text.tags import TagKinds


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
        raws = raw_json.split_array(members["content"])
        blocks = [_whole_block(raw, view.tags) for raw in raws]
        choice = choice_of(blocks, raws, string_member(members, "stop_reason"))
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
    shown = raw_json.split_object(choice.client_message)["content"]
    return raw_json.like_original(body, raw_json.with_member(body, members, "content", shown)), reply


def _whole_block(raw: bytes, tags: TagKinds) -> GrowingBlock:
    block = GrowingBlock(raw_json.split_object(raw), tags)
    block.is_open = False
    if block.stripper is not None:
        block.show(block.stripper.feed(block.text) + block.stripper.close())
    return block
