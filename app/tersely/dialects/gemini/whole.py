"""Strip tags from replies that are not streamed."""

from __future__ import annotations

from msgspec.structs import replace

from tersely.dialects.dialect import ClientView, Reply
from tersely.dialects.gemini.stream import ReplyStream
from tersely.dialects.undescribed import unread_body


def split_reply(body: bytes, view: ClientView, *, wrapper: str = "") -> tuple[bytes, Reply]:
    """Return the body for the client of a reply that was read completely (array or object), and the reply.

    The same bytes if nothing is stripped. A body that is no reply (an error under status 200, invalid JSON) is returned
    unchanged, and its reply has no choices.
    """
    stream = ReplyStream(view, wrapper=wrapper)
    shown = stream.feed(body) + stream.close()
    if not view.tags:
        shown = body
    reply = stream.reply
    is_understood = not reply.unread and (reply.choices or reply.error or reply.is_done)
    return shown, reply if is_understood else replace(reply, unread=unread_body(body))
