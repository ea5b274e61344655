"""Run long computations in a thread, so that other calls are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Bytes. Shorter work takes a few milliseconds at most, and a thread costs a tenth of one.
LONG = 128 * 1024
LONG_REPLY = 16 * 1024
"""Bytes of a model's reply. Text that consists of little but marks of tags takes longest."""


async def run_in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``work(*args)``, computed in a thread if it concerns many messages of about ``size`` bytes in total."""
    if size < LONG:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def finish_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``work(*args)``, computed in a thread, which has ended when this returns, even if the caller is cancelled:
    for work on a value that the caller goes on using.
    """
    running = asyncio.get_running_loop().create_task(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
