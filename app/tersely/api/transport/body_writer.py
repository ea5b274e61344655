"""Write parts of a response's body at once, in the callback that received them from the model host."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Under this key of its scope, a request's `BodyWriter`.
WRITER = "tersely.writer"


class BodyWriter:
    """Writes what `RequestResponseCycle.send` would write, for a response that was begun with it and has no length.

    A message through the application's tasks costs more than the rest of a short event.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_ready(self) -> bool:
        """Return whether a part may be written now. Not while the client is behind or gone, nor where the body's parts
        are not framed: there `send` waits, or does what has to be done.
        """
        cycle = self._cycle
        is_open = cycle.response_started and not (cycle.disconnected or cycle.response_complete)
        return is_open and bool(cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        """Write a part, which is not empty, while `is_ready`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
