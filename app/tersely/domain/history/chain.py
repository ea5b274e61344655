"""The identity of a history: a hash chain over the canonical form of its messages, and anchors where a chain breaks.

Between two requests clients re-serialise arguments, turn strings into lists, move ``cache_control``, drop signatures
and refresh what they inject (dates, listings, reminders). ``canonical`` keeps what stays the same in 20 recorded
clients (docs/decisions.md): role and text; call id, name and parsed arguments; call id and result text; media by
digest. Nothing else is part of a message's identity.

The peculiarities of clients are data: ``INJECTED_BLOCKS``, ``INJECTED_MESSAGES``, ``INJECTED_TOPICS`` and
``SUMMARY_FRAMES``, each with the name of the client.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal, assert_never

import msgspec

from tersely.domain.messages import Injected, Media, Message, Part, Reasoning, Role, Text, ToolCall, ToolResult

DIGEST_BYTES = 16
MIN_SUMMARY = 20
"""Shorter texts ("OK", "Done.") are too common to identify a conversation."""
MAX_SUMMARY = 1_000_000
"""Longer texts are no summaries, and costly to hash."""


class Delimited(msgspec.Struct, frozen=True, kw_only=True):
    """Text between two marks, as ``client`` writes it. With an empty ``closing`` the text reaches to the end."""

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

TOPICAL = frozenset({"<system-reminder>"})
"""Openings under which a client injects blocks about different topics. All other blocks have one topic each."""

INJECTED_MESSAGES = (
    Delimited(client="Codex", opening="# AGENTS.md instructions for ", closing="</INSTRUCTIONS>"),
    Delimited(client="Qwen Code", opening="This is the Qwen Code. We are setting up the context for our chat."),
    Delimited(
        client="Gemini CLI (older)", opening="This is the Gemini CLI. We are setting up the context for our chat."
    ),
)
"""A text part that begins and ends so is injected as a whole."""


class Topic(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that recognises versions of one block among blocks whose text begins with ``heading``.

    ``same``: all blocks under the heading are versions of one block (``heading``), all with an equal first line are
    (``line``), or only equal blocks are (``text``: each block adds to the earlier ones).
    """

    client: str
    heading: str
    same: Literal["heading", "line", "text"] = "heading"


INJECTED_TOPICS = (
    Topic(client="Claude Code", heading="As you answer the user's questions, you can use the following context"),
    Topic(client="Claude Code", heading="Available agent types for the Agent tool"),
    Topic(client="Claude Code", heading="New agent types", same="text"),
    Topic(client="Claude Code", heading="The following agent types", same="text"),
    Topic(client="Claude Code", heading="The following skills are available"),
    Topic(client="Claude Code", heading="The following deferred tools", same="text"),
    Topic(client="Claude Code", heading="# MCP Server Instructions", same="text"),
    Topic(client="Claude Code", heading="SessionStart", same="text"),
    Topic(client="Claude Code", heading="Contents of ", same="line"),
    Topic(client="Claude Code", heading="UserPromptSubmit hook"),
    Topic(client="Claude Code", heading="Called the "),
    Topic(client="Claude Code", heading="Result of calling the "),
    Topic(client="Claude Code", heading="Note: "),
    Topic(client="Claude Code", heading="The user opened the file "),
    Topic(client="Claude Code", heading="The user selected "),
    Topic(client="Claude Code", heading="The date has changed"),
    Topic(client="Claude Code", heading="Your todo list has changed"),
)
"""Headings of topical blocks. A block under no heading is a version of those whose first line begins alike."""

HEADING_CHARS = 64

_HAS_ONE_BLOCK = frozenset(
    opening + topic.heading for opening in TOPICAL for topic in INJECTED_TOPICS if topic.same == "heading"
)

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

CALLS_AS_TEXT = "Calling tools:\n[{'id':"
"""How smolagents begins to write the calls of a reply when it sends that again."""

_CODE_TOOL = "python_interpreter"
_MAX_CALLS_AS_TEXT = 100_000

_MAX_FRAME_OFFSET = 20_000
"""Copilot CLI repeats the user's messages in front of the summary; further in, a frame is not looked for."""

_CLOSINGS = {block.opening: block.closing for block in INJECTED_BLOCKS}
_BLOCK_OPENING = re.compile("|".join(re.escape(opening) for opening in _CLOSINGS))
_DIGITS = re.compile(r"[0-9]+")
_OPENINGS = tuple(each.opening for each in INJECTED_MESSAGES)
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(order="sorted").encode


def canonical(message: Message) -> bytes:
    """Return the identity of a message, or ``b""`` for a message that is no link of the chain.

    Instructions (system, developer) and user messages with nothing but injected context are no links.

    These are equal: a string and a list of one text; null, "" and no content; ``1`` and ``1.0`` in arguments; any order
    of their keys; arguments "" and "{}". Arguments that are no JSON count as text. Texts are trimmed at their ends. A
    refusal counts only in a message without other content, because clients drop it elsewhere.
    """
    role = message.role
    if role in {"system", "developer"}:
        return b""
    texts: list[str] = []
    others: list[str] = []
    refusals: list[str] = []
    for part in message.parts:
        if isinstance(part, Text):
            text = part.text
            if role == "assistant" and CALLS_AS_TEXT in text:
                text, calls = without_calls_as_text(text)
                others += map(_canonical_part, calls)
            if text := text.strip():
                (refusals if part.is_refusal else texts).append(text)
        elif not isinstance(part, Reasoning):
            other = _canonical_part(part)
            if other not in others:  # Gemini CLI repeats a result when it resumes
                others.append(other)
    if message.injected and not texts and not others:
        return b""
    content = texts if texts or others else refusals
    return _encode_text("".join((role, "\n", _sized("\n".join(content)), *others)))


def set_injected_apart(role: Role, parts: tuple[Part, ...]) -> tuple[tuple[Part, ...], tuple[Injected, ...]]:
    """Return the parts of a message without injected blocks, and the blocks in order.

    A text that consists of blocks alone is dropped. Only clients inject: the parts of assistant and instruction
    messages are returned unchanged.
    """
    if role not in {"user", "tool"}:
        return parts, ()
    found: list[Injected] = []
    kept: list[Part] = []
    for part in parts:
        if isinstance(part, Text):
            words, blocks = split_injected(part.text)
            if blocks:
                found += blocks
                if words.strip():
                    kept.append(Text(text=words))
                continue
        kept.append(part)
    return (tuple(kept), tuple(found)) if found else (parts, ())


def split_injected(text: str) -> tuple[str, tuple[Injected, ...]]:
    """Return the words of ``text`` (the very same object where nothing was injected) and the blocks in it.

    O(length), whatever the text holds.
    """
    blocks: list[Injected] = []
    if "<" in text:
        words: list[str] = []
        unclosed: set[str] = set()
        at = 0
        opening = _BLOCK_OPENING.search(text)
        while opening is not None:
            mark, start = opening[0], opening.end()
            end = -1 if mark in unclosed else text.find(_CLOSINGS[mark], start)
            if end < 0:
                unclosed.add(mark)
            else:
                words.append(text[at : opening.start()])
                at = start = end + len(_CLOSINGS[mark])
                blocks.append(_block(mark, text[opening.start() : at]))
            opening = _BLOCK_OPENING.search(text, start)
        if blocks:
            text = "".join((*words, text[at:]))
    if (whole := _injected_message(text)) is not None:
        blocks.append(whole)
        text = ""
    return text, tuple(blocks)


def without_calls_as_text(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a reply that smolagents resends as text into its text and its calls (Python literals).

    Calls that the code agent derived from the reply's own code are not part of the reply. Other text stays unchanged.
    """
    words, mark, written = text.partition(CALLS_AS_TEXT)
    if not mark or (words and not words.endswith("\n")) or len(written) > _MAX_CALLS_AS_TEXT:
        return text, ()
    try:
        listed = ast.literal_eval("[{'id':" + written.strip())
        calls = tuple(_call_from_literal(each) for each in listed)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return text, ()
    if len(calls) == 1 and calls[0].name == _CODE_TOOL and calls[0].arguments.strip() in words:
        return words, ()
    return words, calls


def _call_from_literal(call: dict[str, dict[str, object]]) -> ToolCall:
    arguments = call["function"]["arguments"]
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=str(call["id"]), name=str(call["function"]["name"]), arguments=written)


def without_injected(text: str) -> str:
    """Return ``text`` without injected blocks; the same object if there are none."""
    return split_injected(text)[0]


def _injected_message(text: str) -> Injected | None:
    """Return the injected block that ``text`` consists of, or None."""
    if not text[:100].lstrip().startswith(_OPENINGS):
        return None
    block = text.strip()
    for each in INJECTED_MESSAGES:
        if block.startswith(each.opening) and block.endswith(each.closing):
            return _block(each.opening, block)
    return None


def _block(opening: str, text: str) -> Injected:
    """Return the block ``text`` under the key that all of its versions share."""
    if opening not in TOPICAL:
        return Injected(key=opening, text=text)
    body = text[len(opening) :].lstrip()
    topic = next((each for each in INJECTED_TOPICS if body.startswith(each.heading)), None)
    line = body.partition("\n")[0].rstrip()
    if topic is None:
        return Injected(key=opening + _DIGITS.sub("0", line[:HEADING_CHARS]), text=text)
    match topic.same:
        case "heading":
            key = topic.heading
        case "line":
            key = line
        case "text":
            digest = blake2b(body.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
            key = f"{topic.heading}\n{digest.hexdigest()}"
        case _:
            assert_never(topic.same)
    return Injected(key=opening + key, text=text)


def is_additive(key: str) -> bool:
    """Return whether a client adds blocks like the one with ``key`` without ever replacing the earlier ones."""
    return key.startswith(tuple(TOPICAL)) and key not in _HAS_ONE_BLOCK


def link(previous: bytes, message: Message) -> bytes:
    """Return the chain value after ``message``, 16 bytes. ``previous`` is the value before it (``b""``: the beginning).

    A message that is no link leaves the value unchanged.
    """
    identity = canonical(message)
    return blake2b(previous + identity, digest_size=DIGEST_BYTES).digest() if identity else previous


def chain(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Return the chain value after each message. A message that is no link repeats the previous value (``b""`` at
    first).
    """
    values: list[bytes] = []
    value = b""
    for message in messages:
        value = link(value, message)
        values.append(value)
    return tuple(values)


def summary_anchors(message: Message) -> tuple[bytes, ...]:
    """Return hashes that identify the reply of a client's own compaction call in a later request.

    If the client continues from that reply, its anchors and those of a later message (of any role) have at least one in
    common. Anchors are the whole text and the text inside each of ``SUMMARY_FRAMES``. Texts under ``MIN_SUMMARY`` and
    over ``MAX_SUMMARY`` characters have none.
    """
    text = message.text
    if len(text) > 2 * MAX_SUMMARY:  # trimming such a text is not worth its time
        return ()
    text = text.strip()
    if len(text) > MAX_SUMMARY:
        return ()
    found = dict.fromkeys([text, *filter(None, _framed_texts(text))])
    return tuple(_hash("summary\n" + each) for each in found if len(each) >= MIN_SUMMARY)


def is_framed_summary(message: Message) -> bool:
    """Return whether a client wraps a summary of earlier messages in this message of the user."""
    if message.role != "user":
        return False
    text = message.text
    return any(len(framed) >= MIN_SUMMARY for framed in _framed_texts(text))


def _framed_texts(text: str) -> list[str]:
    """Return the text inside each of ``SUMMARY_FRAMES``, empty where a frame is not closed."""
    beginning = text[:_MAX_FRAME_OFFSET]
    return [_framed(text, frame) for frame in SUMMARY_FRAMES if frame.opening in beginning]


def _framed(text: str, frame: Delimited) -> str:
    start = text.index(frame.opening) + len(frame.opening)
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
    """Prefix a text with its length, so that two different messages never have the same canonical form."""
    return f"{len(text)}:{text}"


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _hash(text: str) -> bytes:
    return blake2b(_encode_text(text), digest_size=DIGEST_BYTES).digest()
