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

from tersely.domain.errors import InvalidRequest
from tersely.domain.history.turns import read_turn_id, write_turn_id
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall, ToolResult, searchable_text
from tersely.domain.search.cues import is_about_whole
from tersely.domain.search.relevance import build_corpus, document_terms, find_relevant

DEFAULT_AROUND = 2
DEFAULT_COUNT = 10
MAX_COUNT = 1_000
MAX_QUERY = 1_000
NOTHING_FOUND = "No messages found."
VALUE_LIMIT = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSearch:
    """Mode ``search``: messages that contain ``query``, whatever the case, with their surroundings."""

    query: str
    before: int = DEFAULT_AROUND
    after: int = DEFAULT_AROUND


@dataclass(frozen=True, slots=True, kw_only=True)
class RelevanceSearch:
    """Mode ``relevant``: the ``first`` messages that are most about ``query``, with surroundings where they are asked
    for.
    """

    query: str
    first: int = DEFAULT_COUNT
    before: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewSearch:
    """Mode ``relevant`` for a question about the whole conversation: at most ``most`` turns, in time order."""

    query: str
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastMessages:
    """Mode ``tail``: the last messages."""

    last: int = DEFAULT_COUNT


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstMessages:
    """Mode ``head``: the first messages."""

    first: int = DEFAULT_COUNT


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMessages:
    """Mode ``turn``: all messages of a turn, with ``before`` and ``after`` neighbouring turns (default: none)."""

    turn: int
    before: int = 0
    after: int = 0

    @property
    def first_turn(self) -> int:
        """Return the first turn to show."""
        return max(1, self.turn - self.before)

    @property
    def last_turn(self) -> int:
        """Return the last turn to show, whether it exists or not."""
        return self.turn + self.after


RangeLookup = TextSearch | RelevanceSearch | LastMessages | FirstMessages | TurnMessages
Lookup = RangeLookup | OverviewSearch

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
class ExcerptRow:
    """A message with its number, as a search shows it.

    ``rank``: its rank among the most relevant messages, 1 for the best; 0: unranked. ``query``: the searched text,
    which the printed message must show.
    """

    number: int
    turn: int
    message: Message
    rank: int = 0
    query: str = ""


def parse_lookup(arguments: Mapping[str, object]) -> Lookup:
    """Parse the arguments of `context_search`.

    Parameters of other modes are ignored, since models tend to fill in everything. Raises `InvalidRequest` naming the
    field of an invalid mode, query, turn id or number.
    """
    mode = arguments.get("mode")
    if not isinstance(mode, str) or mode not in _ALLOWED:
        _refuse("mode", "one of 'search', 'relevant', 'tail', 'head', 'turn'", mode)
    unknown = sorted(str(name) for name in arguments if name not in _PARAMETERS)
    if unknown:
        raise InvalidRequest(f"unknown parameter {unknown[0][:40]!r}", field=unknown[0][:40])
    around = DEFAULT_AROUND if mode == "search" else 0
    if mode == "tail":
        return LastMessages(last=_number(arguments, "last", DEFAULT_COUNT))
    if mode == "head":
        return FirstMessages(first=_number(arguments, "first", DEFAULT_COUNT))
    before, after = _number(arguments, "before", around), _number(arguments, "after", around)
    if mode == "search":
        return TextSearch(query=_query(arguments.get("query")), before=before, after=after)
    if mode == "relevant":
        query = _query(arguments.get("query"))
        if is_about_whole(query) and not (before or after):
            return OverviewSearch(query=query, most=_number(arguments, "first", MAX_COUNT))
        first = _number(arguments, "first", DEFAULT_COUNT)
        return RelevanceSearch(query=query, first=first, before=before, after=after)
    turn_id = arguments.get("turnId")
    if not isinstance(turn_id, str):
        _refuse("turnId", "a turn id such as 't5'", turn_id)
    return TurnMessages(turn=read_turn_id(turn_id), before=before, after=after)


def matches(message: Message, query: str) -> bool:
    """Return whether a message's text, tool names, inputs or results contain ``query``, ignoring case."""
    return query.casefold() in searchable_text(message).casefold()


def plan_windows(positions: Iterable[int], *, before: int, after: int, total: int) -> tuple[Range, ...]:
    """Return the ranges to show around matches, in order. Ranges that overlap or touch are merged.

    Numbers outside 1 to ``total`` are ignored.
    """
    ranges: list[Range] = []
    for position in sorted({position for position in positions if 1 <= position <= total}):
        first, last = max(1, position - before), min(total, position + after)
        if ranges and first <= ranges[-1].last + 1:
            ranges[-1] = Range(first=ranges[-1].first, last=max(ranges[-1].last, last))
        else:
            ranges.append(Range(first=first, last=last))
    return tuple(ranges)


def plan_ends(lookup: LastMessages | FirstMessages, *, total: int) -> tuple[Range, ...]:
    """Return the range of a ``tail`` or ``head`` lookup; none in an empty session or for 0 messages."""
    count = min(total, lookup.last if isinstance(lookup, LastMessages) else lookup.first)
    if count == 0:
        return ()
    return (
        Range(first=total - count + 1, last=total) if isinstance(lookup, LastMessages) else Range(first=1, last=count),
    )


def find_excerpts(lookup: RangeLookup, rows: Sequence[ExcerptRow]) -> tuple[Range, ...]:
    """Return the ranges of a lookup over complete rows, in order from message 1."""
    total = len(rows)
    match lookup:
        case TextSearch(query=query, before=before, after=after):
            found = (row.number for row in rows if matches(row.message, query))
            return plan_windows(found, before=before, after=after, total=total)
        case RelevanceSearch(before=before, after=after):
            return plan_windows(_most_relevant(lookup, rows), before=before, after=after, total=total)
        case LastMessages() | FirstMessages():
            return plan_ends(lookup, total=total)
        case TurnMessages():
            wanted = (row.number for row in rows if lookup.first_turn <= row.turn <= lookup.last_turn)
            return plan_windows(wanted, before=0, after=0, total=total)


def _most_relevant(lookup: RelevanceSearch, rows: Sequence[ExcerptRow]) -> list[int]:
    documents = [document_terms(row.message) for row in rows]
    corpus = build_corpus(documents)
    found = find_relevant(lookup.query, documents, corpus, limit=lookup.first)
    return [rows[each.number].number for each in found]


def render_excerpts(ranges: Sequence[Range], rows: Iterable[ExcerptRow], total: int) -> str:
    """Render each range as ``--- messages 14-18 of 42 ---`` and one paragraph per message."""
    if not ranges:
        return NOTHING_FOUND
    at = {row.number: row for row in rows}
    blocks = []
    for span in ranges:
        shown = [render_row(at[position]) for position in range(span.first, span.last + 1) if position in at]
        blocks.append("\n".join([f"--- messages {span.first}-{span.last} of {total} ---", *shown]))
    return "\n".join(blocks)


def render_row(row: ExcerptRow) -> str:
    """Render a message as ``[assistant t7] text [tool: dom({action: 'create', ...})]``."""
    # The line end of a tag that was alone on its line remains.
    pieces = [piece for part in row.message.parts if (piece := _render_part(part, row.query).rstrip("\r\n"))]
    match = {0: "", 1: ", best match"}.get(row.rank, f", match {row.rank}")
    return " ".join([f"[{row.message.role} {write_turn_id(row.turn)}{match}]", *pieces])


def _render_part(part: Text | Reasoning | ToolCall | ToolResult | Media, query: str) -> str:
    match part:
        case Text(text=text) | ToolResult(text=text):
            return text
        case ToolCall():
            return f"[tool: {part.name}({_render_arguments(part.arguments, query)})]"
        case Media(kind=kind):
            return f"[{kind}]"
        case Reasoning():
            return ""


def _render_arguments(arguments: str, query: str) -> str:
    """Return ``{action: 'create', ...}``: the first argument, the argument that contains ``query``, and a mark for
    omitted ones.
    """
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return _clip(" ".join(arguments.split()), query)
    if not isinstance(parsed, dict):
        return _literal(parsed, query)
    names = list(parsed)
    found = next((name for name in names if query and _has(f"{name} {_text_of(parsed[name])}", query)), None)
    if found is None and query and _has(arguments, query):
        return _clip(arguments, query)  # the match spans several arguments, or is a piece of JSON
    shown = [f"{_key(name)}: {_literal(parsed[name], query)}" for name in names[:1]]
    if found is not None and found != names[0]:
        shown += ["..."] if names.index(found) > 1 else []
        shown.append(f"{_key(found)}: {_literal(parsed[found], query)}")
    last = names.index(found) if found is not None else 0
    return "{" + ", ".join([*shown, *(["..."] if last < len(names) - 1 else [])]) + "}"


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has(text: str, query: str) -> bool:
    return query.casefold() in text.casefold()


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_$][\w$]*", key) else _quote(key)


def _literal(value: object, query: str) -> str:
    clipped = _clip(_text_of(value), query)
    return _quote(clipped) if isinstance(value, str) else clipped


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\r", "\\r")
    return f"'{escaped}'"


def _clip(text: str, query: str = "") -> str:
    if len(text) <= VALUE_LIMIT:
        return text
    first, last = find_around(text, query, max(VALUE_LIMIT, len(query) + 20) - 6)
    if first == 0:
        last = max(last, VALUE_LIMIT - 3)
    return f"{'...' if first else ''}{text[first:last]}{'...' if last < len(text) else ''}"


def find_around(text: str, query: str, room: int) -> tuple[int, int]:
    """Return where to cut ``text`` to ``room`` characters so that it includes ``query``, ignoring case.

    Return the beginning if the query is there or missing.
    """
    at = -1
    if query:
        found = re.search(re.escape(query), text, re.IGNORECASE)
        # Some letters fold to several, so the original position may be slightly earlier.
        at = found.start() if found else text.casefold().find(query.casefold())
    if at + len(query) <= room:
        return 0, room
    first = min(at - (room - len(query)) // 2, len(text) - room)
    return max(0, first), max(0, first) + room


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
