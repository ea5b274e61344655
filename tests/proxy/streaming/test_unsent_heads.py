"""Clients that leave before the proxy can send them the head of a reply: the proxy still ends and records the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from tersely.api.proxy import _respond
from tersely.service.proxy.call.call import ProxyResponse


@pytest.mark.parametrize("is_quick", [False, True])
async def test_a_reply_ends_whose_client_leaves_before_its_head_is_sent(is_quick: bool) -> None:
    ended: list[str] = []

    async def reply() -> AsyncGenerator[bytes, None]:
        try:
            if not is_quick:
                await asyncio.sleep(30)
            yield b"words"
        finally:
            ended.append("counted")

    async def send(_: Any) -> None:
        await asyncio.sleep(30)  # the client reads nothing

    responding = asyncio.create_task(_respond(send, ProxyResponse(status=200, headers=[], chunks=reply())))
    await asyncio.sleep(0.01)
    responding.cancel()
    with suppress(asyncio.CancelledError):
        await responding
    assert ended == ["counted"]
