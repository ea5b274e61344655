"""Event loops in threads, and waiting for what happens there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def thread(self) -> int:
        """The id of the loop's thread."""
        assert self._thread.ident is not None
        return self._thread.ident

    def run(self, work: Coroutine[Any, Any, T], limit: float = 60) -> T:
        """Wait for ``work`` there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(limit)

    def close(self) -> None:
        """End what still runs there, as a process does at its end."""
        self.run(_cancel_all())
        self.run(_abort_transports())
        self.run(self.loop.shutdown_asyncgens())
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


async def _cancel_all() -> None:
    me = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not me]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _abort_transports() -> None:
    """Close the sockets of connections whose peers do not read the rest: a warning of one fails some later test."""
    for transport in list(getattr(asyncio.get_running_loop(), "_transports", {}).values()):
        transport.abort()
    await asyncio.sleep(0)  # they are closed in the next round of the loop


@contextmanager
def background() -> Iterator[Background]:
    """A loop for the length of the block."""
    running = Background()
    try:
        yield running
    finally:
        running.close()


def wait_until(condition: Callable[[], object], limit: float = 15.0) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "that did not come to pass"
        time.sleep(0.005)


async def until(condition: Callable[[], object], limit: float = 15.0) -> None:
    """Wait until ``condition`` holds, while the loop goes on."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "that did not come to pass"
        await asyncio.sleep(0.01)


async def eventually(condition: Callable[[], Awaitable[T]], limit: float = 15.0) -> T:
    """Return the value of ``condition`` once it is true."""
    end = time.monotonic() + limit
    while not (found := await condition()):
        assert time.monotonic() < end, "that did not come to pass"
        await asyncio.sleep(0.01)
    return found
