"""Strip tags from replies that are not streamed."""

from __future__ import annotations

from dataclasses import replace

from tersely.dialects.dialect import Reply
from tersely.dialects.gemini.stream import ReplyStream
from tersely.dialects.undescribed import unread_body
from tersely.domain.text.tags import TagKinds


def split_reply(body: bytes, tags: TagKinds, *, sent: bytes = b"", wrapper: str = "") -> tuple[bytes, Reply]:
    """Return the body for the client of a reply that was read completely (array or object), and the reply.

    The same bytes if nothing is stripped. A body that is no reply (an error under status 200, invalid JSON) is returned
    unchanged, and its reply has no choices.
    """
    stream = ReplyStream(tags=tags, wrapper=wrapper)
    sent = stream.feed(body) + stream.close()
    if not tags:
        sent = body
    reply = stream.reply
    is_understood = not reply.unread and (reply.choices or reply.error or reply.is_done)
    return sent, reply if is_understood else replace(reply, unread=unread_body(body))
