"""Tell a request that its client has disconnected, without a task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from typing_extensions import override

from tersely.api.transport.body import Receive, Scope

# Under this key of its scope, a request's `Disconnect`.
KEY = "tersely.disconnect"


class Disconnect:
    """Calls a function when the client of a request disconnects before the answer is complete."""

    __slots__ = ("_on_gone", "_resume", "is_gone")

    def __init__(self, resume: Callable[[], None] | None = None) -> None:
        """``resume`` has the connection read from, which shows that it ends."""
        self.is_gone = False
        self._resume = resume
        self._on_gone: Callable[[], object] | None = None

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` when the client disconnects."""
        self._on_gone = on_gone
        if self._resume is not None:
            self._resume()
        if self.is_gone:
            on_gone()

    def stop(self) -> None:
        """Call nothing any more."""
        self._on_gone = None

    def report(self) -> None:
        """Report that the client has disconnected."""
        self.is_gone = True
        if self._on_gone is not None:
            self._on_gone()


class AwaitedDisconnect(Disconnect):
    """The same for a server that says so to whoever asks for messages."""

    __slots__ = ("_receive", "_task")

    def __init__(self, receive: Receive) -> None:
        super().__init__()
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    @override
    def watch(self, on_gone: Callable[[], object]) -> None:
        """Call ``on_gone`` when the client disconnects."""
        super().watch(on_gone)
        self._task = asyncio.get_running_loop().create_task(self._wait())

    @override
    def stop(self) -> None:
        """Call nothing any more."""
        super().stop()
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.report()


def disconnect_of(scope: Scope, receive: Receive) -> Disconnect:
    """Return the disconnect signal of a request, whose body must have been read."""
    found: Disconnect | None = scope.get(KEY)
    return AwaitedDisconnect(receive) if found is None else found
