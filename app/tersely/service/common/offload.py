"""Long work goes to a thread, so that the calls of others are served meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Bytes. What is shorter takes some milliseconds at most, and a thread costs a tenth of one.
LONG = 128 * 1024


async def run_in_thread_if_large(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``work(*args)``, in a thread where it is about ``size`` bytes of messages and these are many."""
    if size < LONG:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
