"""A long history that was not seen before takes seconds to plan: others are served meanwhile."""

from __future__ import annotations

import asyncio
import time

from tests.support.http import body_of, post
from tests.support.services import Service
from tests.support.upstreams import Model

MESSAGES = 15_000  # the service allows 20,000


def long_history() -> list[dict[str, str]]:
    """A history of 2 MB in many messages, which is the slowest kind to plan."""
    return [
        {"role": "assistant" if n % 2 else "user", "content": f"Step {n}: looked at src/part_{n}.py and ran it. " * 2}
        for n in range(MESSAGES)
    ] + [{"role": "user", "content": "Go on."}]


async def test_a_small_call_does_not_wait_for_a_long_one(service: Service, model: Model, key: str) -> None:
    body = body_of(*long_history(), user=f"{key}-long")
    assert len(body) > 1_700_000
    await post(service, body_of("warm up"))
    begun = time.monotonic()
    long_call = asyncio.create_task(post(service, body))
    await asyncio.sleep(0.05)

    waits: list[float] = []
    while not (long_call.done() or model.requests(f"{key}-long")):
        sent_at = time.monotonic()
        small = await post(service, body_of(f"small {len(waits)} {key}"))
        assert small.status == 200
        waits.append(time.monotonic() - sent_at)
    planned = time.monotonic() - begun
    assert (await long_call).status == 200, (await long_call).body

    # The last one may have met the storing of the long one.
    waits = sorted(waits[:-1])
    assert len(waits) >= 5, (planned, waits)
    assert waits[len(waits) // 2] < planned / 8, (planned, waits)
