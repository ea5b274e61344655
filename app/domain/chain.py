"""A history's identity: a hash chain over the canonical form of its messages, and anchors where a chain breaks.

Clients re-serialise arguments, turn strings into lists, move ``cache_control``, drop signatures and refresh
what they inject (dates, listings, reminders) between one request and the next. ``canonical`` keeps what
survives all of that in 20 recorded clients (DESIGN.md, "Two views of one history"): role and text; call id,
name and parsed arguments; call id and result text; media by digest. Everything else is no part of a
message's identity.

The quirks of clients are data: ``INJECTED_BLOCKS``, ``INJECTED_MESSAGES`` and ``SUMMARY_FRAMES``, the
client beside each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from app.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult

DIGEST_BYTES = 16
MIN_SUMMARY = 20
"""Shorter texts ("OK", "Done.") are said too often to tell anything by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delimited:
    """Text between two marks, as ``client`` writes it. An empty ``closing`` means: to the end."""

    client: str
    opening: str
    closing: str = ""


def _tag(client: str, name: str) -> Delimited:
    return Delimited(client=client, opening=f"<{name}>", closing=f"</{name}>")


INJECTED_BLOCKS = (
    _tag("Claude Code", "system-reminder"),
    _tag("Claude Code", "local-command-caveat"),
    _tag("Claude Code", "local-command-stdout"),
    _tag("Codex", "environment_context"),
    _tag("Codex (older)", "user_instructions"),
    _tag("Gemini CLI", "session_context"),
    _tag("Copilot CLI", "current_datetime"),
    _tag("Cline and Roo Code in editors", "environment_details"),
)
"""Cut out of a user's text wherever they stand whole; what they say is rebuilt at each start or turn."""

INJECTED_MESSAGES = (
    Delimited(client="Codex", opening="# AGENTS.md instructions for ", closing="</INSTRUCTIONS>"),
    Delimited(client="Qwen Code", opening="This is the Qwen Code. We are setting up the context for our chat."),
    Delimited(
        client="Gemini CLI (older)", opening="This is the Gemini CLI. We are setting up the context for our chat."
    ),
)
"""A text part that begins and ends so is injected as a whole."""

SUMMARY_FRAMES = (
    Delimited(
        client="Claude Code",
        opening="\n\nSummary:\n",
        closing="\n\nIf you need specific details from before compaction",
    ),
    Delimited(client="Claude Code (older)", opening="\n\nSummary:\n", closing="\n\nPlease continue the conversation"),
    Delimited(
        client="Codex",
        opening="use the information in this summary to assist with your own analysis:\n",
    ),
    Delimited(client="Cline", opening="Context summary:\n", closing="\n\n## Files\nRead:\n"),
    Delimited(client="LangChain", opening="Here is a summary of the conversation to date:\n"),
    Delimited(
        client="pi", opening="The conversation history before this point was compacted into the following summary:\n"
    ),
    Delimited(client="aider", opening="I spoke to you previously about a number of things.\n"),
    Delimited(
        client="aider, in the summary of a summary",
        opening="# USER\nI spoke to you previously about a number of things.\n",
    ),
    Delimited(client="generic", opening="Summary:\n"),
    _tag("pi, Copilot CLI, Claude Code's own reply", "summary"),
    _tag("Gemini CLI, Qwen Code", "state_snapshot"),
)
"""How a client wraps the reply of its own compaction call when it goes on from it."""

_MAX_FRAME_OFFSET = 20_000
"""Copilot CLI repeats the user's messages in front of the summary; further in, a frame is not looked for."""

_BLOCK_PATTERNS = tuple(
    (block.opening, re.compile(re.escape(block.opening) + ".*?" + re.escape(block.closing), re.DOTALL))
    for block in INJECTED_BLOCKS
)
_OPENINGS = tuple(each.opening for each in INJECTED_MESSAGES)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted").encode


def canonical(message: Message) -> bytes:
    """The identity of a message, or ``b""`` when it is no link of the chain.

    No links are instructions (system, developer) and user messages that carry nothing but injected context.
    Equal are: a string and a list of one text; null, "" and no content; ``1`` and ``1.0`` in arguments; any
    order of their keys; arguments "" and "{}". Arguments that are no JSON count as text. Texts are trimmed
    at their ends. A refusal counts where it is all that was said: beside anything else clients drop it.
    """
    role = message.role
    if role in {"system", "developer"}:
        return b""
    texts: list[str] = []
    others: list[str] = []
    refusals: list[str] = []
    is_injected = False
    for part in message.parts:
        if isinstance(part, Text):
            text = part.text
            if role != "assistant":  # a reminder may stand beside results as well
                own = without_injected(text)
                is_injected = is_injected or own is not text
                text = own
            if text := text.strip():
                (refusals if part.is_refusal else texts).append(text)
        elif not isinstance(part, Reasoning):
            other = _canonical_part(part)
            if other not in others:  # Gemini CLI repeats a result when it resumes
                others.append(other)
    if is_injected and not texts and not others:
        return b""
    said = texts if texts or others else refusals
    return _encode_text("".join((role, "\n", _sized("\n".join(said)), *others)))


def without_injected(text: str) -> str:
    """``text`` without what a client put into it; the very same object when there is nothing of that kind."""
    if "<" in text:
        for opening, pattern in _BLOCK_PATTERNS:
            if opening in text:
                cut = pattern.sub("", text)
                if cut != text:
                    text = cut
    return "" if _is_injected_whole(text) else text


def _is_injected_whole(text: str) -> bool:
    if not text[:100].lstrip().startswith(_OPENINGS):
        return False
    text = text.strip()
    return any(text.startswith(each.opening) and text.endswith(each.closing) for each in INJECTED_MESSAGES)


def link(previous: bytes, message: Message) -> bytes:
    """The value of a chain that stood at ``previous`` (``b""``: its beginning) after ``message``: 16 bytes.

    A message that is no link leaves the value as it is.
    """
    identity = canonical(message)
    return blake2b(previous + identity, digest_size=DIGEST_BYTES).digest() if identity else previous


def chain(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """The value after each message; where that is no link, the one before it again (``b""`` at the
    beginning).
    """
    values: list[bytes] = []
    value = b""
    for message in messages:
        value = link(value, message)
        values.append(value)
    return tuple(values)


def summary_anchors(message: Message) -> tuple[bytes, ...]:
    """Hashes by which the reply of a client's own compaction call is known again in a later request.

    The anchors of the reply and those of a later message (of any role) meet in at least one when the client
    went on from that reply: the whole text, and what stands inside one of ``SUMMARY_FRAMES``. Texts under
    ``MIN_SUMMARY`` characters give none.
    """
    text = message.text.strip()
    found = dict.fromkeys([text, *filter(None, (_framed(text, frame) for frame in SUMMARY_FRAMES))])
    return tuple(_hash("summary\n" + each) for each in found if len(each) >= MIN_SUMMARY)


def _framed(text: str, frame: Delimited) -> str:
    start = text.find(frame.opening, 0, _MAX_FRAME_OFFSET)
    if start < 0:
        return ""
    start += len(frame.opening)
    end = text.rfind(frame.closing, start) if frame.closing else len(text)
    return text[start:end].strip() if end >= 0 else ""


def _canonical_part(part: ToolCall | ToolResult | Media) -> str:
    if isinstance(part, ToolCall):
        return f"c{_sized(part.id)}{_sized(part.name)}{_sized(canonical_arguments(part.arguments))}"
    if isinstance(part, ToolResult):
        return f"r{_sized(part.call_id)}{_sized(part.text.strip())}"
    return f"m{part.kind}{_sized(part.digest)}"


def canonical_arguments(arguments: str) -> str:
    """Arguments with sorted keys and no blanks, whole floats as integers; trimmed text when they are no
    JSON.
    """
    text = arguments.strip()
    if not text:
        return "{}"
    try:
        return _encode(_whole_floats(_decode(text))).decode()
    except (ValueError, OverflowError, RecursionError):  # msgspec's errors are ValueErrors
        return _canonical_slowly(text)


def _canonical_slowly(text: str) -> str:
    """For lone surrogates and integers beyond 64 bits, which msgspec refuses to read or to write."""
    try:
        return json.dumps(_whole_floats(json.loads(text)), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def _whole_floats(value: object) -> object:
    kind = type(value)
    if kind is str or kind is int:
        return value
    if isinstance(value, dict):
        return {key: _whole_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole_floats(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sized(text: str) -> str:
    """Each text says how long it is, so that no two different messages have one form."""
    return f"{len(text)}:{text}"


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _hash(text: str) -> bytes:
    return blake2b(_encode_text(text), digest_size=DIGEST_BYTES).digest()
