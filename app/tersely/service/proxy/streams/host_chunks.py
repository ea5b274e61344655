"""The chunks of a model host's stream, up to its last event."""

from __future__ import annotations

from collections.abc import AsyncIterator

from tersely.domain.errors import UpstreamUnavailable
from tersely.service.proxy.streams.direct_relay import DirectRelay
from tersely.service.proxy.streams.stream_end import StreamEnd
from tersely.upstream.client import UpstreamReply

# How long a stream may continue after its end mark (seconds): the host may not close the connection.
TRAILER_WAIT = 0.25


async def iter_until_terminal_event(
    reply: UpstreamReply, end: StreamEnd, heartbeat: float, direct: DirectRelay | None = None
) -> AsyncIterator[bytes]:
    """Yield the chunks of ``reply`` until it ends, or until shortly after ``end`` has seen the last event.

    ``b""`` stands for ``heartbeat`` seconds of silence. ``direct`` gets the chunks that arrive meanwhile; those that it
    cannot send on are yielded.
    """
    while not end.is_seen:
        try:
            chunk = await reply.next_piece(heartbeat, None if direct is None else direct.receive)
        except UpstreamUnavailable:
            if direct is not None and (rest := direct.take_rest()):
                yield rest  # it came before the host broke off
            raise
        if direct is not None and (rest := direct.take_rest()):
            chunk = rest + (chunk or b"")  # more may have come since
        if chunk == b"":
            return
        if chunk or not end.is_seen:
            yield chunk or b""
    if trailer := await reply.trailer(TRAILER_WAIT):
        yield trailer
