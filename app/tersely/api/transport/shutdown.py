"""Shut the service down: refuse new calls, give open ones time, then end them with an error of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tersely.api.transport.body import App, Message, Receive, Scope, Send

# Paths that are answered until the end: liveness, readiness and metrics.
ALWAYS_ANSWERED = frozenset({"/healthz", "/readyz", "/metrics"})
# Seconds that calls have to end and to store their records after the grace period.
ENDING = 5.0
_LOOK = 0.05

Refuse = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _OpenCall:
    """A request that is being answered. ``is_endless``: an event stream that ends when the client or the
    service does.
    """

    task: asyncio.Task[object]
    is_started: bool = False
    is_endless: bool = False
    is_ended: bool = False

    def end(self) -> None:
        """Stop the call; `ShutdownGate` answers in its place."""
        self.is_ended = True
        self.task.cancel()


class Shutdown:
    """The open calls of a process, and their end."""

    def __init__(self, interrupts: Sequence[Callable[[], None]], *, grace: float) -> None:
        """``interrupts`` end what waits for a model host; ``grace`` in seconds."""
        self._interrupts = interrupts
        self._grace = grace
        self.is_draining = False
        self.open: set[_OpenCall] = set()

    async def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Refuse new calls and return when all open ones have ended; after the grace, or once it is hurried, they end
        with an error.
        """
        self.is_draining = True
        for call in [each for each in self.open if each.is_endless]:
            call.end()
        if await self._wait(self._grace, is_hurried):
            return
        for interrupt in self._interrupts:
            interrupt()
        # Prefer the requests that have ended by themselves: their answers say more than ours.
        if await self._wait(ENDING / 2, lambda: False):
            return
        for call in [each for each in self.open if not each.is_started]:
            call.end()
        await self._wait(ENDING / 2, lambda: False)

    async def _wait(self, seconds: float, is_hurried: Callable[[], bool]) -> bool:
        """Return whether no call is open any more within so many seconds."""
        now = asyncio.get_running_loop().time
        end = now() + seconds
        while self.open and now() < end and not is_hurried():  # noqa: ASYNC110 a signal handler sets no event
            await asyncio.sleep(_LOOK)
        return not self.open


class ShutdownGate:
    """ASGI around an application: knows its open calls, and refuses new ones while the service ends."""

    def __init__(self, app: App, shutdown: Shutdown, refuse: Refuse) -> None:
        """``refuse`` answers 503 in the shape that the route has."""
        self._app = app
        self._shutdown = shutdown
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"] in ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
            return
        if self._shutdown.is_draining:
            await self._refuse(scope, receive, send)
            return
        task = asyncio.current_task()
        assert task is not None
        call = _OpenCall(task)
        may_be_endless = scope["method"] == "GET" and scope["path"].startswith("/api/")

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.is_started = True
                call.is_endless = may_be_endless and (b"content-type", b"text/event-stream") in (
                    (name.lower(), value.partition(b";")[0]) for name, value in message["headers"]
                )
            await send(message)

        self._shutdown.open.add(call)
        try:
            await self._app(scope, receive, watch)
        except asyncio.CancelledError:
            if not call.is_ended:
                raise
            task.uncancel()
            if call.is_endless:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not call.is_started:
                await self._refuse(scope, receive, send)
            else:
                raise
        finally:
            self._shutdown.open.discard(call)
