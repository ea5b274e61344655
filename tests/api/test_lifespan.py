"""Background work of the service."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI

from tersely import lifespan


async def test_background_work_goes_on_after_an_unexpected_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(lifespan, "AGAIN_SECONDS", 0.01)
    starts = 0
    goes_on = asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise OverflowError("date value out of range")
        goes_on.set()
        await asyncio.Event().wait()

    application = FastAPI()
    async with lifespan.lifespan([], [work])(application):
        await asyncio.wait_for(goes_on.wait(), 10)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [OverflowError] * 2
