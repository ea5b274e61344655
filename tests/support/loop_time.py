"""Measure the callbacks of a service's event loop: CPU time of the loop's own thread, so that neighbours, such as
clients and model hosts of a test, do not count.

A limit in seconds holds on one machine at one clock rate. These times are divided by the time of a piece of work whose
length is known, taken just before and after, so that a limit means the same on a slower or a busier processor.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.support.services import Service

# Seconds that the piece of work takes on the machine the limits were chosen on.
_USUAL = 0.0028


@dataclass
class CallbackTimes:
    """The slowest callback, in seconds, and what it was."""

    slowest: tuple[float, str] = (0.0, "")
    # How many times slower than usual the processor was meanwhile; never below 1.
    slowness: float = 1.0

    @property
    def worst(self) -> tuple[float, str]:
        """The slowest callback, as long as it would take at the usual speed."""
        seconds, name = self.slowest
        return seconds / self.slowness, name


@contextmanager
def callback_times(service: Service) -> Iterator[CallbackTimes]:
    """Measure every callback of the loop of ``service``, which runs in this process.

    The garbage collector rests meanwhile: it would search what the tests keep, too.
    """
    times = CallbackTimes()
    original = asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        original(handle)
        took = time.thread_time() - begun
        if threading.get_ident() == service.thread and took > times.slowest[0]:
            times.slowest = took, _name(handle)

    before = _time_of_known_work()
    asyncio.events.Handle._run = measured  # type: ignore[method-assign, assignment]
    gc.disable()
    try:
        yield times
    finally:
        gc.enable()
        asyncio.events.Handle._run = original  # type: ignore[method-assign]
        times.slowness = max(1.0, before / _USUAL, _time_of_known_work() / _USUAL)


def _time_of_known_work() -> float:
    """Thread seconds (the median of some) of writing, reading and walking over JSON, as the service's callbacks do."""
    took = []
    for _ in range(7):
        begun = time.thread_time()
        messages = [{"role": "user", "content": f"Step {n}: looked at src/part_{n}.py."} for n in range(3000)]
        sum(len(message["content"]) for message in json.loads(json.dumps(messages)))
        took.append(time.thread_time() - begun)
    return statistics.median(took)


def _name(handle: asyncio.Handle) -> str:
    """The coroutine that a task's step belongs to, else the callback."""
    task = getattr(getattr(handle, "_callback", None), "__self__", None)
    return str(task.get_coro()) if isinstance(task, asyncio.Task) else repr(handle)
