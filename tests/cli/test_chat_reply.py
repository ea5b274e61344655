"""A streamed reply, read for a person."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tersely.cli.chat.reply import read_reply
from tersely.server.errors import CommandError


def event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}"


async def read(*lines: str) -> list[str]:
    async def given() -> AsyncIterator[str]:
        for line in lines:
            yield line

    return [piece async for piece in read_reply(given())]


async def test_reply_text_is_printed_as_it_arrives() -> None:
    lines = (
        ": heartbeat",
        "",
        event(delta={"role": "assistant", "content": None}),
        event(delta={"content": "a"}),
        event(delta={"content": ""}),
        event(delta={"content": "b"}),
        event(delta={}, finish_reason="stop"),
        'data: {"choices": [], "usage": {"total_tokens": 3}}',
    )
    assert await read(*lines, "data: [DONE]") == ["a", "b"]
    assert await read(*lines) == ["a", "b"]
    assert await read(event(delta={"refusal": "no"}), "data:[DONE]") == ["no"]


async def test_calls_are_put_together() -> None:
    def piece(index: int, **function: str) -> str:
        return event(delta={"tool_calls": [{"index": index, "function": function}]})

    found = await read(
        piece(0, name="look", arguments='{"at"'), piece(1, name="go"), piece(0, arguments=": 1}"), "data: [DONE]"
    )
    assert found == [
        '[call of look with {"at": 1}: there are no tools here]\n',
        "[call of go with {}: there are no tools here]\n",
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('data: {"error": {"message": "overloaded"}}', "the model's host failed: overloaded"),
        ('data: {"error": "overloaded"}', "the model's host failed: overloaded"),
        ("data: {", "cannot be read"),
        ("data: []", "cannot be read"),
        ('data: {"choices": ["x"]}', "cannot be read"),
        ('data: {"choices": [{"delta": {"tool_calls": [7]}}]}', "cannot be read"),
        ("", "broke off"),
    ],
)
async def test_a_failed_reply_is_reported(line: str, error: str) -> None:
    pieces: list[str] = []

    async def given() -> AsyncIterator[str]:
        yield event(delta={"content": "half"})
        yield line

    async def show() -> None:
        async for piece in read_reply(given()):
            pieces.append(piece)  # noqa: PERF401 to see what comes before the end

    with pytest.raises(CommandError, match=error):
        await show()
    assert pieces == ["half"]
