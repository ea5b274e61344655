"""The activity log: one line for each thing that a turn did, instead of the turn.

The format is that of flo.monster's "Context Management": a user message that begins with ``[Context -- Activity Log]``,
lines ``[t1 2024-01-15T10:30] assistant: text`` with UTC minutes, then an acknowledgement by the assistant. The log is
bounded. Entries that do not fit are rolled up, oldest first, into lines that name their range of turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

from tersely.domain.history.history import Entry, EpochInputs, TerseEntry
from tersely.domain.history.turns import group_turns, write_turn_id
from tersely.domain.tokens import Encode
from tersely.strategies.prompts import ACTIVITY_LOG_TITLE

TERSE_LIMIT = 160
# Rolled-up lines take at most this share of the log; the rest is for the newest entries, one line each.
ROLLED_SHARE = 0.25
ROLLED_LINES = 6

# Minimum of text characters of a rolled-up line, and characters for each of its texts.
LEAST_GIST = 48
LEAST_WORDS = 24

EARLIER_STEPS = "earlier steps"
NO_LINES = "nothing is noted of them here"

_LOG_LINE = re.compile(r"\[t(\d+) (\d{4}-\d\d-\d\dT\d\d:\d\d)\] (\w+): (.*)")
# A first sentence is looked for in so many characters: a line of the log is far shorter.
_LOOK_AT = 2_000
_BREAK = re.compile(r"[.!?\n]")
_TERSE_TAG = re.compile(r"<terse>.*?</terse>", re.DOTALL)
_MARKUP = re.compile(r"^[#>*\-\s`]+")


def render_activity_log(inputs: EpochInputs, *, limit: int, encode: Encode) -> str:
    """Return the log's text within ``limit`` tokens; empty without entries.

    ``inputs.terse`` are the entries to show, in order. ``inputs.older_turns`` counts turns before them whose entries
    were not loaded: they go into the first rolled-up line.
    """
    lines = [_LogLine.of(entry) for entry in inputs.terse]
    if not lines and not inputs.older_turns:
        return ""
    older = _OlderTurns(turns=inputs.older_turns, at=inputs.oldest_at)
    if not older.turns and _may_fit(lines, limit=limit, encode=encode):
        text = _write(lines, 0, older, roll_chars=0)
        if encode(text) <= limit:
            return text
    full = _fitting(lines, budget=int(limit * (1 - ROLLED_SHARE)), encode=encode)
    roll_chars = int(limit * ROLLED_SHARE) * 4
    # Texts in scripts that take more tokens than a quarter per character need further shrinking.
    while encode(text := _write(lines, len(lines) - full, older, roll_chars=roll_chars)) > limit:
        if full == 0 and roll_chars == 0:
            break
        full, roll_chars = full * 3 // 4, roll_chars // 2
    return text


def read_activity_log(text: str, turns: frozenset[int]) -> tuple[TerseEntry, ...]:
    """Return the lines about ``turns`` from a log that was rendered here, as derived entries.

    The steps of a running turn are described only in the head of the last epoch, until the turn is over and has an
    entry of its own. It is cheaper to read the head than to read the steps again.
    """
    found = (_LOG_LINE.fullmatch(line) for line in text.splitlines())
    return tuple(
        TerseEntry(
            turn=int(match[1]),
            seq=0,
            role=match[3],
            text=match[4],
            source="derived",
            created_at=datetime.strptime(match[2], "%Y-%m-%dT%H:%M").replace(tzinfo=UTC),
        )
        for match in found
        if match and int(match[1]) in turns
    )


def clip_line(text: str, limit: int = TERSE_LIMIT) -> str:
    """``text`` on one line of at most ``limit`` characters."""
    line = " ".join(text[: limit * 8].split())
    return line if len(line) <= limit else line[: max(0, limit - 3)].rstrip() + "..."


def derive_terse(entries: Sequence[Entry]) -> TerseEntry:
    """Return a terse entry for a turn whose reply had none, made without a model and marked ``derived``.

    ``entries`` are the turn's, in order, not empty. The entry is the first sentence of the assistant's last text.
    Without a text it names the user's request and the tools used.
    """
    last = entries[-1]
    replies = (e for e in reversed(entries) if e.message.role == "assistant" and _first_sentence(e.message.text))
    final = next(replies, None)
    if final is not None and final.message.calls:
        final = None
    text = _first_sentence(final.message.text) if final else _describe_request_and_tools(entries)
    at = final or last
    return TerseEntry(
        turn=last.turn, seq=at.seq, role="assistant", text=text, source="derived", created_at=at.created_at
    )


def derive_missing(entries: Iterable[Entry], terse: Iterable[TerseEntry]) -> tuple[TerseEntry, ...]:
    """Return derived entries for the turns of ``entries`` that have none in ``terse``."""
    known = {entry.turn for entry in terse}
    return tuple(derive_terse(turn.entries) for turn in group_turns(entries) if turn.number not in known)


def derive_steps(entries: Iterable[Entry]) -> tuple[TerseEntry, ...]:
    """Derive one entry for each step that a cut inside a turn takes: the reply's first sentence, or the tools used.

    A turn of a hundred steps has at most one terse entry, at its end. Until then these entries describe its progress.
    """
    return tuple(
        TerseEntry(
            turn=turn.number,
            seq=step.entries[0].seq,
            role="assistant",
            text=_first_sentence(step.entries[0].message.text) or f"used {_tools_used(step.entries)}",
            source="derived",
            created_at=step.entries[0].created_at,
        )
        for turn in group_turns(entries)
        for step in turn.steps
        if _first_sentence(step.entries[0].message.text) or _tools_used(step.entries)
    )


def _first_sentence(text: str) -> str:
    return _sentence_in(text[:_LOOK_AT])


# The rounds of a plan ask for the same turns.
@lru_cache(maxsize=1024)
def _sentence_in(text: str) -> str:
    for piece in _sentences(_TERSE_TAG.sub("", text)):
        sentence = _MARKUP.sub("", piece).strip()
        if any(map(str.isalnum, sentence)):
            return clip_line(sentence)
    return ""


def _sentences(text: str) -> Iterator[str]:
    """Yield sentences one by one, since the first one usually suffices."""
    start = 0
    for found in _BREAK.finditer(text):
        end = found.end()
        if found[0] == "\n" or text[end : end + 1].isspace():
            yield text[start:end]
            start = end
    yield text[start:]


def _describe_request_and_tools(entries: Sequence[Entry]) -> str:
    question = next((e.message.text for e in entries if e.message.starts_turn), "")
    used = _tools_used(entries)
    tools = f"used {used}" if used else "no reply"
    question = clip_line(_first_sentence(question) or "no words", TERSE_LIMIT - len(tools) - 14)
    return f"asked: {question} ({tools})"


def _tools_used(entries: Iterable[Entry]) -> str:
    counts: dict[str, int] = {}
    for entry in entries:
        for call in () if entry.is_ours else entry.message.calls:
            counts[call.name] = counts.get(call.name, 0) + 1
    return clip_line(", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items()), 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogLine:
    turn: int
    at: datetime
    role: str
    text: str

    @classmethod
    def of(cls, entry: TerseEntry) -> _LogLine:
        return cls(turn=entry.turn, at=entry.created_at, role=entry.role, text=" ".join(entry.text.split()))

    def write(self) -> str:
        return f"[{write_turn_id(self.turn)} {_minute(self.at)}] {self.role}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OlderTurns:
    turns: int
    at: datetime | None


def _minute(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M")


def _may_fit(lines: Sequence[_LogLine], *, limit: int, encode: Encode) -> bool:
    """Return whether it is worth the while to count all lines together: they may come to a token less a line than
    apart.
    """
    spent = 0
    for line in reversed(lines):
        spent += encode(line.write()) - 1
        if spent > limit:
            return False
    return True


def _fitting(lines: Sequence[_LogLine], *, budget: int, encode: Encode) -> int:
    """Return how many of the newest lines fit into ``budget`` tokens."""
    spent = 0
    for count, line in enumerate(reversed(lines)):
        spent += encode(line.write()) + 1
        if spent > budget:
            return count
    return len(lines)


def _write(lines: Sequence[_LogLine], rolled: int, older: _OlderTurns, *, roll_chars: int) -> str:
    shown = [line.write() for line in lines[rolled:]]
    return "\n".join([ACTIVITY_LOG_TITLE, *_roll_up(lines[:rolled], older, roll_chars), *shown])


def _roll_up(lines: Sequence[_LogLine], older: _OlderTurns, chars: int) -> list[str]:
    """Range lines for the oldest entries: about as many turns in each, and ``chars`` characters of words in all.

    Few characters are few lines, so that each says something.
    """
    if not lines:
        return [_range_line(_Span(first=1, last=older.turns), older.turns, older.at, NO_LINES)] if older.turns else []
    count = max(1, min(ROLLED_LINES, chars // LEAST_GIST))
    size = -(-len(lines) // count)
    rolled = []
    for start in range(0, len(lines), size):
        group = lines[start : start + size]
        extra = older.turns if start == 0 else 0
        if len(group) == 1 and not extra:
            rolled.append(replace(group[0], text=clip_line(group[0].text)).write())
            continue
        span = _Span(first=1 if extra else group[0].turn, last=group[-1].turn)
        at = older.at if extra and older.at else group[0].at
        turns = len({line.turn for line in group}) + extra
        texts = [line.text.removeprefix(f"{EARLIER_STEPS}: ") for line in group]
        rolled.append(_range_line(span, turns, at, _gist(texts, max(LEAST_GIST, chars // count))))
    return rolled


def _gist(texts: Sequence[str], chars: int) -> str:
    """Return the beginnings of as many texts as ``chars`` characters hold, spread evenly over all of them."""
    texts = [text for text in texts if text]
    if not texts:
        return NO_LINES
    room = max(1, min(len(texts), chars // LEAST_WORDS))
    chosen = [texts[index * len(texts) // room] for index in range(room)]
    return "; ".join(clip_line(text, chars // room - 2) for text in chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    first: int
    last: int


def _range_line(span: _Span, count: int, at: datetime | None, gist: str) -> str:
    ids = write_turn_id(span.first) + (f"-{write_turn_id(span.last)}" if span.last > span.first else "")
    stamp = f" {_minute(at)}" if at else ""
    turns = EARLIER_STEPS if count == 1 else f"{count} turns"
    return f"[{ids}{stamp}] assistant: {turns}" + (f": {gist}" if gist else "")
