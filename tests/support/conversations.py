"""Clients of several dialects that hold conversations and keep a record of what they read to its end.

`check` compares their records with the store: everything acknowledged is there, once, in its order.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp
import asyncpg

from tersely.fakellm.scripted import ReceivedRequest, ScriptedReply

CHAT = "gpt-4o-mini"
CLAUDE = "claude-sonnet-4-5"
GEMINI = "gemini-2.5-flash"
KINDS = (
    "chat",
    "chat stream",
    "chat delta",
    "chat delta stream",
    "chat tools",
    "chat tools stream",
    "anthropic",
    "anthropic stream",
    "gemini",
    "gemini stream",
    "code assist",
    "code assist stream",
    "responses",
    "responses stream",
    "responses named",
    "responses named stream",
)
_MARK = re.compile(r"Q:([0-9a-f]+):(\d+)\.")
_PAD = {"name": "manage_scratchpad", "arguments": json.dumps({"action": "update", "content": "milk"})}


def script(received: ReceivedRequest) -> ScriptedReply | None:
    """Answer with the mark of the newest question; where it speaks of TOOL, after a call to a tool of Tersely's."""
    request = received.request or {}
    request = request.get("request") or request  # the envelope of Code Assist
    sent = json.dumps(request.get("messages") or request.get("input") or request.get("contents") or [])
    marks = list(_MARK.finditer(sent))
    if not marks:
        return None
    last = marks[-1]
    messages = request.get("messages") or [{}]
    if f"TOOL {last[0]}" in sent and messages[-1].get("role") != "tool" and "manage_scratchpad" in json.dumps(request):
        call = {"id": f"c{last[1]}{last[2]}", "type": "function", "function": _PAD}
        return ScriptedReply(message={"role": "assistant", "content": None, "tool_calls": [call]})
    return ScriptedReply(message={"role": "assistant", "content": f"the answer to {last[0]}"}, delay=0.002)


@dataclass(slots=True)
class Got:
    """An answer. ``has_ended``: the client read it to its end."""

    status: int
    context: str
    session: str = ""
    text: str = ""
    id: str = ""
    has_ended: bool = False
    error: str = ""


@dataclass(slots=True)
class Conversation:
    """A conversation of one kind. ``acknowledged`` are the numbers of the questions whose answers were read."""

    url: str
    kind: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    acknowledged: list[int] = field(default_factory=list)
    requests: int = 0
    history: list[tuple[str, str]] = field(default_factory=list)
    reply_id: str = ""
    log: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    words: str = ""
    """What each question says besides its mark."""

    @property
    def is_delta(self) -> bool:
        return "delta" in self.kind or "named" in self.kind

    async def ask(self, http: aiohttp.ClientSession) -> Got:
        """Ask the next question."""
        number = self.requests
        self.requests += 1
        text = f"{'TOOL ' if 'tools' in self.kind else ''}Q:{self.name}:{number}.{self.words}"
        path, body, headers = self._request(text)
        try:
            got = await _fetch(http, self.url + path, body, {**self.headers, **headers})
            self.log.append(f"{number} {got.status} {got.context} {got.session} {got.has_ended}")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self.log.append(f"{number} {type(error).__name__}")
            return Got(status=0, context="", error=type(error).__name__)
        if got.has_ended:
            assert f"Q:{self.name}:{number}." in got.text, (self.kind, got)
            self.acknowledged.append(number)
            self.history += [("user", text), ("assistant", got.text)]
            self.reply_id = got.id
        return got

    def _request(self, text: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        streams = "stream" in self.kind
        history = [] if self.is_delta else self.history
        turns = [*history, ("user", text)]
        headers = {"X-Tersely-Session": self.name} if "delta" in self.kind else {}
        if self.kind.startswith(("gemini", "code assist")):
            method = "streamGenerateContent?alt=sse" if streams else "generateContent"
            roles = {"user": "user", "assistant": "model"}
            inner = {"contents": [{"role": roles[role], "parts": [{"text": each}]} for role, each in turns]}
            if self.kind.startswith("gemini"):
                return f"/v1beta/models/{GEMINI}:{method}", inner, headers
            return f"/v1internal:{method}", {"model": GEMINI, "project": "p", "request": inner}, headers
        messages = [{"role": role, "content": each} for role, each in turns]
        if self.kind.startswith("responses"):
            named = {"previous_response_id": self.reply_id} if "named" in self.kind and self.reply_id else {}
            return "/v1/responses", {"model": CHAT, "input": messages, "stream": streams, **named}, headers
        if self.kind.startswith("anthropic"):
            body = {"model": CLAUDE, "messages": messages, "stream": streams, "max_tokens": 100}
            return "/v1/messages", body, {**headers, "anthropic-version": "2023-06-01"}
        return "/v1/chat/completions", {"model": CHAT, "messages": messages, "stream": streams}, headers


async def _fetch(http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Got:
    async with http.post(url, json=body, headers=headers) as response:
        context = response.headers.get("x-tersely-context", "")
        session = response.headers.get("x-tersely-session", "")
        raw = await response.read()
        if response.status != 200:
            return Got(status=response.status, context=context, error=raw.decode("utf-8", "replace"))
        if response.content_type != "text/event-stream":
            return _whole(json.loads(raw), context, session)
        got = Got(status=200, context=context, session=session)
        for line in raw.split(b"\n"):
            if line.startswith(b"data:"):
                _event(line[5:].strip(), got)
        return got


def _whole(reply: dict[str, Any], context: str, session: str) -> Got:
    reply = reply.get("response", reply)
    text = ""
    if "choices" in reply:
        text = reply["choices"][0]["message"]["content"] or ""
    elif "output" in reply:
        parts = [part for item in reply["output"] for part in item.get("content", ())]
        text = "".join(part.get("text", "") for part in parts)
    elif "candidates" in reply:
        text = "".join(part.get("text", "") for part in reply["candidates"][0]["content"]["parts"])
    else:
        text = "".join(part.get("text", "") for part in reply["content"])
    return Got(status=200, context=context, session=session, text=text, id=str(reply.get("id", "")), has_ended=True)


def _event(data: bytes, got: Got) -> None:
    if data == b"[DONE]":
        got.has_ended = not got.error
        return
    event = json.loads(data)
    kind = event.get("type", "")
    if not kind:
        event = event.get("response", event)
    if "error" in event or kind in ("error", "response.failed"):
        got.error, got.has_ended = data.decode(), False
    for choice in event.get("choices", ()):
        got.text += (choice.get("delta") or {}).get("content") or ""
    for candidate in event.get("candidates", ()):
        got.text += "".join(part.get("text", "") for part in candidate["content"].get("parts", ()))
        got.has_ended = got.has_ended or bool(candidate.get("finishReason"))
    if kind == "content_block_delta":
        got.text += event["delta"].get("text", "")
    elif kind == "response.output_text.delta":
        got.text += event["delta"]
    elif kind == "response.completed":
        got.id, got.has_ended = event["response"]["id"], True
    elif kind == "message_stop":
        got.has_ended = True


async def converse(conversation: Conversation, turns: int, *, pause: float = 0.0) -> list[Got]:
    """So many questions of a conversation, one after the other; what was not answered is asked as a new one."""
    found = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        for _ in range(turns):
            found.append(await conversation.ask(http))
            if not found[-1].has_ended:
                await asyncio.sleep(0.1)
            await asyncio.sleep(pause)
    return found


async def waits_for_spool(url: str, limit: float = 30.0) -> None:
    """Wait until nothing waits in the spool of a service of one process."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(limit):
        while True:
            async with http.get(f"{url}/metrics") as response:
                if "tersely_spooled_exchanges 0.0" in await response.text():
                    return
            await asyncio.sleep(0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of the comparison, in exchanges."""

    acknowledged: int
    lost: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.doubled or self.misplaced or self.split or self.mixed)


async def compare(admin_dsn: str, conversations: list[Conversation], *, since: datetime | None = None) -> Compared:
    """Compare the records of clients with the store. ``since``: with the sessions that were written to since then."""
    connection = await asyncpg.connect(admin_dsn)
    try:
        rows = await connection.fetch(
            "SELECT session_id, seq, role, status, convert_from(raw, 'UTF8') AS raw FROM messages "
            "WHERE client_visible AND turn > 0 AND raw <> '' AND ($1::timestamptz IS NULL OR session_id IN "
            "(SELECT id FROM sessions WHERE updated_at >= $1)) ORDER BY session_id, place, seq",
            since,
        )
        gaps = await connection.fetch(
            "SELECT s.id FROM sessions s LEFT JOIN messages m ON m.tenant_id = s.tenant_id AND m.session_id = s.id "
            "WHERE $1::timestamptz IS NULL OR s.updated_at >= $1 "
            "GROUP BY s.tenant_id, s.id, s.last_seq HAVING count(m.seq) <> s.last_seq",
            since,
        )
    finally:
        await connection.close()
    assert not gaps, "sequence numbers have gaps"
    live: dict[str, list[tuple[str, str, int]]] = {}
    for row in rows:
        mark = _MARK.search(row["raw"])
        if mark is None or row["status"] != "live":
            continue
        live.setdefault(mark[1], []).append((row["session_id"], row["role"], int(mark[2])))
    lost, doubled, misplaced, split, mixed = [], [], [], [], []
    owners: dict[str, str] = {}
    for each in conversations:
        found = live.get(each.name, [])
        # A client of named histories or deltas leaves questions in the history that were not answered.
        kept = [(role, number) for _, role, number in found if number in set(each.acknowledged)]
        expected = [(role, number) for number in each.acknowledged for role in ("user", "assistant")]
        label = f"{each.kind} {each.name}"
        lost += [f"{label} {one}" for one in expected if one not in kept]
        doubled += [f"{label} {one}" for one in set(kept) if kept.count(one) > 1]
        if sorted(set(kept)) == sorted(expected) and len(kept) == len(expected) and kept != expected:
            misplaced.append(f"{label} {kept}")
        sessions = {session for session, _, number in found if number in each.acknowledged}
        if len(sessions) > 1 or ("delta" in each.kind and not sessions <= {each.name}):
            split.append(label)
        mixed += [f"{label} {owners[one]}" for one in sessions if owners.setdefault(one, each.name) != each.name]
    return Compared(
        acknowledged=sum(len(each.acknowledged) for each in conversations),
        lost=tuple(lost),
        doubled=tuple(doubled),
        misplaced=tuple(misplaced),
        split=tuple(split),
        mixed=tuple(mixed),
    )
