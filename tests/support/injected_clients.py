"""Clients that inject blocks into their messages, as far as a test needs them: first requests, and how each goes on.

The shapes are those of recorded clients; the words are the project's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import httpx

from tersely.domain.history.chain import INJECTED_BLOCKS, INJECTED_MESSAGES, split_injected
from tersely.fakellm.scripted import ScriptedReply
from tests.support.services import Service
from tests.support.upstreams import Model

MODEL = "m-1"
RULES = "Always run the linter. " * 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A dialect's form of a conversation: its path, the member that holds the messages, and their shapes.

    ``usage`` writes how many tokens a host counted, those of the prompt and those of the reply.
    """

    path: str
    member: str
    user: Callable[[str], dict[str, Any]]
    replied: Callable[[dict[str, Any]], list[dict[str, Any]]]
    reply: Callable[[str], dict[str, Any]]
    usage: Callable[[int, int], dict[str, int]]
    body: Mapping[str, Any] = field(default_factory=dict)


def _usage(prompt: str, reply: str, total: str = "") -> Callable[[int, int], dict[str, int]]:
    def write(read: int, written: int) -> dict[str, int]:
        return {prompt: read, reply: written} | ({total: read + written} if total else {})

    return write


_GEMINI_USAGE = _usage("promptTokenCount", "candidatesTokenCount", "totalTokenCount")
WIRES: Mapping[str, Wire] = {
    "openai_chat": Wire(
        usage=_usage("prompt_tokens", "completion_tokens", "total_tokens"),
        path="/v1/chat/completions",
        member="messages",
        user=lambda text: {"role": "user", "content": text},
        replied=lambda body: [body["choices"][0]["message"]],
        reply=lambda text: {"role": "assistant", "content": text},
        body={"model": MODEL},
    ),
    "openai_responses": Wire(
        usage=_usage("input_tokens", "output_tokens", "total_tokens"),
        path="/v1/responses",
        member="input",
        user=lambda text: {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
        replied=lambda body: body["output"],
        reply=lambda text: {
            "output": [
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
            ]
        },
        body={"model": MODEL, "store": False},
    ),
    "anthropic": Wire(
        usage=_usage("input_tokens", "output_tokens"),
        path="/v1/messages",
        member="messages",
        user=lambda text: {"role": "user", "content": [{"type": "text", "text": text}]},
        replied=lambda body: [{"role": "assistant", "content": body["content"]}],
        reply=lambda text: {"content": [{"type": "text", "text": text}]},
        body={"model": MODEL, "max_tokens": 512},
    ),
    "gemini": Wire(
        usage=_GEMINI_USAGE,
        path=f"/v1beta/models/{MODEL}:generateContent",
        member="contents",
        user=lambda text: {"role": "user", "parts": [{"text": text}]},
        replied=lambda body: [body["candidates"][0]["content"]],
        reply=lambda text: {"parts": [{"text": text}]},
    ),
    "gemini_gca": Wire(
        usage=_GEMINI_USAGE,
        path="/v1internal:generateContent",
        member="contents",
        user=lambda text: {"role": "user", "parts": [{"text": text}]},
        replied=lambda body: [body["response"]["candidates"][0]["content"]],
        reply=lambda text: {"parts": [{"text": text}]},
    ),
}


def reminder(text: str) -> str:
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _claude_code() -> dict[str, Any]:
    """CLAUDE.md, agents and skills are parts of the first message, and instructions stand inside the history."""
    context = "As you answer the user's questions, you can use the following context:\n# claudeMd\n" + RULES
    parts = [
        reminder("The following skills are available for use with the Skill tool:\n- review: Reviews code."),
        reminder("The following deferred tools are now available via ToolSearch:\nWebFetch"),
        reminder(context) + "\n\n",
        "What is this project?",
    ]
    return {
        "system": [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {
                "role": "user",
                "content": [
                    *({"type": "text", "text": part} for part in parts),
                    {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
                ],
            },
            {"role": "system", "content": "Available agent types for the Agent tool:\n- explore: Searches."},
        ],
    }


def _codex() -> dict[str, Any]:
    """Environment and AGENTS.md are items of their own; developer text stands around them."""

    def item(role: str, *texts: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text} for text in texts]}

    return {
        "input": [
            item("developer", "You are a coding agent."),
            item("user", "<environment_context>\n  <cwd>/work/project</cwd>\n</environment_context>"),
            item("user", f"# AGENTS.md instructions for /work/project\n\n<INSTRUCTIONS>\n{RULES}\n</INSTRUCTIONS>"),
            item("developer", "<collaboration_mode>Default mode.</collaboration_mode>"),
            item("user", "What is this project?"),
        ]
    }


def _gemini_contents() -> dict[str, Any]:
    """GEMINI.md stands in the session context, in the message of the first question."""
    context = (
        f"<session_context>\nThis is the Gemini CLI.\n<loaded_context>{RULES}</loaded_context>\n</session_context>"
    )
    return {
        "systemInstruction": {"parts": [{"text": "You are a coding agent."}]},
        "contents": [{"role": "user", "parts": [{"text": context}, {"text": "What is this project?"}]}],
    }


def _gemini() -> dict[str, Any]:
    return _gemini_contents()


def _code_assist() -> dict[str, Any]:
    return {"model": MODEL, "project": "p", "request": _gemini_contents()}


def _qwen_code() -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "user", "content": f"This is the Qwen Code. We are setting up the context for our chat.\n{RULES}"},
            {"role": "assistant", "content": "Got it. Thanks for the context!"},
            {"role": "user", "content": "What is this project?"},
        ]
    }


def _cline() -> dict[str, Any]:
    """Blocks before and behind the words of one string."""
    text = (
        f"<user_instructions>\n{RULES}\n</user_instructions>\n\nWhat is this project?\n"
        "<environment_details>\n# Current Mode\nACT MODE\n</environment_details>"
    )
    return {"messages": [{"role": "system", "content": "You are an agent."}, {"role": "user", "content": text}]}


def _memory_framework() -> dict[str, Any]:
    """A second system message behind the first question, as memories of frameworks write it."""
    return {
        "messages": [
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": "What is this project?"},
            {"role": "system", "content": "The user prefers metric units."},
        ]
    }


FIRST_REQUESTS: Mapping[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "claude-code": ("anthropic", _claude_code),
    "codex": ("openai_responses", _codex),
    "gemini-cli": ("gemini", _gemini),
    "code-assist": ("gemini_gca", _code_assist),
    "qwen-code": ("openai_chat", _qwen_code),
    "cline": ("openai_chat", _cline),
    "memory-framework": ("openai_chat", _memory_framework),
}


def first_request(dialect: str, *messages: Mapping[str, Any]) -> dict[str, Any]:
    """A request of ``messages`` and nothing else."""
    body = {WIRES[dialect].member: list(messages)}
    return {"model": MODEL, "project": "p", "request": body} if dialect == "gemini_gca" else body


class Markers:
    """Puts a word of its own into each injected block and each instruction that stands inside a history."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.words: list[str] = []

    def mark(self, body: dict[str, Any], dialect: str) -> dict[str, Any]:
        """Return a copy of ``body`` with its markers."""
        marked = deepcopy(body)
        for place, message in enumerate(_holder(marked, dialect)[WIRES[dialect].member]):
            kind = message.get("role")
            is_instruction = kind in {"system", "developer"} and place > 0
            for holder, name in _texts(message):
                holder[name] = self._mark_text(holder[name], is_instruction=is_instruction)
        return marked

    def count(self, body: dict[str, Any], dialect: str) -> int:
        """Return how many markers ``body`` has room for."""
        self.mark(body, dialect)
        return len(self.words)

    def _mark_text(self, text: str, *, is_instruction: bool) -> str:
        if is_instruction:
            return f"{text}\n{self._new()}"
        for block in split_injected(text)[1]:
            closings = [each.closing for each in (*INJECTED_BLOCKS, *INJECTED_MESSAGES) if each.opening in block.text]
            closing = next((each for each in closings if each and block.text.endswith(each)), "")
            inside = block.text.removesuffix(closing)
            text = text.replace(block.text, f"{inside}\n{self._new()}{closing}")
        return text

    def _new(self) -> str:
        self.words.append(f"{self._key}-rule-{len(self.words)}-end")
        return self.words[-1]


def _texts(message: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for name in ("content", "parts"):
        value = message.get(name)
        if isinstance(value, str):
            yield message, name
        for part in value if isinstance(value, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part, "text"


def _holder(body: dict[str, Any], dialect: str) -> dict[str, Any]:
    return body["request"] if dialect == "gemini_gca" else body


class InjectingClient:
    """A client that resends its whole history, blocks and all, through a service."""

    def __init__(
        self,
        service: Service,
        model: Model,
        key: str,
        dialect: str,
        first: Mapping[str, Any],
        *,
        headers: Mapping[str, str],
        http: httpx.Client,
        streams: bool = False,
    ) -> None:
        self.streams = streams
        self.wire = WIRES[dialect]
        self.dialect = dialect
        self.body = {**self.wire.body, **deepcopy(dict(first))}
        self.session = ""
        self.epoch = ""
        self.service, self._model, self._key = service, model, key
        self._headers = {
            "content-type": "application/json",
            "authorization": "Bearer k",
            "X-Script": key,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        self._calls = 0
        self._http = http

    @property
    def history(self) -> list[dict[str, Any]]:
        """The messages of the next request."""
        history: list[dict[str, Any]] = _holder(self.body, self.dialect)[self.wire.member]
        return history

    def ask(
        self, *messages: Mapping[str, Any], usage: Mapping[str, int] | None = None, **headers: str
    ) -> httpx.Response:
        """Send the history with ``messages`` at its end, and keep the reply. ``usage``: what the host counts."""
        self.history.extend(dict(message) for message in messages)
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        self._calls += 1
        text = f"Answer {self._calls} of {self._key}: " + "done " * 40
        self._model.script(self._key, ScriptedReply(message=self.wire.reply(text), usage=usage))
        path, body = self.wire.path, self.body
        if self.streams and self.wire.member == "contents":
            path = path.replace(":generateContent", ":streamGenerateContent") + "?alt=sse"
        elif self.streams:
            body = {**body, "stream": True}
        answer = self._http.post(self.service.url + path, content=json.dumps(body), headers={**self._headers, **more})
        assert answer.status_code == 200, answer.text
        self.session = answer.headers["x-tersely-session"]
        self.epoch = answer.headers.get("x-tersely-epoch", "")
        if self.streams:
            assert answer.headers["content-type"].startswith("text/event-stream")
            self.history.append(self._spoken(text))
        else:
            self.history.extend(self.wire.replied(answer.json()))
        return answer

    def _spoken(self, text: str) -> dict[str, Any]:
        """The message that a client puts together from a stream."""
        if self.wire.member == "contents":
            return {"role": "model", "parts": [{"text": text}]}
        if self.wire.member == "input":
            return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        return {"role": "assistant", "content": text}

    def say(self, text: str, **headers: str) -> httpx.Response:
        """One more turn."""
        return self.ask(self.wire.user(text), usage=None, **headers)


def question(number: int, words: int = 90) -> str:
    """Return a user's words in a turn: enough to fill a context, different in each turn."""
    return f"Turn {number}: " + " ".join(f"part{number}x{place}" for place in range(words))


def count_each(markers: Sequence[str], body: bytes) -> dict[str, int]:
    """Return how often each marker stands in a request."""
    return {marker: body.count(marker.encode()) for marker in markers}
