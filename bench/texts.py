"""Deterministic conversations: what the clients say, what the model answers, and how each can be checked.

A user message carries a marker, `[q:<16 hex digits>]`. The model's answer is a pure function of that marker,
so the client knows what it must get back, an answer that went to the wrong connection is noticed, and every
server that is measured sees the same sequence of requests. Texts are plain ASCII without quotes, backslashes
or line breaks, so they can be put between JSON quotes as they are.
"""

import random
from hashlib import blake2b
from typing import Final, NamedTuple

MARK_DIGITS: Final = 16
QUESTION: Final = b"[q:"
ANSWER: Final = b"[a:"
EVENTS_OF_TEXT: Final = 48
"""Streaming: text events of one reply; with role, finish and [DONE] about fifty events."""
REPLY_BYTES: Final = 600
"""Length of one answer's text in bytes."""
VARIANTS: Final = 16
"""Different answer texts, chosen by the marker's last digit."""
POOL_BYTES: Final = 1_000_000

_WORDS: Final = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "and",
    "that",
    "for",
    "with",
    "on",
    "is",
    "it",
    "this",
    "by",
    "from",
    "as",
    "at",
    "or",
    "not",
    "be",
    "are",
    "can",
    "was",
    "will",
    "more",
    "when",
    "there",
    "file",
    "test",
    "error",
    "value",
    "result",
    "server",
    "client",
    "table",
    "index",
    "query",
    "cache",
    "token",
    "session",
    "message",
    "request",
    "answer",
    "config",
    "default",
    "option",
    "version",
    "branch",
    "commit",
    "change",
    "review",
    "deploy",
    "build",
    "release",
    "schema",
    "column",
    "record",
    "path",
    "open",
    "close",
    "read",
    "write",
    "start",
    "stop",
    "check",
    "find",
    "move",
    "copy",
    "keep",
    "drop",
    "merge",
    "split",
    "parse",
    "render",
    "count",
    "store",
    "load",
    "first",
    "second",
    "last",
    "next",
    "small",
    "large",
    "short",
    "long",
    "early",
    "late",
    "empty",
    "whole",
    "broken",
    "correct",
    "missing",
    "plain",
    "stable",
    "please",
    "now",
    "then",
    "here",
    "again",
    "still",
    "only",
    "also",
    "after",
    "before",
    "because",
    "while",
    "instead",
    "without",
    "between",
    "under",
    "invoice",
    "order",
    "customer",
    "payment",
    "address",
    "report",
    "summary",
    "window",
    "button",
    "page",
    "style",
    "colour",
    "palette",
    "layout",
    "app/tersely/main.py",
    "tests/test_store.py",
    "src/index.ts",
    "README.md",
    "user_id",
    "order_total",
    "retry_after",
    "max_tokens",
]


class Shape(NamedTuple):
    """The shape of the conversations of one body size."""

    name: str
    history_messages: int
    """Messages the client already holds when the conversation reaches the server."""
    history_bytes: int
    """Bytes of those messages together."""
    turns: int
    """Requests before the client begins another conversation."""
    question_bytes: int
    tools: int = 0
    """Tools that the client offers, of about a kilobyte each."""


SHAPES: Final = {
    shape.name: shape
    for shape in (
        # From the first message: 1, 3, ... 11 messages, six on average, about 4 KB with the system text.
        Shape("4k", 0, 0, 6, 560),
        # An agent that is far into its work: about 120 messages and 200 KB.
        Shape("200k", 108, 186_000, 12, 560),
        # The first request of such a history alone: everything in it is new to the server.
        Shape("200k-first", 120, 194_000, 1, 560),
        # The same history for long: what a request costs when the server knows all but the newest.
        Shape("200k-later", 108, 170_000, 60, 200),
        # For `bench.grid`: conversations without end, and such of one call.
        *(
            Shape(f"{name}{ending}", messages, size, turns, 300, tools)
            for ending, turns in (("", 10**6), ("-new", 1))
            for name, messages, size, tools in (
                ("grid4k", 6, 2_500, 0),
                ("grid42k", 24, 30_000, 10),
                ("grid121k", 60, 98_000, 20),
                ("grid221k", 110, 198_000, 20),
            )
        ),
        # What a call costs that adds two messages to a conversation: for `bench.growth`, which takes the difference
        # between long and short runs.
        *(
            Shape(f"{name}-{turns}", messages, size, turns, 300, tools)
            for turns in (4, 34)
            for name, messages, size, tools in (
                ("grow4k", 6, 2_500, 0),
                ("agent42k", 24, 30_000, 10),
                ("agent121k", 60, 98_000, 20),
                ("agent221k", 110, 198_000, 20),
            )
        ),
    )
}

SYSTEM: Final = (
    b"You are a careful engineer who helps with a code base. Answer briefly, name the files you mean, say what "
    b"you are unsure of, and do not repeat what was said before. Prefer small changes that can be checked."
)


def _prose(seed: int, size: int) -> bytes:
    """`size` bytes of words, the same for the same seed."""
    rng = random.Random(seed)
    words = rng.choices(_WORDS, k=size // 3)
    return " ".join(words).encode()[:size].replace(b'"', b" ")


POOL: Final = _prose(1, POOL_BYTES)
_FILLERS: Final = tuple(_prose(100 + n, REPLY_BYTES - MARK_DIGITS - 5) for n in range(VARIANTS))


def mark(*keys: object) -> bytes:
    """A marker of 16 hex digits from whatever names the request."""
    return blake2b(repr(keys).encode(), digest_size=MARK_DIGITS // 2).hexdigest().encode()


def passage(key: bytes, size: int) -> bytes:
    """`size` bytes of prose chosen by a marker."""
    start = int(key, 16) % (POOL_BYTES - size)
    return POOL[start : start + size]


def tools(count: int) -> bytes:
    """The definitions of so many tools, as a member of a request."""
    made = (
        b'{"type":"function","function":{"name":"tool_%d","description":"%s","parameters":{"type":"object",'
        b'"properties":{"path":{"type":"string","description":"%s"}},"required":["path"]}}}'
        % (n, passage(mark("tool", n), 600), passage(mark("path", n), 260))
        for n in range(count)
    )
    return b'"tools":[' + b",".join(made) + b"]" if count else b""


def anthropic_tools(count: int) -> bytes:
    """The same tools in Anthropic's format."""
    made = (
        b'{"name":"tool_%d","description":"%s","input_schema":{"type":"object",'
        b'"properties":{"path":{"type":"string","description":"%s"}},"required":["path"]}}'
        % (n, passage(mark("tool", n), 600), passage(mark("path", n), 260))
        for n in range(count)
    )
    return b'"tools":[' + b",".join(made) + b"]" if count else b""


def question(key: bytes, size: int) -> bytes:
    """A user message of about `size` bytes that carries its marker."""
    return QUESTION + key + b"] " + passage(key, size)


def answer(key: bytes) -> bytes:
    """The model's answer to the question with this marker."""
    return ANSWER + key + b"] " + _FILLERS[int(key[-1:], 16) % VARIANTS].rstrip()


def terse_line(key: bytes) -> bytes:
    """The summary that a model appends when it was asked for one."""
    return b"<terse>answered " + key + b"</terse>"


def responses_tools(count: int) -> bytes:
    """The same tools in the format of OpenAI's responses."""
    return (
        tools(count)
        .replace(b'"function":{"name"', b'"name"')
        .replace(b'"required":["path"]}}}', b'"required":["path"]}}')
    )
