"""Random conversations: texts, parallel calls, results, edits and repetitions, as clients of each dialect send them.

Every text carries a mark. The marks of a client's history, in their order, are to be those of the stored session.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import asyncpg

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply

DIALECTS = ("openai_chat", "openai_responses", "anthropic", "gemini", "gemini_gca")
STRATEGIES = ("full", "slim", "window", "trim", "compact", "tiered")
EPOCHS = ("every_request", "auto", '{"high": 2500, "low": 1200}', '{"stride": 2}')
MARK = re.compile(r"\b[uar][0-9a-f]{10}m")
WORDS = (
    "the",
    "port",
    "is",
    "8484",
    "src/app.py",
    "naïve",
    "日本語",
    "🙂",
    "\\n",
    '"quoted"',
    "{}",
    "<b>",
    "a_b",
    "é" * 5,
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
NAMES = ("read_file", "list_files")


def mark(rng: random.Random, kind: str) -> str:
    return f"{kind}{rng.getrandbits(40):010x}m"


def text(rng: random.Random, kind: str) -> str:
    words = rng.choices(WORDS, k=rng.choice((1, 5, 40, 200)))
    return " ".join([mark(rng, kind), *words])


def script(received: ReceivedRequest) -> ScriptedReply | None:
    """Answer at random, by the number of the request: words, calls to the client's tools, or both."""
    rng = random.Random(received.number)
    body = received.body
    calls = [
        {
            "id": f"call_{rng.getrandbits(60):x}",
            "type": "function",
            "function": {"name": rng.choice(NAMES), "arguments": json.dumps({"path": text(rng, "a")})},
        }
        for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))
        if b"read_file" in body and b"list_files" in body
    ]
    content = text(rng, "a") if not calls or rng.random() < 0.5 else None
    return ScriptedReply(message={"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})


@dataclass(frozen=True, slots=True)
class Wire:
    """A dialect's way to write and read. ``answer``: the items of a reply; ``results``: those that answer its calls."""

    user: Callable[[str], Any]
    body: Callable[[list[Any]], tuple[str, dict[str, Any]]]
    answer: Callable[[Any], list[Any]]
    results: Callable[[list[Any], Callable[[], str]], list[Any]]


def _chat(items: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    return "/v1/chat/completions", {"model": "gpt-4o-mini", "messages": items, "tools": tools}


def _chat_results(reply: list[Any], new: Callable[[], str]) -> list[Any]:
    calls = reply[-1].get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": new()} for call in calls]


def _responses(items: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in NAMES]
    return "/v1/responses", {"model": "gpt-5-mini", "input": items, "tools": tools}


def _responses_results(reply: list[Any], new: Callable[[], str]) -> list[Any]:
    calls = [item for item in reply if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": new()} for call in calls]


def _anthropic(items: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    return "/v1/messages", {"model": "claude-sonnet-4-5", "max_tokens": 500, "messages": items, "tools": tools}


def _anthropic_results(reply: list[Any], new: Callable[[], str]) -> list[Any]:
    calls = [block for block in reply[-1]["content"] if block["type"] == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": new()} for call in calls]
    return [{"role": "user", "content": blocks}] if blocks else []


def _gemini_inner(items: list[Any]) -> dict[str, Any]:
    return {"contents": items, "tools": [{"functionDeclarations": [{"name": n, "parameters": SCHEMA} for n in NAMES]}]}


def _gemini_results(reply: list[Any], new: Callable[[], str]) -> list[Any]:
    calls = [part["functionCall"] for part in reply[-1]["parts"] if "functionCall" in part]
    parts = [
        {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": new()}}} for call in calls
    ]
    return [{"role": "user", "parts": parts}] if parts else []


def _gemini_user(content: str) -> Any:
    return {"role": "user", "parts": [{"text": content}]}


WIRES = {
    "openai_chat": Wire(
        lambda content: {"role": "user", "content": content},
        _chat,
        lambda reply: [reply["choices"][0]["message"]],
        _chat_results,
    ),
    "openai_responses": Wire(
        lambda content: {"role": "user", "content": content},
        _responses,
        lambda reply: reply["output"],
        _responses_results,
    ),
    "anthropic": Wire(
        lambda content: {"role": "user", "content": content},
        _anthropic,
        lambda reply: [{"role": "assistant", "content": reply["content"]}],
        _anthropic_results,
    ),
    "gemini": Wire(
        _gemini_user,
        lambda items: ("/v1beta/models/gemini-2.5-flash:generateContent", _gemini_inner(items)),
        lambda reply: [reply["candidates"][0]["content"]],
        _gemini_results,
    ),
    "gemini_gca": Wire(
        _gemini_user,
        lambda items: (
            "/v1internal:generateContent",
            {"model": "gemini-2.5-flash", "project": "p", "request": _gemini_inner(items)},
        ),
        lambda reply: [reply["response"]["candidates"][0]["content"]],
        _gemini_results,
    ),
}


@dataclass(slots=True)
class Talk:
    """A client and its history. ``starts`` are the places of its own questions."""

    url: str
    dialect: str
    rng: random.Random
    items: list[Any] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    session: str = ""
    requests: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def marks(self) -> list[str]:
        return MARK.findall(json.dumps(self.items, ensure_ascii=False))

    async def converse(self, http: aiohttp.ClientSession, requests: int) -> None:
        """So many requests, each answered at random; stop at the first that fails."""
        rng, wire = self.rng, WIRES[self.dialect]
        headers = {"X-Tersely-Strategy": rng.choice(STRATEGIES), "X-Tersely-Epoch": rng.choice(EPOCHS)}
        pending: list[Any] = []
        raw = b""
        while self.requests < requests and not self.faults:
            if not pending and self.starts and rng.random() < 0.12:
                del self.items[(cut := rng.choice(self.starts)) :]
                self.starts = [place for place in self.starts if place < cut]
            if not pending:
                self.starts.append(len(self.items))
                pending = [wire.user(text(rng, "u"))]
            self.items += pending
            times = 2 if rng.random() < 0.08 else 1  # an answer that the user did not like
            for _ in range(times):
                path, body = wire.body(self.items)
                async with http.post(self.url + path, json=body, headers=headers) as response:
                    raw = await response.read()
                    self.requests += 1
                    if response.status != 200 or response.headers.get("x-tersely-context") not in _STORED:
                        self.faults.append(f"{response.status} {dict(response.headers)} {raw[:300]!r}")
                        return
                    self.session = response.headers["x-tersely-session"]
            reply = wire.answer(json.loads(raw))
            self.items += reply
            pending = wire.results(reply, lambda: text(rng, "r"))

    async def compare(self, connection: asyncpg.pool.Pool) -> None:
        """Compare the marks with those of the stored session."""
        rows = await connection.fetch(_ROWS, self.session)
        stored = [each for row in rows for each in MARK.findall(json.dumps(json.loads(row["raw"]), ensure_ascii=False))]
        if stored != self.marks:
            self.faults.append(f"{self.session}: stored {stored} sent {self.marks}"[:1500])


_STORED = {"built", "passthrough"}
_ROWS = """
SELECT convert_from(raw, 'UTF8') AS raw FROM messages
WHERE session_id = $1 AND status = 'live' AND client_visible AND turn > 0 AND raw <> '' ORDER BY place, seq
"""
