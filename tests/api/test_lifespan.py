"""Start and background work of the service."""

from __future__ import annotations

import asyncio
import threading

import pytest
from fastapi import FastAPI
from tiktoken import Encoding

from tersely import lifespan
from tersely.service.common import tokens


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


async def test_the_event_loop_is_the_first_to_encode(monkeypatch: pytest.MonkeyPatch):
    threads: list[int] = []
    encode = Encoding.encode_ordinary

    def note_thread(encoding: Encoding, text: str) -> list[int]:
        threads.append(threading.get_ident())
        return encode(encoding, text)

    async def count_in_thread() -> None:
        await asyncio.to_thread(tokens.count_text, "ein Teil, der zählt, wenn er beginnt", "o200k_base")

    async def close() -> None:
        pass

    monkeypatch.setattr(Encoding, "encode_ordinary", note_thread)
    part = lifespan.ServicePart(open=count_in_thread, close=close)
    async with lifespan.lifespan([part], [])(FastAPI()):
        assert len(threads) == 2
    assert threads[0] == threading.get_ident()
