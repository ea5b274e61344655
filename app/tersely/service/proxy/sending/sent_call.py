"""A call that has been sent, whichever path prepared it, and the beginning of its reply."""

from __future__ import annotations

import msgspec

from tersely.service.proxy.live_calls.live_call import LiveCall
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.upstream.client import UpstreamReply

SentCall = PreparedCall | LiveCall


class StartedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply to ``prepared``, whose beginning has been read: the last step that can still choose another request.

    ``body`` is all of a reply that is not streamed, ``first`` the beginning of one that is. ``is_oversized``: the reply
    is longer than may be read, and ``body`` is its beginning. ``sent_at`` is a monotonic time in seconds.
    """

    prepared: SentCall
    reply: UpstreamReply
    sent_at: float
    first: bytes = b""
    body: bytes = b""
    is_oversized: bool = False
    is_streamed: bool = False
