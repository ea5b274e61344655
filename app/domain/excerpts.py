"""`context_search`: requests, windows and the printed form of flo.monster's "Context Management", to the letter.

Split so that a store supplies only the positions of matches and the rows of the windows: a search in a long session
never loads it. **Positions** count the messages that can be seen, from 1 on, without gaps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from app.domain.errors import InvalidRequest
from app.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult, searchable_text
from app.domain.relevance import collect, document_text, look, search
from app.domain.terms import tokenize
from app.domain.turns import read_turn_id, write_turn_id

DEFAULT_AROUND = 2
DEFAULT_COUNT = 10
MAX_COUNT = 1_000
MAX_QUERY = 1_000
NOTHING_FOUND = "No messages found."
VALUE_LIMIT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Mode ``search``: messages that contain ``query``, whatever the case, with their surroundings."""

    query: str
    before: int = DEFAULT_AROUND
    after: int = DEFAULT_AROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Relevant:
    """Mode ``relevant``: the ``first`` messages that are most about ``query``, with their surroundings."""

    query: str
    first: int = DEFAULT_COUNT
    before: int = DEFAULT_AROUND
    after: int = DEFAULT_AROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """Mode ``tail``: the last messages."""

    last: int = DEFAULT_COUNT


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Mode ``head``: the first messages."""

    first: int = DEFAULT_COUNT


@dataclass(frozen=True, slots=True, kw_only=True)
class InTurn:
    """Mode ``turn``: all messages of a turn, with ``before`` and ``after`` turns around it (none unless asked)."""

    turn: int
    before: int = 0
    after: int = 0

    @property
    def first_turn(self) -> int:
        """The first turn to show."""
        return max(1, self.turn - self.before)

    @property
    def last_turn(self) -> int:
        """The last turn to show, whether it exists or not."""
        return self.turn + self.after


Lookup = Search | Relevant | Tail | Head | InTurn

_ALLOWED: Mapping[str, frozenset[str]] = {
    "search": frozenset({"query", "before", "after"}),
    "relevant": frozenset({"query", "first", "before", "after"}),
    "tail": frozenset({"last"}),
    "head": frozenset({"first"}),
    "turn": frozenset({"turnId", "before", "after"}),
}
_PARAMETERS = frozenset({"mode"}).union(*_ALLOWED.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A contiguous range of positions, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A message at its position, as a search shows it."""

    position: int
    turn: int
    message: Message


def parse_lookup(arguments: Mapping[str, object]) -> Lookup:
    """The arguments of `context_search` -> what to look up.

    A parameter that belongs to another mode is passed over, as models like to fill in everything. Raises
    `InvalidRequest` naming the field for a mode, query, turn id or number that is not as documented.
    """
    mode = arguments.get("mode")
    if not isinstance(mode, str) or mode not in _ALLOWED:
        _refuse("mode", "one of 'search', 'relevant', 'tail', 'head', 'turn'", mode)
    unknown = sorted(str(name) for name in arguments if name not in _PARAMETERS)
    if unknown:
        raise InvalidRequest(f"unknown parameter {unknown[0][:40]!r}", field=unknown[0][:40])
    around = 0 if mode == "turn" else DEFAULT_AROUND
    if mode == "tail":
        return Tail(last=_number(arguments, "last", DEFAULT_COUNT))
    if mode == "head":
        return Head(first=_number(arguments, "first", DEFAULT_COUNT))
    before, after = _number(arguments, "before", around), _number(arguments, "after", around)
    if mode == "search":
        return Search(query=_query(arguments.get("query")), before=before, after=after)
    if mode == "relevant":
        first = _number(arguments, "first", DEFAULT_COUNT)
        return Relevant(query=_query(arguments.get("query")), first=first, before=before, after=after)
    turn_id = arguments.get("turnId")
    if not isinstance(turn_id, str):
        _refuse("turnId", "a turn id such as 't5'", turn_id)
    return InTurn(turn=read_turn_id(turn_id), before=before, after=after)


def matches(message: Message, query: str) -> bool:
    """Whether text, tool names, tool inputs or tool results of ``message`` contain ``query``, whatever the case."""
    return query.casefold() in searchable_text(message).casefold()


def plan_windows(positions: Iterable[int], *, before: int, after: int, total: int) -> tuple[Range, ...]:
    """The ranges to show around matches, in order; ranges that overlap or touch are merged.

    Positions outside 1 to ``total`` are passed over.
    """
    ranges: list[Range] = []
    for position in sorted({position for position in positions if 1 <= position <= total}):
        first, last = max(1, position - before), min(total, position + after)
        if ranges and first <= ranges[-1].last + 1:
            ranges[-1] = Range(first=ranges[-1].first, last=max(ranges[-1].last, last))
        else:
            ranges.append(Range(first=first, last=last))
    return tuple(ranges)


def plan_ends(lookup: Tail | Head, *, total: int) -> tuple[Range, ...]:
    """The range of a ``tail`` or ``head`` lookup; none in an empty session or for 0 messages."""
    count = min(total, lookup.last if isinstance(lookup, Tail) else lookup.first)
    if count == 0:
        return ()
    return (Range(first=total - count + 1, last=total) if isinstance(lookup, Tail) else Range(first=1, last=count),)


def look_up(lookup: Lookup, rows: Sequence[Row]) -> tuple[Range, ...]:
    """The ranges of any lookup over rows that are all at hand, in order from position 1 on."""
    total = len(rows)
    match lookup:
        case Search(query=query, before=before, after=after):
            found = (row.position for row in rows if matches(row.message, query))
            return plan_windows(found, before=before, after=after, total=total)
        case Relevant(before=before, after=after):
            return plan_windows(_most_relevant(lookup, rows), before=before, after=after, total=total)
        case Tail() | Head():
            return plan_ends(lookup, total=total)
        case InTurn():
            wanted = (row.position for row in rows if lookup.first_turn <= row.turn <= lookup.last_turn)
            return plan_windows(wanted, before=0, after=0, total=total)


def _most_relevant(lookup: Relevant, rows: Sequence[Row]) -> list[int]:
    documents = [tokenize(document_text(row.message)) for row in rows]
    corpus = collect(documents)
    first = look(lookup.query, corpus)
    best = [documents[each.number] for each in first.best]
    return [rows[each.number].position for each in search(first, corpus, best, most=lookup.first)]


def render_excerpts(ranges: Sequence[Range], rows: Iterable[Row], total: int) -> str:
    """``--- messages 14-18 of 42 ---`` and one paragraph per message, for each range."""
    if not ranges:
        return NOTHING_FOUND
    at = {row.position: row for row in rows}
    blocks = []
    for span in ranges:
        shown = [render_row(at[position]) for position in range(span.first, span.last + 1) if position in at]
        blocks.append("\n".join([f"--- messages {span.first}-{span.last} of {total} ---", *shown]))
    return "\n".join(blocks)


def render_row(row: Row) -> str:
    """``[assistant t7] text [tool: dom({action: 'create', ...})]``."""
    # A tag that stood on a line of its own leaves that line's end behind.
    pieces = [piece for part in row.message.parts if (piece := _render_part(part).rstrip("\r\n"))]
    return " ".join([f"[{row.message.role} {write_turn_id(row.turn)}]", *pieces])


def _render_part(part: Text | Reasoning | ToolCall | ToolResult | Media) -> str:
    match part:
        case Text(text=text) | ToolResult(text=text):
            return text
        case ToolCall():
            return f"[tool: {part.name}({_render_arguments(part.arguments)})]"
        case Media(kind=kind):
            return f"[{kind}]"
        case Reasoning():
            return ""


def _render_arguments(arguments: str) -> str:
    """``{action: 'create', ...}``: the first argument, and a sign that there are more."""
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return _clip(" ".join(arguments.split()))
    if not isinstance(parsed, dict):
        return _literal(parsed)
    shown = [f"{_key(key)}: {_literal(value)}" for key, value in list(parsed.items())[:1]]
    return "{" + ", ".join([*shown, *(["..."] if len(parsed) > 1 else [])]) + "}"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_$][\w$]*", key) else _quote(key)


def _literal(value: object) -> str:
    if isinstance(value, str):
        return _quote(_clip(value))
    return _clip(json.dumps(value, ensure_ascii=False))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"


def _clip(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


def _query(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse("query", "a text that is not empty", value)
    if len(value) > MAX_QUERY:
        raise InvalidRequest(f"query must have at most {MAX_QUERY} characters, not {len(value)}", field="query")
    return value


def _number(arguments: Mapping[str, object], name: str, default: int) -> int:
    value = arguments.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # models write 2.0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        _refuse(name, f"an integer from 0 to {MAX_COUNT}", value)
    return value


def _refuse(name: str, expected: str, value: object) -> NoReturn:
    if value is None:
        raise InvalidRequest(f"{name} is missing: {expected}", field=name)
    raise InvalidRequest(f"{name} must be {expected}, not {str(value)[:40]!r}", field=name)
