"""Runs the calls that a model makes of Tersely's tools within a round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from tersely.dialects.dialect import Dialect
from tersely.domain.messages import Message, ToolCall, ToolResult
from tersely.domain.tools.catalog import WRITING_TOOLS
from tersely.service.common.metrics import Metrics
from tersely.service.tools.tools import ToolOutcome

TOOL_SECONDS = 20.0
MAX_CALLS = 16
"""Calls of one round that are run; further ones are refused."""


class RunsTools(Protocol):
    """Runs tools by name."""

    async def answer(self, tenant: str, session_id: str, name: str, arguments: object) -> ToolOutcome:
        """Never fails."""


class ToolCalls:
    """Runs calls, and writes their results as messages of one dialect."""

    def __init__(self, dialect: Dialect, tools: RunsTools, metrics: Metrics, *, seconds: float = TOOL_SECONDS) -> None:
        """``seconds``: how long one call may take."""
        self._dialect = dialect
        self._tools = tools
        self._metrics = metrics
        self._seconds = seconds

    async def run(self, tenant: str, session_id: str, calls: Sequence[ToolCall]) -> list[bytes]:
        """Run ``calls`` as if one after the other. Return their results in order, as messages in wire form.

        Calls that only read run at the same time; one that writes runs by itself, so that those behind it see what it
        wrote.
        """
        texts: list[str] = []
        for writes, group in groupby(enumerate(calls), key=lambda numbered: numbered[1].name in WRITING_TOOLS):
            if writes:
                for number, call in group:
                    texts.append(await self._run(tenant, session_id, call, number))
            else:
                texts += await asyncio.gather(*[self._run(tenant, session_id, call, n) for n, call in group])
        return [
            self._dialect.write_message(Message(role="tool", parts=(ToolResult(call_id=call.id, text=text),), raw=b""))
            for call, text in zip(calls, texts, strict=True)
        ]

    async def _run(self, tenant: str, session_id: str, call: ToolCall, number: int) -> str:
        if number >= MAX_CALLS:
            result, text = "refused", f"Too many calls at once: at most {MAX_CALLS} are answered. Call it again."
        else:
            try:
                async with asyncio.timeout(self._seconds):
                    outcome = await self._tools.answer(tenant, session_id, call.name, call.arguments)
                text, result = outcome.text, "error" if outcome.is_error else "ok"
            except TimeoutError:
                result = "timeout"
                text = f"{call.name} took too long and was stopped. Ask for less, or go on without it."
        self._metrics.tool_calls.labels(call.name, result).inc()
        return text
