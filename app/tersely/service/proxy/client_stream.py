"""One stream on its way from the model host to the client, over all rounds of a call."""

from __future__ import annotations

from tersely.dialects.dialect import ClientView, Dialect, Reply
from tersely.dialects.tool_rounds import FinishedRounds
from tersely.service.proxy.limited_reader import LimitedReader
from tersely.service.proxy.stages import PreparedCall
from tersely.service.proxy.stream_end import terminal_detector, whole_events


class ClientStream:
    """Bytes of the host in, bytes for the client out: tags stripped, the end held back, all rounds as one stream.

    ``reader`` reads the current round, ``end`` finds the end of it.
    """

    def __init__(self, dialect: Dialect, prepared: PreparedCall, max_reply: int) -> None:
        """``max_reply``: how many bytes of a round are read."""
        self._dialect = dialect
        self._max_reply = max_reply
        self._rounds = dialect.rounds.open(prepared.tools) if dialect.rounds and prepared.tools else None
        self._held = b""
        self._open_round(prepared)

    def _open_round(self, prepared: PreparedCall) -> None:
        reader = self._dialect.open_stream(
            ClientView(tags=prepared.tags, strip_usage=prepared.strip_usage, own_request=prepared.own_request)
        )
        self.reader = LimitedReader(reader, self._max_reply)
        self.end = terminal_detector(self._dialect.streaming)

    @property
    def is_cut(self) -> bool:
        """Whether the round passed the size limit."""
        return self.reader.is_cut

    @property
    def size(self) -> int:
        """Bytes of the round that were read."""
        return self.reader.size

    @property
    def is_between_events(self) -> bool:
        """Whether the client has whole events only, so that another event may follow."""
        return self._rounds is not None or self.end.is_between_events

    def feed(self, chunk: bytes) -> bytes:
        """Return what goes to the client now."""
        out = self.end.hold(self.reader.feed(chunk))
        return out if self._rounds is None else self._rounds.feed(out)

    def end_round(self) -> bytes:
        """End the round; return what goes to the client though it may not be the last round."""
        rest = self.end.held + self.reader.close()
        if self._rounds is not None:
            return self._rounds.feed(rest)
        self._held = rest
        return b""

    async def reply(self) -> Reply:
        """Return what was read of the round."""
        return await self.reader.reply()

    def next_round(self, prepared: PreparedCall, finished: FinishedRounds) -> bytes:
        """Drop the end of the round and begin another. Return the held-back bytes that the client may see."""
        assert self._rounds is not None
        out = self._rounds.next_round(finished)
        self._open_round(prepared)
        return out

    def close(self) -> bytes:
        """Return the end of the last round, and all else that was held back."""
        return self._held if self._rounds is None else self._rounds.close()

    def break_off(self) -> bytes:
        """End a round whose host broke off; return the whole events that the client can still be sent."""
        rest = self.end.hold_rest(whole_events(self.reader.close()))
        return rest if self._rounds is None else b""
