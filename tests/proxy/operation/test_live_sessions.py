"""Live sessions change nothing: two services do the same work, one with live sessions and one without.

Seeded random clients append, edit, regenerate, retry, undo, drop, pin, clear, change settings, and so on. Every request
that reaches the model host has to be the same, byte for byte, and so has everything that is stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import ValidationError

from tersely.api.transport.body import BodyReservation
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.live_calls import matching as live_matching
from tersely.service.proxy.live_sessions.live_session import LiveSession, LiveSessions
from tersely.service.proxy.preparing.session_matching import SessionMatcher
from tersely.settings import Settings
from tersely.store.commit.writer import HOLD
from tests.conftest import Database, Server, new_database
from tests.support.live_sides import UNEQUAL, Clock, Side, sides, stored
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, scripted

MODEL = "gpt-4o-mini"
STEPS = 45
# Four seeds play one replica and two, `slim` and `full`, and three epoch policies. `TERSELY_TEST_SEEDS=12` plays more
# conversations.
SEEDS = int(os.environ.get("TERSELY_TEST_SEEDS", "4"))
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "",
    "gemini_gca": "",
}
GEMINI = {"gemini": f"/v1beta/models/{MODEL}", "gemini_gca": "/v1internal"}
WORDS = re.findall(
    r"\w+",
    "alpha beta gamma delta file test error value result server client table index query cache token session "
    "message request answer config default option version branch commit change review deploy build release",
)
STRATEGIES = (
    "slim",
    "full",
    '{"name": "slim", "recent_turns": 1}',
    '{"name": "window", "context_size": 3}',
    "trim",
    "compact",
    "tiered",
)
EPOCHS = ("auto", '{"high": 1500, "low": 600}', '{"stride": 2}', "every_request")
TOOL = {
    "type": "function",
    "function": {"name": "read_file", "description": "Read a file.", "parameters": {"type": "object"}},
}


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


@dataclass
class Talk:
    """A client's conversation: what it sends is the same to both sides, but for the ids of sessions."""

    key: str
    system: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    is_spaced: bool = False
    has_members_first: bool = True
    is_streamed: bool = False
    sessions: list[str] = field(default_factory=lambda: ["", ""])
    headers: dict[str, str] = field(default_factory=dict)
    dialect: str = "openai_chat"
    marks: int = 0
    mark: dict[str, str] = field(default_factory=lambda: {"type": "ephemeral"})
    # Whether calls bring only their new messages, and how many messages the service has.
    is_delta: bool = False
    known: int = 0
    # Of the responses format: whether the host keeps replies, and the id of the last one.
    is_kept: bool = False
    # Whether calls describe themselves, and how many did.
    describes_calls: bool = False
    calls: int = 0
    is_cleared: bool = False
    reply_id: str = ""
    # Whether calls reference their history: by the reply that they continue, or by a conversation that the host lacks.
    is_referenced: bool = False
    conversation: str = ""
    # The ids of the replies that the client got, and how many messages it had then: it may go back to each.
    points: list[tuple[str, int]] = field(default_factory=list)

    def path_of(self, *, stream: bool) -> str:
        """The address of a call: Gemini's says whether the reply is streamed."""
        if self.dialect in GEMINI:
            return f"{GEMINI[self.dialect]}:" + ("streamGenerateContent?alt=sse" if stream else "generateContent")
        return self.path

    @property
    def path(self) -> str:
        return PATHS[self.dialect]

    def body(self, messages: list[dict[str, Any]], *, stream: bool, after: str = "") -> bytes:
        """The body of a call; ``after``: the id of the reply that it continues instead of sending the history."""
        if self.dialect == "anthropic":
            return self.anthropic_body(messages, stream=stream)
        if self.dialect == "openai_responses":
            beside: dict[str, Any] = {"model": MODEL, "store": self.is_kept}
            if self.conversation:
                beside |= {"conversation": {"id": self.conversation} if self.is_spaced else self.conversation}
            elif after:
                beside |= {"previous_response_id": after}
            beside |= {"instructions": self.system} if self.system else {}
            beside |= {"tools": [{"type": "function", **tool["function"]} for tool in self.tools]} if self.tools else {}
            beside |= {"stream": True} if stream else {}
            is_text = self.is_referenced and len(messages) == 1 and isinstance(messages[0]["content"], str)
            is_text = is_text and messages[0]["role"] == "user" and len(messages[0]["content"]) % 2 == 0
            history: dict[str, Any] = {"input": messages[0]["content"] if is_text else as_items(messages)}
            if self.describes_calls:  # as Codex does: another text each time, behind the history
                self.calls += 1
                turn = {"turn": self.calls, "lists": [[self.calls] * (self.calls % 3)]}
                history["client_metadata"] = {"session": self.key, "turn": json.dumps(turn), "more": turn}
            return self.whole(history, beside)
        if self.dialect in GEMINI:
            beside = {"systemInstruction": {"parts": [{"text": self.system}]}} if self.system else {}
            declared = [tool["function"] for tool in self.tools]
            beside |= {"tools": [{"functionDeclarations": declared}]} if declared else {}
            contents = {"contents": as_contents(messages)}
            if self.dialect == "gemini":
                return self.whole(contents, beside)
            # Gemini CLI numbers its user's prompts, in front of the history.
            prompts = sum(message["role"] == "user" for message in messages)
            around = {"model": MODEL, "project": "p", "user_prompt_id": f"{self.key}########{prompts // 3}"}
            return self.whole({"request": self.nested(contents, beside)}, around)
        front: dict[str, Any] = {"model": MODEL, "user": self.key}
        back: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        if stream:
            back["stream"] = True
        leading = [{"role": "system", "content": self.system}] if self.system else []
        listed = {"messages": [*leading, *messages]}
        whole = {**front, **listed, **back} if self.has_members_first else {**listed, **front, **back}
        separators = (", ", ": ") if self.is_spaced else (",", ":")
        return json.dumps(whole, separators=separators, ensure_ascii=self.is_spaced).encode()

    def anthropic_body(self, messages: list[dict[str, Any]], *, stream: bool) -> bytes:
        """The same in Anthropic's format, with a breakpoint on the last message, or on the last ones of the user."""
        written = as_anthropic(messages)
        users = [message for message in written if message["role"] == "user"]
        for message in users[-self.marks :] if self.marks else ():
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            message["content"][-1]["cache_control"] = self.mark
        mark = {"cache_control": self.mark} if self.marks else {}
        system = [{"type": "text", "text": self.system, **mark}] if self.marks else self.system
        tools = [
            {"name": tool["function"]["name"], "description": "Read.", "input_schema": {"type": "object"}}
            for tool in self.tools
        ]
        history = {"messages": written}
        beside: dict[str, Any] = {"model": MODEL, "max_tokens": 1000}
        beside |= {"system": system} if self.system else {}
        beside |= {"tools": tools} if tools else {}
        beside |= {"stream": True} if stream else {}
        return self.whole(history, beside)

    def nested(self, history: dict[str, Any], beside: dict[str, Any]) -> dict[str, Any]:
        return {**beside, **history} if self.has_members_first else {**history, **beside}

    def whole(self, history: dict[str, Any], beside: dict[str, Any]) -> bytes:
        whole = self.nested(history, beside)
        separators = (", ", ": ") if self.is_spaced else (",", ":")
        return json.dumps(whole, separators=separators, ensure_ascii=self.is_spaced).encode()


def texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or ()]


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as items of the responses format."""
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            called, output = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": called, "output": output})
            continue
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        if content := [{"type": kind, "text": text} for text in texts_of(message["content"])]:
            items.append({"type": "message", "role": message["role"], "content": content})
        calls = message.get("tool_calls", ())
        items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    return items


def read_items(items: list[dict[str, Any]]) -> dict[str, Any] | None:
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in items
        if item["type"] == "function_call"
    ]
    texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    return as_message("".join(texts), calls)


def as_contents(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as contents of Gemini's format."""
    contents: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        if message["role"] == "tool":
            response = {"name": names.get(message["tool_call_id"], "?"), "response": {"output": message["content"]}}
            part = {"functionResponse": response}
            if contents and "functionResponse" in contents[-1]["parts"][0]:
                contents[-1]["parts"].append(part)
            else:
                contents.append({"role": "user", "parts": [part]})
            continue
        parts: list[dict[str, Any]] = [{"text": text} for text in texts_of(message["content"])]
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"])
            parts.append({"functionCall": {"name": call["function"]["name"], "args": arguments}})
        contents.append({"role": "model" if message["role"] == "assistant" else "user", "parts": parts})
    return contents


def read_contents(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    calls = [
        {
            "id": f"call {index}",
            "type": "function",
            "function": {"name": part["functionCall"]["name"], "arguments": json.dumps(part["functionCall"]["args"])},
        }
        for index, part in enumerate(parts)
        if "functionCall" in part
    ]
    return as_message("".join(part.get("text", "") for part in parts), calls)


def as_message(words: str, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A reply as a chat client echoes it; None for an empty one."""
    if not (words or calls):
        return None
    reply: dict[str, Any] = {"role": "assistant", "content": words or None}
    return {**reply, "tool_calls": calls} if calls else reply


def events_of(answer: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]


def as_anthropic(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
            if written and written[-1].get("results"):
                written[-1]["content"].append(result)
            else:
                written.append({"role": "user", "content": [result], "results": True})
            continue
        if calls := message.get("tool_calls"):
            content = [{"type": "text", "text": content}] if content else []
            for call in calls:
                arguments = json.loads(call["function"]["arguments"] or "{}")
                content.append(
                    {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}
                )
        elif isinstance(content, list):
            content = [dict(part) for part in content]
        written.append({"role": message["role"], "content": content})
    return [{name: value for name, value in message.items() if name != "results"} for message in written]


def read_anthropic(blocks: list[dict[str, Any]]) -> dict[str, Any] | None:
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    words = "".join(block["text"] for block in blocks if block["type"] == "text")
    if not (words or calls):
        return None
    message: dict[str, Any] = {"role": "assistant", "content": words or None}
    return {**message, "tool_calls": calls} if calls else message


def read_anthropic_stream(answer: str) -> dict[str, Any] | None:
    blocks: list[dict[str, Any]] = []
    for line in answer.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                blocks[-1]["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return read_anthropic(blocks)


class Player:
    """Drives both sides through the same random steps."""

    def __init__(
        self, seed: int, live: Side, plain: Side, clock: Clock, dialect: str = "openai_chat", deltas: float = 0.1,
        references: float = 0.0, has_habits: bool = False,
    ) -> None:  # fmt: skip
        """``deltas``: the part of the conversations whose calls bring only their new messages. ``references``: the part
        whose calls reference their histories beside them. ``has_habits``: clients change their habits now and then.
        """
        self.has_habits = has_habits
        self.dialect = dialect
        self.deltas = deltas
        self.references = references
        self.clock = clock
        self.draw = random.Random(seed)
        self.seed = seed
        self.live, self.plain = live, plain
        self.talks: list[Talk] = []
        self.done: list[str] = []

    def play(self, steps: int) -> None:
        self.begin()
        kinds = [
            (self.append, 24), (self.work, 14), (self.edit, 2), (self.regenerate, 2), (self.retry, 2), (self.undo, 1),
            (self.drop, 1), (self.pin, 1), (self.clear, 1), (self.patch, 1), (self.with_header, 1), (self.memo, 1),
            (self.rest_append, 1), (self.change_system, 1), (self.change_tools, 1), (self.begin, 1), (self.twin, 1),
            (self.delta, 1), (self.inject, 2), (self.compact, 1), (self.search, 2), (self.side_call, 1),
            (self.several, 1), (self.break_off, 1), (self.abandon, 1), (self.overflow, 2), (self.fail, 1),
            (self.cut_off, 1), (self.by_id, 5 if self.dialect == "openai_responses" else 0),
        ]  # fmt: skip
        if self.has_habits:
            kinds += [
                (self.mark_otherwise, 8),
                (self.change_program, 3),
                (self.ask_nothing, 3),
                (self.call_in_words, 6),
            ]
        for _ in range(steps):
            step = self.draw.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
            talk = self.draw.choice(self.talks[-3:])
            if self.draw.random() < 0.3:
                self.live.at = self.plain.at = self.draw.randrange(len(self.live.services))
            if (talk.is_delta or talk.is_referenced) and step == self.ask_nothing:
                step = self.append
            if talk.conversation and step in (self.edit, self.regenerate):
                step = self.append
            if talk.is_delta and step in (
                self.ask_nothing,
                self.edit,
                self.regenerate,
                self.several,
                self.twin,
                self.delta,
            ):
                step = self.append
            self.done.append(f"{step.__name__} {talk.key}")
            self.clock.now += timedelta(seconds=self.draw.choice((20, 20, 20, 20, 400)))
            step(talk)
            self.check()
            if self.has_habits and step != self.clear:
                self.check_description(talk)

    def check(self) -> None:
        ours, theirs = self.live.model.state.received, self.plain.model.state.received
        assert len(ours) == len(theirs), self.done
        for one, other in zip(list(ours)[-4:], list(theirs)[-4:], strict=True):
            at = next((n for n, (a, b) in enumerate(zip(one.body, other.body, strict=False)) if a != b), 0)
            assert one.body == other.body, (self.done, one.body[at - 200 : at + 100], other.body[at - 200 : at + 100])

    def check_description(self, talk: Talk) -> None:
        """The context that is shown of a session's last call is one of the newest that the host received."""
        for index, side in enumerate((self.live, self.plain)):
            session = f"/api/sessions/{talk.sessions[index]}"
            calls = side.request("GET", f"{session}/calls", params={"limit": 1000})
            items = calls.json()["items"] if calls.status_code == 200 else []
            if not items:
                continue
            shown = side.request("GET", f"{session}/calls/{items[-1]['number']}/context").json()
            if not shown["exact"]:
                continue
            received = [_parts(each.body, self.dialect) for each in list(side.model.state.received)[-12:]]
            assert (shown["messages"], shown["tools"] or []) in received, (self.done, index, shown["call"])

    # Calls

    def send(
        self, talk: Talk, *, messages: list[dict[str, Any]] | None = None, replies: tuple[ScriptedReply, ...] = (),
        headers: dict[str, str] | None = None, after: str = "",
    ) -> dict[str, Any] | None:  # fmt: skip
        """Send the talk's history, to both; the reply as the client echoes it, None for an error."""
        if self.draw.random() < 0.05:
            talk.is_streamed = not talk.is_streamed
        stream = talk.is_streamed
        body = self.body(talk, messages, stream=stream, after=after)
        found = []
        for index, side in enumerate((self.live, self.plain)):
            side.model.script(talk.key, *replies)
            named = {name: value.replace("SESSION", talk.sessions[index]) for name, value in (headers or {}).items()}
            script = {"x-script": talk.key} if talk.dialect != "openai_chat" else {}
            sent = {"content-type": "application/json", **script, **talk.headers, **named}
            answer = side.post(talk.path_of(stream=stream), content=body, headers=sent)
            side.model.replies.pop(talk.key, None)
            talk.sessions[index] = answer.headers.get("x-tersely-session", talk.sessions[index])
            reply_headers = {
                name: value
                for name, value in answer.headers.items()
                if name.startswith("x-tersely") and name not in UNEQUAL
            }
            found.append((answer.status_code, reply_headers, self.read(answer, talk.dialect, stream=stream)))
            if talk.dialect == "openai_responses":
                talk.reply_id = next(iter(re.findall(r'"id": ?"(resp_\w+)"', answer.text)), "")
        assert found[0] == found[1], self.done
        return found[0][2]

    def body(self, talk: Talk, messages: list[dict[str, Any]] | None, *, stream: bool, after: str) -> bytes:
        if talk.is_referenced and messages is None:
            after = talk.points[-1][0] if talk.points else ""
            return talk.body(talk.messages[talk.known :], stream=stream, after=after)
        if messages is not None or not talk.is_delta:
            return talk.body(talk.messages if messages is None else messages, stream=stream, after=after)
        system = talk.system
        if talk.known and self.draw.random() < 0.9:
            talk.system = ""
        body = talk.body(talk.messages[talk.known :], stream=stream)
        talk.system = system
        return body

    @staticmethod
    def read(answer: httpx.Response, dialect: str, *, stream: bool) -> dict[str, Any] | None:
        if answer.status_code != 200:
            return None
        if dialect == "anthropic":
            return read_anthropic_stream(answer.text) if stream else read_anthropic(answer.json()["content"])
        if dialect == "openai_responses":
            ended = (
                [event for event in events_of(answer.text) if event["type"] == "response.completed"] if stream else []
            )
            return read_items((ended[-1]["response"] if ended else {} if stream else answer.json()).get("output", []))
        if dialect in GEMINI:
            parts = events_of(answer.text) if stream else [answer.json()]
            parts = [each.get("response", each) for each in parts]
            contents = [each["candidates"][0].get("content", {}) for each in parts if each.get("candidates")]
            return read_contents([part for content in contents for part in content.get("parts", ())])
        if not stream:
            message = answer.json()["choices"][0]["message"]
            return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name) is not None}
        content = ""
        calls: dict[int, dict[str, Any]] = {}
        for line in answer.text.splitlines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line[6:]).get("choices", []):
                delta = choice["delta"]
                content += delta.get("content") or ""
                for part in delta.get("tool_calls") or []:
                    call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {}})
                    call["id"] = part.get("id") or call["id"]
                    for name, value in (part.get("function") or {}).items():
                        call["function"][name] = call["function"].get(name, "") + value
        if not (content or calls):
            return None
        reply: dict[str, Any] = {"role": "assistant", "content": content or None}
        return {**reply, "tool_calls": list(calls.values())} if calls else reply

    def hear(self, talk: Talk, reply: dict[str, Any] | None) -> None:
        if reply is None:
            if not self.is_open(talk):
                talk.messages.pop()
            return
        talk.messages.append(reply)
        talk.known = len(talk.messages)
        talk.points.append((talk.reply_id, talk.known))
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": text(self.draw, self.draw.choice((5, 60, 400)))}
            for call in reply.get("tool_calls") or ()
        ]
        talk.messages += answers

    def question(self) -> dict[str, Any]:
        words = text(self.draw, self.draw.choice((3, 20, 20, 200)))
        parts = [{"type": "text", "text": words}, {"type": "text", "text": "Thanks."}]
        return {"role": "user", "content": parts if self.draw.random() < 0.2 else words}

    def text_reply(self) -> ScriptedReply:
        words = text(self.draw, self.draw.choice((8, 30, 150)))
        tag = self.draw.choice(("", "", f"\n<terse>{text(self.draw, 4)}</terse>"))
        return ScriptedReply(message={"content": words + tag})

    def calling(self, name: str = "read_file", count: int = 1, **arguments: Any) -> ScriptedReply:
        calls = [
            {
                "id": f"call_{self.draw.getrandbits(48):x}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments or {"path": text(self.draw, 1)})},
            }
            for _ in range(count)
        ]
        return ScriptedReply(message={"content": None, "tool_calls": calls})

    def is_open(self, talk: Talk) -> bool:
        return bool(talk.messages) and talk.messages[-1]["role"] == "tool"

    # Steps

    def begin(self, _: Talk | None = None) -> None:
        talk = Talk(
            key=f"talk-{self.seed}-{len(self.talks)}",
            system=self.draw.choice(("", "Be brief.", text(self.draw, 300))),
            tools=self.draw.choice(([], [TOOL])),
            is_spaced=self.draw.random() < 0.3,
            has_members_first=self.draw.random() < 0.5,
            is_streamed=self.draw.random() < 0.5,
            dialect=self.dialect,
            marks=self.draw.choice((0, 1, 1, 2)),
            is_kept=self.dialect == "openai_responses" and self.draw.random() < 0.5,
        )
        describes_calls = self.dialect == "openai_responses" and self.draw.random() < 0.5
        named = self.draw.random()
        if self.references and (self.draw.random() < self.references or not self.talks):
            talk.is_referenced = True
            talk.conversation = self.draw.choice(("", "", f"conv_{talk.key}"))
        elif named < self.deltas:
            talk.is_delta = True
            talk.marks = self.draw.choice((0, 0, talk.marks))  # stored breakpoints leave no room for Tersely's own
            talk.headers = {"x-tersely-session": talk.key}
        elif named < self.deltas + 0.25:
            talk.headers = {"x-tersely-session": talk.key}
        talk.describes_calls = describes_calls and not (talk.is_referenced or talk.is_delta)
        if self.draw.random() < 0.3:
            talk.headers["x-session-affinity"] = talk.key
        if self.draw.random() < 0.2 and not talk.is_delta:
            # Codex and Qwen Code begin with a message of their own, and Claude Code puts instructions behind one.
            block = f"<system-reminder>{text(self.draw, 6)}</system-reminder>"
            talk.messages.append({"role": "user", "content": block})
        if self.draw.random() < 0.3:
            reminder = f"<system-reminder>{text(self.draw, 6)}</system-reminder>"
            talk.messages.append({"role": "user", "content": f"{reminder}\n{text(self.draw, 5)}"})
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))
        self.talks.append(talk)
        self.append(talk)

    def append(self, talk: Talk) -> None:
        for _ in range(self.draw.choice((1, 2, 4))):
            if not self.is_open(talk):
                talk.messages.append(self.question())
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def work(self, talk: Talk) -> None:
        if not talk.tools:
            self.append(talk)
            return
        if not self.is_open(talk):
            talk.messages.append(self.question())
        for _ in range(self.draw.choice((1, 2, 4))):
            self.hear(talk, self.send(talk, replies=(self.calling(count=self.draw.choice((1, 1, 2))),)))

    def go_back(self, talk: Talk, points: int) -> None:
        """Forget what came after an earlier reply, of which so many are left."""
        del talk.points[points:]
        talk.known = talk.points[-1][1] if talk.points else 0
        del talk.messages[talk.known :]

    def edit(self, talk: Talk) -> None:
        if talk.is_referenced:
            self.go_back(talk, self.draw.randint(0, len(talk.points)))
            called = talk.messages[-1].get("tool_calls", ()) if talk.messages else ()
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "Another result."} for call in called]
            talk.messages += results or [self.question()]
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))
            return
        users = [index for index, message in enumerate(talk.messages) if message["role"] == "user"]
        if users:
            index = self.draw.choice(users)
            talk.messages[index:] = [self.question()]
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def regenerate(self, talk: Talk) -> None:
        if talk.is_referenced:
            before = talk.points[-2][1] if len(talk.points) > 1 else 0
            asked = talk.messages[before : talk.known - 1]
            self.go_back(talk, max(0, len(talk.points) - 1))
            talk.messages += asked or [self.question()]
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))
            return
        while talk.messages and talk.messages[-1]["role"] != "user":
            talk.messages.pop()
        if talk.messages:
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def retry(self, talk: Talk) -> None:
        if not self.is_open(talk):
            talk.messages.append(self.question())
        replies = (self.text_reply(),)
        self.send(talk, replies=replies)
        self.hear(
            talk,
            self.send(talk, replies=(self.text_reply(),), headers={"x-stainless-retry-count": self.draw.choice("01")}),
        )

    def rest(self, talk: Talk, method: str, path: str, **more: Any) -> None:
        statuses = []
        for side, session in zip((self.live, self.plain), talk.sessions, strict=True):
            statuses.append(side.request(method, f"/api/sessions/{session}{path}", **more).status_code)
        assert statuses[0] == statuses[1], self.done

    def turn(self) -> str:
        return f"t{self.draw.randint(1, 6)}"

    def undo(self, talk: Talk) -> None:
        self.rest(talk, "POST", "/undo")

    def drop(self, talk: Talk) -> None:
        self.rest(talk, "POST", f"/turns/{self.turn()}/drop")

    def pin(self, talk: Talk) -> None:
        self.rest(talk, "POST", f"/messages/{self.draw.randint(1, 12)}/pin")

    def clear(self, talk: Talk) -> None:
        talk.is_cleared = True
        self.rest(talk, "POST", "/clear")

    def compact(self, talk: Talk) -> None:
        self.rest(talk, "POST", "/compact")

    def patch(self, talk: Talk) -> None:
        change = self.draw.choice(({"strategy": self.draw.choice(STRATEGIES)}, {"epoch": self.draw.choice(EPOCHS)}))
        self.rest(talk, "PATCH", "", json={name: _loaded(value) for name, value in change.items()})

    def with_header(self, talk: Talk) -> None:
        chosen: dict[str, str] = self.draw.choice(
            (
                {},
                {"x-tersely-strategy": self.draw.choice(STRATEGIES)},
                {"x-tersely-epoch": self.draw.choice(EPOCHS)},
            )
        )
        own = {name: value for name, value in talk.headers.items() if name == "x-tersely-session"}
        talk.headers = {**chosen, **own}
        self.append(talk)

    def memo(self, _: Talk) -> None:
        content = {"content": text(self.draw, 12), "tags": ["note"]}
        for side in (self.live, self.plain):
            side.post("/api/memos", json=content)

    def rest_append(self, talk: Talk) -> None:
        message = {"role": "user", "content": text(self.draw, 10)}
        self.rest(talk, "POST", "/messages", json={"dialect": "openai_chat", "messages": [message]})

    def change_system(self, talk: Talk) -> None:
        talk.system = text(self.draw, 20)
        self.append(talk)

    def change_tools(self, talk: Talk) -> None:
        talk.tools = self.draw.choice(([], [TOOL]))
        self.append(talk)

    def twin(self, talk: Talk) -> None:
        """Another conversation of the same words, answered the same."""
        first = dict(next(message for message in talk.messages if message["role"] == "user")) if talk.messages else None
        if first is None:
            return
        reply = ScriptedReply(message={"content": "The same answer to everybody who asks."})
        made = [
            Talk(
                key=talk.key,
                system=talk.system,
                tools=talk.tools,
                messages=[dict(first)],
                dialect=talk.dialect,
                marks=talk.marks,
            )
            for _ in range(2)
        ]
        for each in made:
            self.hear(each, self.send(each, replies=(reply,)))
        for each in made:
            each.messages.append({"role": "user", "content": "Go on."})
            self.hear(each, self.send(each, replies=(reply,)))
        self.talks += made

    def delta(self, talk: Talk) -> None:
        # Behind a history that was cleared, a session's id goes into the chain of its messages.
        if not talk.sessions[0] or self.is_open(talk) or talk.is_cleared:
            return
        message = self.question()
        reply = self.send(
            talk, messages=[message], replies=(self.text_reply(),), headers={"x-tersely-session": "SESSION"}
        )
        if reply is not None:
            talk.messages += [message, reply]

    def by_id(self, talk: Talk) -> None:
        """Some calls that name their history by the last reply's id."""
        for _ in range(self.draw.choice((1, 2, 3))):
            if not talk.reply_id or talk.is_delta or talk.is_referenced:
                return
            if not self.is_open(talk):
                talk.messages.append(self.question())
            new = talk.messages[talk.known :]
            reply = self.draw.choice((self.text_reply(), self.calling()))
            self.hear(talk, self.send(talk, messages=new, replies=(reply,), after=talk.reply_id))

    def inject(self, talk: Talk) -> None:
        if self.is_open(talk):
            return
        reminder = f"<system-reminder>{text(self.draw, 6)}</system-reminder>"
        kind = self.draw.random()
        if kind < 0.3 and talk.dialect not in GEMINI:
            talk.messages += [{"role": "system", "content": text(self.draw, 8)}, self.question()]
        elif kind < 0.6:
            talk.messages += [{"role": "user", "content": reminder}, self.question()]
        else:
            talk.messages.append({"role": "user", "content": f"{reminder}\n{text(self.draw, 5)}"})
        self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def search(self, talk: Talk) -> None:
        """The model calls a tool of ours, where it is offered one; else the call is the client's to answer."""
        if not self.is_open(talk):
            talk.messages.append(self.question())
        call = self.calling("context_search", mode="search", query=self.draw.choice(WORDS))
        reply = self.send(talk, replies=(call, self.text_reply()))
        self.hear(talk, reply)

    def side_call(self, talk: Talk) -> None:
        self.send(talk, messages=[{"role": "user", "content": "quota"}], replies=(self.text_reply(),))

    def several(self, talk: Talk) -> None:
        """Several messages at once, and a reply that the service has not seen."""
        if self.is_open(talk):
            return
        talk.messages += [self.question(), {"role": "assistant", "content": text(self.draw, 9)}, self.question()]
        self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def break_off(self, talk: Talk) -> None:
        if not self.is_open(talk):
            talk.messages.append(self.question())
        self.send(talk, replies=(ScriptedReply(message={"content": text(self.draw, 40)}, finish_reason="length"),))
        self.append(talk)

    def abandon(self, talk: Talk) -> None:
        """The user goes on without the result of a call, so that the context has to be repaired from now on."""
        if not talk.tools:
            return
        if not self.is_open(talk):
            talk.messages.append(self.question())
            self.hear(talk, self.send(talk, replies=(self.calling(count=self.draw.choice((1, 2))),)))
        if self.is_open(talk):
            talk.messages[-1] = self.question()
            self.hear(talk, self.send(talk, replies=(self.text_reply(),)))
        self.append(talk)

    def overflow(self, talk: Talk) -> None:
        """The host refuses the context as too long; where less can be sent, it takes that."""
        if not self.is_open(talk):
            talk.messages.append(self.question())
        error = {"message": "This model's maximum context length", "code": "context_length_exceeded"}
        refusal = ScriptedReply(status=400, body=json.dumps({"error": error}).encode())
        self.hear(talk, self.send(talk, replies=(refusal, self.text_reply())))

    def fail(self, talk: Talk) -> None:
        if not self.is_open(talk):
            talk.messages.append(self.question())
        refusal = ScriptedReply(status=self.draw.choice((400, 429, 500)), body=b'{"error":{"message":"No."}}')
        self.send(talk, replies=(refusal,))
        self.hear(talk, self.send(talk, replies=(self.text_reply(),)))

    def mark_otherwise(self, talk: Talk) -> None:
        if not talk.is_delta:
            talk.marks = self.draw.choice((0, 1, 1, 2, 3))
        talk.mark = {"type": "ephemeral"} | self.draw.choice(({}, {"ttl": "1h"}, {"ttl": "5m"}))
        self.append(talk)

    def change_program(self, talk: Talk) -> None:
        talk.headers["user-agent"] = self.draw.choice(("one/1.0", "one/1.1", "another/2.0", "curl/8"))
        self.append(talk)

    def call_in_words(self, talk: Talk) -> None:
        """The reply has text and a call: in some formats these are two elements."""
        if not self.is_open(talk):
            talk.messages.append(self.question())
        call = self.calling()
        self.hear(
            talk, self.send(talk, replies=(ScriptedReply(message={**(call.message or {}), "content": "I look."}),))
        )

    def ask_nothing(self, talk: Talk) -> None:
        """Calls whose history ends with the last reply, which may be of several elements, and one that goes on."""
        self.call_in_words(talk)
        ended = talk.messages[: talk.known]
        if self.draw.random() < 0.5:  # without its results, and without its call
            ended = [*ended[:-1], {"role": "assistant", "content": text(self.draw, 3)}]
        reply = self.send(talk, messages=ended, replies=(self.text_reply(),))
        if reply is not None and self.draw.random() < 0.5:
            talk.messages = [*ended, reply]
            talk.known = len(talk.messages)
        self.append(talk)

    def cut_off(self, talk: Talk) -> None:
        """A stream breaks off; the client asks again."""
        if not talk.is_streamed:
            return
        if not self.is_open(talk):
            talk.messages.append(self.question())
        words = text(self.draw, 60)
        self.send(talk, replies=(ScriptedReply(message={"content": words}, break_after=4, break_with="error"),))
        self.hear(talk, self.send(talk, replies=(self.text_reply(),)))


def _parts(body: bytes, dialect: str) -> tuple[object, object]:
    """The messages and tools of a request's body."""
    members = json.loads(body)
    members = members.get("request", members)
    messages = next(members[name] for name in ("messages", "input", "contents") if name in members)
    return (messages if isinstance(messages, list) else [messages]), members.get("tools") or []


def _loaded(value: str) -> object:
    return json.loads(value) if value.startswith("{") else value


def forget_at_random(monkeypatch: pytest.MonkeyPatch, draw: random.Random) -> None:
    """Evict live sessions at random moments."""
    find = LiveSessions.find

    def forgetful(self: LiveSessions, call: Call) -> list[LiveSession]:
        if draw.random() < 0.1:
            self.clear()
        return find(self, call)

    monkeypatch.setattr(LiveSessions, "find", forgetful)


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_live_sessions_send_and_store_the_same_as_the_full_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, dialect: str, seed: int
) -> None:
    played = play_both(server, monkeypatch, dialect, seed)
    assert played.live == played.plain
    assert played.hits["hit"] >= 1 or seed > 3, played.hits  # few conversations have none


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_live_references_send_and_store_the_same_as_the_full_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Calls name the last reply, an earlier one, or a conversation."""
    played = play_both(server, monkeypatch, "openai_responses", seed, deltas=0.05, references=0.8)
    assert played.live == played.plain
    # With `full` a host that keeps replies has the histories.
    assert played.hits["hit"] >= 1 or seed % 4 == 3, played.hits


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("seed", range(max(4, SEEDS - 4)))
def test_live_deltas_send_and_store_the_same_as_the_full_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, dialect: str, seed: int
) -> None:
    played = play_both(server, monkeypatch, dialect, seed, deltas=0.8)
    assert played.live == played.plain
    assert played.hits["hit"] >= 1 or seed > 3, played.hits  # few conversations have none


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("seed", range(max(4, SEEDS - 4)))
def test_clients_with_changing_habits_send_and_store_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch, dialect: str, seed: int
) -> None:
    """Breakpoints of another form, another program, calls that ask nothing."""
    played = play_both(server, monkeypatch, dialect, seed, has_habits=True)
    assert played.live == played.plain
    assert played.hits["hit"] >= 1 or seed > 3, played.hits  # few conversations have none


WINDOW = '{"name": "window", "context_size": 3, "memos": 0}'
WINDOW_WITH_MEMOS = '{"name": "window", "context_size": 2, "memos": 3}'
TRIM = '{"name": "trim", "max_context_turns": 5, "max_steps": 4}'


@pytest.mark.parametrize(
    ("strategy", "seed"),
    [
        *product((WINDOW, "trim", "compact", "tiered"), range(max(1, SEEDS - 4))),
        (WINDOW, 7),  # an epoch keeps a message whose tokens were estimated when it began
        ("trim", 11),  # a plan for another strategy offers tools that the epoch before it offered too
        (TRIM, 5),
        (TRIM, 6),  # two replicas
        (WINDOW_WITH_MEMOS, 5),
        (WINDOW_WITH_MEMOS, 6),
        (WINDOW, 22),  # an epoch keeps a message with a block of the client's from long before
    ],
)
def test_every_strategy_sends_and_stores_the_same_live(
    server: Server, monkeypatch: pytest.MonkeyPatch, strategy: str, seed: int
) -> None:
    played = play_both(server, monkeypatch, "openai_chat", seed, strategy=strategy)
    assert played.live == played.plain
    assert played.hits["hit"] >= 1 or seed > 3, played.hits  # few conversations have none


@dataclass(frozen=True)
class Played:
    """The stored rows of both sides, and the live one's counts of its calls."""

    live: list[Any]
    plain: list[Any]
    hits: Counter[str]


def play_both(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    dialect: str,
    seed: int,
    *,
    deltas: float = 0.1,
    references: float = 0.0,
    strategy: str = "",
    has_habits: bool = False,
) -> Played:
    """Play one seed on both sides. Asserts after each step that the model hosts received the same bytes."""
    draw = random.Random(f"forget {seed}")
    forget_at_random(monkeypatch, draw)
    clock = Clock()
    monkeypatch.setattr("tersely.composition.application.clock", clock)
    if seed % 4 == 2:
        monkeypatch.setattr(live_matching, "TRUSTED", 0.0)  # what another replica changes counts at once
    settings: dict[str, Any] = {
        "strategy": strategy or ("full" if seed % 4 == 3 else "slim"),
        "epoch": EPOCHS[seed % 3],
        "instructions": "off" if seed % 3 == 2 else "on",
    }
    with sides(server, replicas=2 if seed % 4 == 2 else 1, **settings) as (live, plain):
        player = Player(seed, live, plain, clock, dialect, deltas, references, has_habits)
        player.play(STEPS)
        hits = live.hits()
        ours, theirs = (asyncio.run(stored(side.services[0].database)) for side in (live, plain))
    return Played(ours, theirs, hits)


def _send(http: httpx.Client, service: Service, messages: list[Any], **more: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": messages, **more}
    return http.post(f"{service.base_url}/chat/completions", json=body)


async def _count(database: Database, words: str) -> int:
    connection = await asyncpg.connect(database.admin_dsn)
    try:
        found = await connection.fetchval(
            "SELECT count(*) FROM messages WHERE position($1::bytea in raw) > 0", words.encode()
        )
        return int(found)
    finally:
        await connection.close()


def test_a_live_call_stores_its_question_while_a_slow_model_works(server: Server) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        service = stack.enter_context(serve(database, model.url, live_sessions="64"))
        http = stack.enter_context(httpx.Client(timeout=60))
        messages: list[Any] = [{"role": "user", "content": "What is it?"}]
        reply = _send(http, service, messages, user="slow").json()["choices"][0]["message"]
        messages += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": "the slow question"},
        ]
        model.script("slow", ScriptedReply(message={"content": "At last."}, first_delay=HOLD + 4))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(_send, http, service, messages, user="slow")
            deadline = time.monotonic() + HOLD + 3.5
            while not asyncio.run(_count(database, "the slow question")):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert not asking.done()
            assert asking.result().status_code == 200
        assert asyncio.run(_count(database, "At last.")) == 1
        text = http.get(f"{service.url}/metrics").text
    assert 'tersely_live_calls_total{result="hit"} 1.0' in text
    assert 'tersely_live_sessions{state="held"} 1.0' in text


@contextmanager
def live_delta_session(
    server: Server, name: str
) -> Iterator[tuple[Model, Database, httpx.Client, tuple[Service, Service]]]:
    """Two replicas, and a session of that name which is live at the first one, since its calls bring new messages."""
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        one, other = (stack.enter_context(serve(database, model.url, live_sessions="64")) for _ in range(2))
        http = stack.enter_context(httpx.Client(timeout=60, headers={"x-tersely-session": name}))
        for question in ("Where is the harbour?", "And the lighthouse?", "And the mill?"):
            assert _send(http, one, [{"role": "user", "content": question}], user=name).status_code == 200
        assert 'tersely_live_calls_total{result="hit"} 1.0' in http.get(f"{one.url}/metrics").text
        yield model, database, http, (one, other)


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_delta_that_is_sent_again_in_flight_is_one_turn(server: Server, is_elsewhere: bool) -> None:
    """The first one continues a live session; the second one reaches the same replica, or another one."""
    with live_delta_session(server, "again") as (model, database, http, (one, other)):
        replies = [ScriptedReply(message={"content": words}, first_delay=1.0) for words in ("The first.", "The other.")]
        model.script("again", *replies)
        repeated = [{"role": "user", "content": "the question in flight"}]
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(_send, http, one, repeated, user="again")
            time.sleep(0.4)
            second = pool.submit(_send, http, other if is_elsewhere else one, repeated, user="again")
            assert (first.result().status_code, second.result().status_code) == (200, 200)
        assert asyncio.run(_count(database, "the question in flight")) == 1
        sent = [json.loads(each.body)["messages"] for each in list(model.state.received)[-2:]]
        assert [messages[-1] for messages in sent] == repeated * 2
        assert sent[0] == sent[1]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_delta_beside_another_one_shows_its_question(server: Server, is_elsewhere: bool) -> None:
    with live_delta_session(server, "beside") as (model, _, http, (one, other)):
        model.script("beside", ScriptedReply(message={"content": "At last."}, first_delay=5.0))
        slow, quick = ({"role": "user", "content": words} for words in ("a slow question", "a quick question"))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(_send, http, one, [slow], user="beside")
            time.sleep(1.0)
            assert _send(http, other if is_elsewhere else one, [quick], user="beside").status_code == 200
            assert not asking.done()
            assert asking.result().status_code == 200
        assert json.loads(model.state.received[-1].body)["messages"][-2:] == [slow, quick]


def test_what_another_replica_drops_is_sent_no_more_when_the_trust_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_matching, "TRUSTED", 0.5)
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        one, other = (stack.enter_context(serve(database, model.url, live_sessions="64")) for _ in range(2))
        http = stack.enter_context(httpx.Client(timeout=60))
        messages: list[Any] = []
        session = ""
        for question in ("Where is the harbour?", "And the lighthouse?", "And the mill?"):
            messages.append({"role": "user", "content": question})
            answer = _send(http, one, messages)
            session = answer.headers["x-tersely-session"]
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        assert b"harbour" in model.state.received[-1].body
        assert http.post(f"{other.url}/api/sessions/{session}/turns/t1/drop").status_code == 200
        time.sleep(1)
        messages.append({"role": "user", "content": "And the bridge?"})
        assert _send(http, one, messages).headers["x-tersely-session"] == session
        assert b"harbour" not in model.state.received[-1].body
        assert b"lighthouse" in model.state.received[-1].body


def test_a_live_call_that_is_decided_again_is_described_as_it_was_sent(server: Server) -> None:
    """Another replica answers another question behind the same history while the model works."""
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        one, other = (stack.enter_context(serve(database, model.url, live_sessions="64")) for _ in range(2))
        http = stack.enter_context(httpx.Client(timeout=60))
        messages: list[Any] = []
        for question in ("Where is the harbour?", "And the lighthouse?", "And the mill?"):
            messages.append({"role": "user", "content": question})
            answer = _send(http, one, messages, user="beside").json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": answer})
        model.script("beside", ScriptedReply(message={"content": "At last."}, first_delay=1.0))
        slow, quick = ({"role": "user", "content": words} for words in ("a slow question", "a quick question"))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(_send, http, one, [*messages, slow], user="beside")
            time.sleep(0.4)
            assert _send(http, other, [*messages, quick], user="beside").status_code == 200
            assert not asking.done()
            answered = asking.result()
        (sent,) = [json.loads(each.body) for each in model.state.received if b"a slow question" in each.body]
        calls = f"{one.url}/api/sessions/{answered.headers['x-tersely-session']}/calls"
        newest = max(each["number"] for each in http.get(calls).json()["items"])
        shown = http.get(f"{calls}/{newest}/context").json()
        assert shown["exact"], shown["reason"]
        assert shown["messages"] == sent["messages"]


def test_a_context_that_is_repaired_stays_live(server: Server) -> None:
    """A call without its result is mended in every context of the session: the calls after it are live, and count."""
    with sides(server, replicas=1) as (live, plain):
        messages: list[Any] = [{"role": "user", "content": "Read it."}]
        call = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
        for side in (live, plain):
            side.model.script("repaired", ScriptedReply(message={"content": None, "tool_calls": [call]}))
        for question in ("Never mind. What is left?", "And then?", "And at last?", ""):
            body = {"model": MODEL, "messages": messages, "tools": [TOOL], "user": "repaired"}
            (answer, other) = (side.post(PATHS["openai_chat"], json=body) for side in (live, plain))
            for name in ("x-tersely-tokens-before", "x-tersely-tokens-after"):
                assert answer.headers[name] == other.headers[name]
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": question}]
        ours, theirs = ([each.body for each in side.model.state.received] for side in (live, plain))
        assert ours == theirs
        assert b"no result was recorded" in ours[-1]
        assert live.hits()["hit"] == 2
        repairs = ("tersely_pairing_repairs_total{", "tersely_tokens_after_sum")
        counts = [
            {
                line
                for line in side.http.get(f"{side.services[0].url}/metrics").text.splitlines()
                if line.startswith(repairs)
            }
            for side in (live, plain)
        ]
        assert counts[0] == counts[1]
        assert 'tersely_pairing_repairs_total{kind="missing_result"} 3.0' in counts[0]


def test_a_context_with_a_summary_in_front_of_a_question_stays_live(server: Server) -> None:
    """`trim` puts it there at each cut. Only the steps of the running turn count up to its limit."""
    strategy = '{"name": "trim", "max_context_turns": 4, "max_steps": 5}'
    with sides(server, strategy=strategy, epoch="auto") as (live, plain):
        messages: list[Any] = []
        for turn, steps in enumerate([2] * 11 + [7]):
            messages.append({"role": "user", "content": f"Question {turn}: what does file_{turn}.py do?"})
            for step in range(steps):
                call = {
                    "id": f"{turn}-{step}",
                    "type": "function",
                    "function": {"name": "read_file", "arguments": "{}"},
                }
                is_last = step == steps - 1
                said = {"content": f"Table {turn}."} if is_last else {"content": None, "tool_calls": [call]}
                for side in (live, plain):
                    side.model.script("summary", ScriptedReply(message=said))
                body = {"model": MODEL, "messages": messages, "tools": [TOOL], "user": "summary"}
                answer, other = (side.post(PATHS["openai_chat"], json=body) for side in (live, plain))
                for name in ("x-tersely-tokens-before", "x-tersely-tokens-after"):
                    assert answer.headers[name] == other.headers[name]
                messages.append(answer.json()["choices"][0]["message"])
                if not is_last:
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"{turn} {step}"})
        ours, theirs = ([each.body for each in side.model.state.received] for side in (live, plain))
        assert ours == theirs
        assert all(b"[End of the summary]" in body for body in ours[8:])
        assert [b"5 tool steps have been taken" in body for body in ours[-3:]] == [False, True, True]
        # A new epoch at every cut; at the limit a request to answer ends the context.
        hits = live.hits()
        assert [hits[name] for name in ("hit", "epoch", "messages", "unknown")] == [22, 4, 1, 2]


@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic"])
def test_an_epoch_starts_without_the_history_before_its_cut(
    server: Server, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    """A call at which an epoch starts continues its live session: its body is not read whole, and the next is live."""
    monkeypatch.setattr("tersely.composition.application.clock", Clock())
    read: list[int] = []
    read_whole = SessionMatcher.read_whole

    def count(self: SessionMatcher, call: Call) -> Any:
        read.append(len(call.body))
        return read_whole(self, call)

    monkeypatch.setattr(SessionMatcher, "read_whole", count)
    tool = TOOL if dialect == "openai_chat" else {"name": "read_file", "input_schema": {"type": "object"}}
    counts, calls = [], 40
    with sides(server, strategy="slim", epoch='{"high": 1500, "low": 600}') as both:
        for side in both:
            draw = random.Random(dialect)
            messages: list[dict[str, Any]] = []
            for number in range(calls):
                words = {"type": "text", "text": f"{number}: src/mod_{number}.py {text(draw, 40)}"}
                if dialect == "anthropic":
                    for message in messages[-2:]:
                        message["content"][-1].pop("cache_control", None)
                    words["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
                messages.append({"role": "user", "content": [words]})
                body = {"model": MODEL, "messages": messages, "tools": [tool], "max_tokens": 400}
                if dialect == "openai_chat":
                    body["messages"] = [{"role": "system", "content": "Be brief."}, *messages]
                else:
                    body["system"] = "Be brief."
                answer = side.post(PATHS[dialect], json=body)
                assert answer.status_code == 200
                said = answer.json()
                said = said["content"] if dialect == "anthropic" else said["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": said})
            counts.append(len(read))
            read.clear()
        ours, theirs = ([each.body for each in side.model.state.received] for side in both)
        assert ours == theirs
        ours, theirs = (asyncio.run(stored(side.services[0].database)) for side in both)
        assert ours == theirs
        hits = both[0].hits()
    assert hits["epoch"] >= 4
    assert hits["hit"] == calls - hits["epoch"] - hits["unknown"]
    # Only calls without a live session are read whole.
    assert counts == [hits["unknown"], calls]


@pytest.mark.parametrize("leading", [[], [{"role": "system", "content": "Be brief."}]])
def test_an_epoch_start_that_is_decided_again_is_described_as_it_was_sent(server: Server, leading: list[Any]) -> None:
    """Another replica answers another question behind the same history while the model works."""
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        settings: dict[str, Any] = {"strategy": "slim", "epoch": '{"high": 1500, "low": 600}', "instructions": "off"}
        one, other = (stack.enter_context(serve(database, model.url, live_sessions="64", **settings)) for _ in range(2))
        http = stack.enter_context(httpx.Client(timeout=60))
        draw, messages, tokens, epoch = random.Random(1), list(leading), 0, ""
        for number in range(40):
            messages.append({"role": "user", "content": f"{number} {text(draw, 60)}"})
            answer = _send(http, one, messages, user="beside")
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            tokens, epoch = int(answer.headers["x-tersely-tokens-after"]), answer.headers["x-tersely-epoch"]
            if number > 20 and tokens > 1000:
                break
        slow, quick = ({"role": "user", "content": words} for words in (f"slow {text(draw, 700)}", "quick"))
        model.script("beside", ScriptedReply(message={"content": "At last."}, first_delay=1.0))
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(_send, http, one, [*messages, slow], user="beside")
            time.sleep(0.4)
            assert _send(http, other, [*messages, quick], user="beside").status_code == 200
            answered = asking.result()
        assert answered.headers["x-tersely-epoch"] != epoch
        (sent,) = [json.loads(each.body) for each in model.state.received if b'"slow ' in each.body]
        calls = f"{one.url}/api/sessions/{answered.headers['x-tersely-session']}/calls"
        newest = max(each["number"] for each in http.get(calls, params={"limit": 1000}).json()["items"])
        shown = http.get(f"{calls}/{newest}/context").json()
        assert shown["exact"], shown["reason"]
        assert shown["messages"] == sent["messages"]


def test_memory_is_reserved_before_a_live_call_is_read_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of large bodies are counted where they are parsed: at a first call, and after an overflow."""
    done: list[str] = []
    read_whole, grow_to_objects = SessionMatcher.read_whole, BodyReservation.grow_to_objects

    def read(self: SessionMatcher, call: Call) -> Any:
        done.append("read")
        return read_whole(self, call)

    async def reserve(self: BodyReservation, body: bytes, *, may_refuse: bool = True) -> None:
        done.append("reserve" if may_refuse else "reserve in any case")
        await grow_to_objects(self, body, may_refuse=may_refuse)

    monkeypatch.setattr(SessionMatcher, "read_whole", read)
    monkeypatch.setattr(BodyReservation, "grow_to_objects", reserve)
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        service = stack.enter_context(
            serve(database, model.url, live_sessions="64", strategy="slim", epoch=FROM_THE_START)
        )
        http = stack.enter_context(httpx.Client(timeout=60))
        part = {"type": "text", "text": "word"}
        messages: list[Any] = [{"role": "user", "content": [part] * 15_000} for _ in range(4)]
        for number in range(3):
            if number == 2:
                refusal = {
                    "error": {
                        "message": "too long",
                        "type": "invalid_request_error",
                        "param": "messages",
                        "code": "context_length_exceeded",
                    }
                }
                model.script("reserved", ScriptedReply(status=400, body=json.dumps(refusal).encode()))
            answer = _send(http, service, messages, user="reserved")
            assert answer.status_code == 200, answer.text
            done.append("answered")
            messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": f"And {number}?"}]
    assert done == ["reserve", "read", "answered", "answered", "reserve in any case", "read", "answered"]


def test_live_session_ends_when_a_call_of_the_full_path_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed question is stored: the next call leaves it behind, which is an edit."""
    monkeypatch.setattr("tersely.composition.application.clock", Clock())
    with sides(server) as both:
        found = []
        for side in both:
            messages: list[Any] = []
            shown = []
            side.model.script("fails", *[ScriptedReply(message={"content": f"answer {n}"}) for n in range(3)])
            side.model.script("fails", ScriptedReply(status=400, body=b'{"error":{"message":"No."}}'))
            for number, headers in enumerate(({}, {}, {}, {"x-tersely-epoch": '{"stride": 9}'}, {}, {})):
                messages.append({"role": "user", "content": f"question {number}"})
                body = {"model": MODEL, "messages": messages, "user": "fails"}
                answer = side.post("/v1/chat/completions", json=body, headers=headers)
                shown.append((answer.status_code, answer.headers.get("x-tersely-epoch")))
                if answer.status_code == 200:
                    reply = answer.json()["choices"][0]["message"]["content"]
                    messages.append({"role": "assistant", "content": reply})
                else:
                    messages.pop()
            found.append((shown, [each.body for each in side.model.state.received]))
        assert found[0] == found[1]
        assert both[0].hits()["hit"] >= 1
        ours, theirs = (asyncio.run(stored(side.services[0].database)) for side in both)
        assert ours == theirs


@pytest.mark.parametrize("dialect", GEMINI)
def test_a_result_that_a_delta_brings_keeps_its_bytes(server: Server, dialect: str) -> None:
    """It is written as its client wrote it at every call of the epoch, with live sessions and without."""
    call = {"functionCall": {"name": "read_file", "args": {}}}
    result = {"functionResponse": {"name": "read_file", "response": {"output": "one line"}}}
    words = [
        {"text": "Where is the harbour?"},
        {"text": "Read it."},
        result,
        {"text": "And now?"},
        {"text": "And then?"},
    ]
    with sides(server) as both:
        for side in both:
            replies = [{"text": "It is there."}, call, {"text": "I read it."}, {"text": "No."}, {"text": "No more."}]
            side.model.script("delta", *[ScriptedReply(message={"parts": [part]}) for part in replies])
            for part in words:
                contents = {"contents": [{"role": "user", "parts": [part]}]}
                sent = {"model": MODEL, "request": contents} if dialect == "gemini_gca" else contents
                headers = {"x-tersely-session": "delta", "x-script": "delta", "content-type": "application/json"}
                path = f"{GEMINI[dialect]}:generateContent"
                assert side.post(path, content=json.dumps(sent), headers=headers).status_code == 200
        ours, theirs = ([each.body for each in side.model.state.received] for side in both)
        assert ours == theirs
        written = json.dumps({"role": "user", "parts": [result]}).encode()
        assert [body.count(written) for body in ours] == [0, 0, 1, 1, 1]
        assert both[0].hits()["hit"] >= 1


def test_live_sessions_keep_to_their_budget(server: Server) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(scripted())
        database = stack.enter_context(new_database(server))
        service = stack.enter_context(serve(database, model.url, live_sessions="1"))
        http = stack.enter_context(httpx.Client(timeout=60))
        for number in range(12):
            _send(http, service, [{"role": "user", "content": f"{number} " + "words " * 3_000}])
        sizes = [line for line in http.get(f"{service.url}/metrics").text.splitlines() if "live_session_bytes " in line]
    assert 0 < max(float(line.rpartition(" ")[2]) for line in sizes if not line.startswith("#")) <= 2**20


@pytest.mark.parametrize("value", ["on", "-1", "1.5", "99999999"])
def test_live_sessions_setting_is_off_or_a_size(value: str) -> None:
    with pytest.raises(ValidationError, match="must be off, or a number of MiB"):
        Settings(_env_file=None, live_sessions=value)
