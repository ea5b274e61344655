"""A demonstration: agents that talk with a scripted model through a running service, and caches that it reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)"> \x1b[31mred\x1b[0m \u202eleft\u202c </td></tr>'
TASKS = (
    "Find out why the nightly import drops rows with an empty customer id, and mend it.",
    "The report says 1,204 orders but the table has 1,198. Which six are missing?",
    "Add a test for it, with the row that failed last night.",
    "Run the whole import against the staging copy and tell me how long each step takes.",
    "Write the change log entry. Keep it under three sentences.",
    "One more: the retry waits far too long when the bucket is away. Look at the back-off.",
)
FILES = ("importer/rows.py", "importer/customers.py", "importer/retry.py", "tests/test_rows.py", "sql/orders.sql")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file of the repository.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}


class CachingModel:
    """Answers like a coding agent's model and reports a prefix cache, as providers do."""

    def __init__(self) -> None:
        self._sent: list[str] = []

    def script(self, received: ReceivedRequest) -> ScriptedReply | None:
        """The reply: two files are read for each question, then it is answered."""
        request = received.request or {}
        messages: list[dict[str, Any]] = request.get("messages") or []
        if not messages:
            return None
        text = json.dumps(messages)
        common = max((_in_common(text, sent) for sent in self._sent), default=0)
        self._sent = [*self._sent[-20:], text]
        total = len(text) // 4
        cached = common // 4 // 128 * 128
        usage = {
            "prompt_tokens": total,
            "completion_tokens": 90,
            "total_tokens": total + 90,
            "prompt_tokens_details": {"cached_tokens": cached if cached >= 1024 else 0},
        }
        results = 0
        for message in reversed(messages):
            if message["role"] == "user":
                break
            results += message["role"] == "tool"
        turn = sum(message["role"] == "user" for message in messages)
        if results < 2 and request.get("tools"):
            path = FILES[(turn + results) % len(FILES)]
            call = {
                "id": f"call_{turn}_{results}_{len(messages)}",
                "type": "function",
                "function": {"name": "read_file", "arguments": json.dumps({"path": path})},
            }
            reply: dict[str, Any] = {"role": "assistant", "content": f"I look at {path}.", "tool_calls": [call]}
        else:
            reply = {
                "role": "assistant",
                "content": f"Step {turn} is done: `rows.py` skipped rows before it had read their order id. "
                f"<terse>Fixed step {turn}: rows.py kept rows without customer id.</terse>",
            }
        return ScriptedReply(message=reply, usage=usage)


async def play(
    url: str, tasks: Sequence[str] = TASKS, *, model: str = "gpt-4o", lines: int = 60, agent: str = "opencode/1.18.33",
    key: str = "", **headers: str,
) -> str:  # fmt: skip
    """Play a conversation of a coding agent; return its session's id."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful engineer. Read before you change. " * 8}
    ]
    sent = {"user-agent": agent, **{name.replace("_", "-"): value for name, value in headers.items()}}
    if key:
        sent["x-tersely-key"] = key
    session = ""
    async with aiohttp.ClientSession(headers=sent) as http:
        for number, task in enumerate(tasks):
            messages.append({"role": "user", "content": task})
            while True:
                body = {"model": model, "messages": messages, "tools": [TOOL]}
                async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    session = response.headers["x-tersely-session"]
                message = answer["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    path = json.loads(call["function"]["arguments"])["path"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": _file(path, number, lines)})
    return session


def _file(path: str, number: int, lines: int) -> str:
    return "\n".join(
        f"{line:4d}  row_{number}_{line} = read_row('{path}', order_id={1000 + 7 * line}, name=customers.get({line}))"
        for line in range(1, lines + 1)
    )


def _in_common(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
