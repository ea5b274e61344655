"""Reading a request body under limits of size, time and memory."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from tersely.domain.errors import Busy, InvalidRequest, TooLarge
from tersely.service.common.offload import run_in_thread_if_large

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Bytes of memory that a request needs per byte of its body: the body, its messages and their texts, the upstream's body
# and the parameters of the storing statement. `python -m bench.bodies` measures it.
COPIES = 5
# Bytes of memory per JSON object in a body that is parsed, counted in bodies from this size on.
OBJECT_BYTES = 2 * 1024
COUNTED_FROM = 1024 * 1024
COUNTED_AT_ONCE = 512 * 1024
# Bodies up to this size may use the whole budget, larger ones this share: large bodies must not block all others.
SMALL = 1024 * 1024
LARGE_PART = 0.75
# After a request that took so much was answered, freed memory returns to the system, so many times with so many seconds
# before each: what is written in the background is freed later than the body.
LARGE = 16 * 1024 * 1024
TRIM_SECONDS = 3.0
TRIMS = 2
# Under these keys of its scope: a request's share of the budget, and whether all of its body has arrived.
RESERVATION = "tersely.body_reservation"
RECEIVED = "tersely.received"


_NO_ROOM = "too many large request bodies are in flight: send this request again in a moment"


class Disconnected(Exception):
    """The client went away before its request was there."""


class Gauge(Protocol):
    """A gauge."""

    def set(self, value: float) -> None:
        """Show ``value``."""


class BodyBudget:
    """The memory that the request bodies of one worker may use at the same time.

    A body's bytes count `COPIES` times, from their arrival until the request is answered. An announced length does not
    count, so that a client that announces much and sends nothing takes no room. A single request always fits, whatever
    its size.
    """

    def __init__(self, limit: int, *, level: Gauge, return_freed_memory: Callable[[], None]) -> None:
        """``limit`` in bytes; ``level`` shows how many are taken."""
        self._limit = limit
        self._level = level
        self._return_freed_memory = return_freed_memory
        self._trims_due = 0
        self._reserved = 0

    def open(self) -> BodyReservation:
        """Return an empty reservation for one request."""
        return BodyReservation(self)

    def take(self, size: int, *, held: int, may_refuse: bool = True) -> bool:
        """Take ``size`` bytes for a request that already holds ``held``; return whether they were taken. If the budget
        ``may_refuse``, it takes only bytes that fit.
        """
        fits = not may_refuse or self.has_room(size, held=held)
        if fits:
            self._reserved += size
            self._level.set(self._reserved)
        return fits

    def has_room(self, size: int, *, held: int) -> bool:
        """Return whether ``size`` bytes fit now for a request that already holds ``held``."""
        limit = self._limit if held + size <= SMALL * COPIES else self._limit * LARGE_PART
        return self._reserved + size <= limit or self._reserved <= held

    def give_back(self, size: int) -> None:
        """Return ``size`` bytes to the budget."""
        self._reserved -= size
        self._level.set(self._reserved)
        if size >= LARGE:
            is_waiting, self._trims_due = self._trims_due > 0, TRIMS
            if not is_waiting:
                asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._return_freed_memory)
        self._trims_due -= 1
        if self._trims_due:
            loop.call_later(TRIM_SECONDS, self._trim)


class BodyReservation:
    """The share of one request in a `BodyBudget`."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow_to(self, size: int, *, objects: int = 0, may_refuse: bool = True) -> None:
        """Reserve memory for ``size`` bytes with this number of JSON objects. Raises `Busy` and releases the
        reservation, if it ``may_refuse``.
        """
        missing = size * COPIES + objects * OBJECT_BYTES - self._held
        if missing <= 0:
            return
        if not self._budget.take(missing, held=self._held, may_refuse=may_refuse):
            self.release()
            raise Busy(_NO_ROOM)
        self._held += missing

    async def grow_to_objects(self, body: bytes, *, may_refuse: bool = True) -> None:
        """Reserve memory for the JSON objects of a body that is going to be parsed. Raises as `grow_to`."""
        if len(body) >= COUNTED_FROM:
            count = await run_in_thread_if_large(len(body), _count_objects, body)
            self.grow_to(len(body), objects=count, may_refuse=may_refuse)

    def check_room_for(self, size: int) -> None:
        """Raise `Busy` when a body of ``size`` bytes would not fit now. Reserve nothing."""
        if not self._budget.has_room(size * COPIES - self._held, held=self._held):
            raise Busy(_NO_ROOM)

    def release(self) -> None:
        """Return everything to the budget."""
        if self._held:
            self._budget.give_back(self._held)
            self._held = 0


async def read_body(scope: Scope, receive: Receive, *, limit: int, deadline: float) -> bytes:
    """Return the whole body.

    The request's `BodyReservation`, if its scope has one, grows as the body arrives, without what parsing takes; an
    announced length that does not fit is refused before. Raises `TooLarge` over ``limit`` bytes, `Busy` over the memory
    budget, `InvalidRequest` when the body is not there after ``deadline`` seconds, `Disconnected`.
    """
    reservation: BodyReservation | None = scope.get(RESERVATION)
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            announced = int(value[:20])
            if announced > limit:
                raise TooLarge(f"the request body is over {limit} bytes")
            if reservation is not None:
                reservation.check_room_for(announced)
    if scope.get(RECEIVED):
        body = await _collect(receive, limit, reservation)  # which waits for nothing
    else:
        try:
            async with asyncio.timeout(deadline):
                body = await _collect(receive, limit, reservation)
        except TimeoutError:
            raise InvalidRequest(f"the request body did not arrive within {deadline:g} s") from None
    return body


def _count_objects(body: bytes) -> int:
    """Count the JSON objects of a body at most, part by part: others have their turn in between."""
    return sum(body.count(b"{", start, start + COUNTED_AT_ONCE) for start in range(0, len(body), COUNTED_AT_ONCE))


async def _collect(receive: Receive, limit: int, reservation: BodyReservation | None) -> bytes:
    body: io.BytesIO | None = None
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise TooLarge(f"the request body is over {limit} bytes")
        if reservation is not None:
            reservation.grow_to(size)
        is_last = not message.get("more_body", False)
        if is_last and body is None:
            return piece
        if body is None:
            body = io.BytesIO()
        body.write(piece)
        if is_last:
            return body.getvalue()  # hands out its own buffer: the body is never there twice
