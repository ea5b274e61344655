"""How long the callbacks of an event loop run: CPU time of the loop's own thread, so that neighbours do not count.

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
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

# Seconds that the piece of work takes on the machine the limits were chosen on.
_USUAL = 0.0028


@dataclass
class CallbackTimes:
    """The slowest callback of each thread: seconds at the usual speed, and what it was."""

    slowest: dict[int, tuple[float, str]] = field(default_factory=dict)
    # How many times slower than usual the processor was meanwhile; never below 1.
    slowness: float = 1.0

    @property
    def worst(self) -> tuple[float, str]:
        """The slowest callback of all threads, as long as it would take at the usual speed."""
        seconds, name = max(self.slowest.values(), default=(0.0, ""))
        return seconds / self.slowness, name


@contextmanager
def callback_times(*, without: Collection[int] = ()) -> Iterator[CallbackTimes]:
    """Measure every callback of every loop in this process, but for those of the threads ``without``.

    The garbage collector rests meanwhile: it would search what the tests keep, too.
    """
    times = CallbackTimes()
    original = asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        begun = time.thread_time()
        original(handle)
        took = time.thread_time() - begun
        me = threading.get_ident()
        if me not in without and took > times.slowest.get(me, (0.0, ""))[0]:
            times.slowest[me] = took, _name(handle)

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
