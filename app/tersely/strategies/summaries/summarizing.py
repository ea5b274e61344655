"""Write the request for a model's summary, for each purpose, and check the answer. The model itself is called
elsewhere.

A request is one instruction text and one user message of plain text. The history stands in it as a record between marks
that it cannot contain. So it is valid in every dialect, and nothing in it invites the model to continue the
conversation. Sizes in runes are code points.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import assert_never

from tersely.domain.history.history import Entry
from tersely.domain.history.turns import write_turn_id
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult
from tersely.domain.text.clipping import ends, head
from tersely.domain.tokens import Encode
from tersely.strategies.summaries import extractive
from tersely.strategies.summaries.activity_log import clip_line, derive_missing
from tersely.strategies.summaries.prompts import INSTRUCTIONS, RECORD, Purpose

# tiancaiamao/ai, "Old message summary" and "Tool Result Summarization During Loops".
RESULT_IN_RECORD = 1_800
RESULT_ALONE = 12_000
RESULT_SUMMARY = 1_200
RESULT_HEURISTIC = 800

# The content of a written file is one argument of a call.
ARGUMENTS_IN_RECORD = 1_800
# A line about one turn among several.
TASK_LINE = 480
_TASK = re.compile(r"\[?t(\d{1,9})\]?[:.)]?\s+(.+)")
CLIPPED = "\n[... {} characters left out ...]\n"
CUT_OFF = "[The summary was cut off here.]"

_THINKING = r"think|thinking|thought|reasoning|analysis|scratchpad"
_THOUGHT = re.compile(rf"<({_THINKING})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_OPEN_THOUGHT = re.compile(rf"<(?:{_THINKING})>.*\Z", re.DOTALL | re.IGNORECASE)
_CLOSED_THOUGHT = re.compile(rf"\A.*</(?:{_THINKING})>", re.DOTALL | re.IGNORECASE)
_WRAPPED = re.compile(r"\A\s*<summary>(.*?)(?:</summary>\s*)?\Z", re.DOTALL | re.IGNORECASE)
_FENCED = re.compile(r"\A\s*```[a-z]*\n(.*)\n```\s*\Z", re.DOTALL)
# A call that was written out as text, as some models do.
_CALL = re.compile(r"<(?:function_calls?|tool_calls?|tool_use|invoke|\|tool)\b|\{\s*\"(?:tool_calls|function|name)\"")


class UnusableSummary(Exception):
    """A model's answer cannot be used. The reason is one of a few fixed texts, without content.

    ``is_fault``: the model is the cause, not its input.
    """

    def __init__(self, reason: str, *, is_fault: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_fault = is_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuestion:
    """A question to a summarizing model: instruction text and one user message."""

    instructions: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryReply:
    """A summarizing model's reply. ``finish`` is the provider's finish reason."""

    text: str
    finish: str = "stop"
    has_calls: bool = False


def build_question(purpose: Purpose, record: str, *, earlier: str = "", given: str = "") -> SummaryQuestion:
    """Return the request for ``record``. ``earlier`` is the summary of earlier messages.

    ``given``: for a tool result its call, for a state the state so far.
    """
    mark = _mark(record + earlier + given)
    lines = [RECORD.format(mark=mark)]
    if given:
        lines.append(
            _between(f"{mark} of the {'tool call' if purpose == 'tool_result' else 'state so far'}", mark, given)
        )
    if earlier:
        lines.append(_between(f"{mark} of the earlier summary, to be taken up", mark, earlier))
    lines.append(_between(mark, mark, record))
    return SummaryQuestion(instructions=INSTRUCTIONS[purpose], message="\n\n".join(lines))


def _between(opening: str, mark: str, text: str) -> str:
    return f"<{opening}>\n{text}\n</{mark}>"


def _mark(text: str) -> str:
    """Return a mark that ``text`` cannot hold, other than by breaking the hash; the same for the same text."""
    return f"record-{blake2b(text.encode('utf-8', 'replace'), digest_size=6).hexdigest()}"


def write_records(purpose: Purpose, entries: Sequence[Entry], *, limit: int, encode: Encode) -> list[str]:
    """Split ``entries`` into records of at most ``limit`` tokens each, in order; at least one, unless there are no
    entries.

    A history that is too long for one model call is summarised in pieces, each with the summary of the earlier ones.
    """
    records: list[str] = []
    current: list[str] = []
    spent = 0
    for piece in _pieces(purpose, entries, limit, encode):
        cost = encode(piece) + 1
        if current and spent + cost > limit:
            records.append("\n".join(current))
            current, spent = [], 0
        current.append(piece)
        spent += cost
    return [*records, "\n".join(current)] if current else records


def _pieces(purpose: Purpose, entries: Sequence[Entry], limit: int, encode: Encode) -> Iterator[str]:
    for entry in entries:
        yield from _halved(_write(purpose, entry), limit, encode)


def _halved(text: str, limit: int, encode: Encode) -> Iterator[str]:
    """Yield ``text`` in pieces that fit."""
    if len(text) < 2 or encode(text) < limit:
        yield text
        return
    first = head(text, len(text) // 2) or text[:1]
    yield from _halved(first, limit, encode)
    yield from _halved(text[len(first) :], limit, encode)


def _write(purpose: Purpose, entry: Entry) -> str:
    message = entry.message
    if purpose == "tool_result":
        return clip("\n".join(_lines_of(message)), RESULT_ALONE)
    lines = [f"[{write_turn_id(entry.turn)} {message.role}]"]
    for part in message.parts:
        match part:
            case Text(text=text):
                lines.append(text)
            case ToolCall():
                lines.append(f"calls {part.name} {clip(part.arguments, ARGUMENTS_IN_RECORD)}")
            case ToolResult(text=text):
                lines.append(clip(text, RESULT_IN_RECORD))
            case Media(kind=kind):
                lines.append(f"[{kind}]")
            case Reasoning():
                pass
            case _:
                assert_never(part)
    return "\n".join(lines)


def _lines_of(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text | ToolResult)]


def clip(text: str, runes: int) -> str:
    """Return ``text`` in at most ``runes`` characters: beginning and end, with a note of how much is missing."""
    return ends(text, runes, CLIPPED.format(len(text) - runes))


def check_reply(purpose: Purpose, answer: SummaryReply, *, replaced: int, limit: int, encode: Encode) -> str:
    """Return the summary in a model's answer. Raises `UnusableSummary`.

    ``replaced``: the tokens of the text to replace. The summary must be shorter than that, and at most ``limit`` long.
    """
    text = _without_thoughts(answer.text)
    if answer.has_calls or _CALL.match(text):
        raise UnusableSummary("a tool call")
    if answer.finish not in ("stop", "length", ""):
        raise UnusableSummary("not finished")
    if answer.finish == "length":
        text = _cut_off(text)
    if not any(map(str.isalnum, text)):
        raise UnusableSummary("empty")
    if purpose == "tool_result":
        text = clip(text, RESULT_SUMMARY)
    if purpose == "tasks" and not read_tasks(text):
        raise UnusableSummary("no line about any turn")
    length = encode(text)
    if length > limit:
        raise UnusableSummary("too long")
    if length >= replaced:
        raise UnusableSummary("not shorter", is_fault=False)
    return text


def read_tasks(text: str) -> dict[int, str]:
    """Return the line about each turn in a summary of several."""
    found = (_TASK.match(line.strip().lstrip("-* ")) for line in text.splitlines())
    return {int(match[1]): clip_line(match[2], TASK_LINE) for match in found if match}


def _clip_lines(lines: list[str], limit: int, encode: Encode) -> str:
    """As many of the newest ``lines`` as fit."""
    while len(lines) > 1 and encode("\n".join(lines)) > limit:
        lines = lines[1:]
    text = "\n".join(lines)
    return text if encode(text) <= limit else ""


def _without_thoughts(text: str) -> str:
    """Return a reply without the model's thinking and without the wrapping that some models add."""
    for pattern in (_THOUGHT, _OPEN_THOUGHT, _CLOSED_THOUGHT):
        text = pattern.sub("", text)
    for pattern in (_WRAPPED, _FENCED):
        if wrapped := pattern.match(text):
            text = wrapped[1]
    return text.strip()


def _cut_off(text: str) -> str:
    """Return the whole lines before the limit was reached, and a mark."""
    whole = text.rpartition("\n")[0].rstrip()
    if not whole:
        raise UnusableSummary("cut off")
    return f"{whole}\n{CUT_OFF}"


def without_model(
    purpose: Purpose, entries: Sequence[Entry], *, limit: int, encode: Encode, earlier: str = "", given: str = ""
) -> str:
    """Return the summary that is used if no model can be called, in at most ``limit`` tokens.

    See `tersely.strategies.summaries.extractive`. Empty if there is nothing to summarise, and for
    a state block: only a model writes one.
    """
    match purpose:
        case "tool_result":
            text = "\n".join(line for entry in entries for line in _lines_of(entry.message))
            text = extractive.digest_result(given, text, runes=RESULT_HEURISTIC)
            return (
                text
                if encode(text) <= limit
                else extractive.summarize_without_model(entries, limit=limit, encode=encode)
            )
        case "state":
            return ""
        case "tasks":
            lines = [f"{write_turn_id(each.turn)}: {each.text}" for each in derive_missing(entries, ())]
            fitting = _clip_lines(lines, limit, encode)
            return fitting or extractive.summarize_without_model(entries, limit=limit, encode=encode)
        case "checkpoint" | "trim" | "ahead" | "task":
            return extractive.summarize_without_model(entries, limit=limit, encode=encode, earlier=earlier)
        case _:
            assert_never(purpose)
