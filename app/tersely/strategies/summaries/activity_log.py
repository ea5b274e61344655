"""The activity log: one line for each thing that a turn did, instead of the turn.

The format is that of flo.monster's "Context Management": a user message that begins with ``[Context -- Activity Log]``,
lines ``[t1 2024-01-15T10:30] assistant: text`` with UTC minutes, then an acknowledgement by the assistant. The log is
bounded. Entries that do not fit are rolled up, oldest first, into lines that name their range of turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from tersely.domain.history.history import LOG_ENTRIES, Entry, EpochInputs, TerseEntry
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
    entries = inputs.terse
    if not entries and not inputs.older_turns:
        return ""
    older = _OlderTurns(turns=inputs.older_turns, at=inputs.oldest_at)
    budget = int(limit * (1 - ROLLED_SHARE))
    lines = _newest_lines(entries, limit=budget if older.turns else limit, encode=encode)
    if not older.turns and len(lines.texts) == len(entries):
        text = _write(entries, lines.texts, older, roll_chars=0)
        if encode(text) <= limit:
            return text
    full = lines.fitting(budget)
    roll_chars = int(limit * ROLLED_SHARE) * 4
    # Texts in scripts that take more tokens than a quarter per character need further shrinking.
    while encode(text := _write(entries, lines.texts[len(lines.texts) - full :], older, roll_chars=roll_chars)) > limit:
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
    replies = (e for e in reversed(entries) if e.message.role == "assistant" and first_sentence(e.message.text))
    final = next(replies, None)
    if final is not None and final.message.calls:
        final = None
    text = first_sentence(final.message.text) if final else _describe_request_and_tools(entries)
    at = final or last
    return TerseEntry(
        turn=last.turn, seq=at.seq, role="assistant", text=text, source="derived", created_at=at.created_at
    )


def derive_missing(entries: Iterable[Entry], terse: Iterable[TerseEntry]) -> tuple[TerseEntry, ...]:
    """Return derived entries for the turns of ``entries`` that have none in ``terse``."""
    known = {entry.turn for entry in terse}
    return tuple(derive_terse(turn.entries) for turn in group_turns(entries) if turn.number not in known)


def derive_outcomes(entries: Iterable[Entry], inputs: EpochInputs) -> tuple[TerseEntry, ...]:
    """Return derived entries for past turns, of ``entries``, that have none of their own or none for their last reply.

    They are of at most as many turns as a log has entries, the newest. Turns from before a full log are none of them:
    their entries were not loaded.
    """
    first = inputs.terse[0].turn if len(inputs.terse) >= LOG_ENTRIES else 1
    told_to: dict[int, int] = {}
    for entry in inputs.terse:
        told_to[entry.turn] = max(entry.seq, told_to.get(entry.turn, 0))
    missing = [
        turn
        for turn in group_turns(entries)
        if turn.number >= first and (turn.number not in told_to or _ends_behind(turn.entries[-1], told_to[turn.number]))
    ]
    lines = [derive_terse(turn.entries) for turn in missing[-LOG_ENTRIES:]]
    # A last reply without words is described at an earlier one, which may have an entry.
    return tuple([line for line in lines if line.seq > told_to.get(line.turn, 0)])


def _ends_behind(entry: Entry, seq: int) -> bool:
    return entry.seq > seq and ends_turn(entry)


def ends_turn(entry: Entry) -> bool:
    """Return whether a turn that ends with this message is over: a reply that calls no tool."""
    return entry.message.role == "assistant" and bool(entry.message.parts) and not entry.message.calls


def derive_steps(entries: Iterable[Entry]) -> tuple[TerseEntry, ...]:
    """Derive one entry for each step that a cut inside a turn takes: the reply's first sentence, or the tools used.

    A turn of a hundred steps has at most one terse entry, at its end. Until then these entries describe its progress.
    """
    return tuple(
        TerseEntry(
            turn=turn.number,
            seq=step.entries[0].seq,
            role="assistant",
            text=first_sentence(step.entries[0].message.text) or f"used {_tools_used(step.entries)}",
            source="derived",
            created_at=step.entries[0].created_at,
        )
        for turn in group_turns(entries)
        for step in turn.steps
        if first_sentence(step.entries[0].message.text) or _tools_used(step.entries)
    )


def first_sentence(text: str) -> str:
    """Return the first sentence with a letter or digit, on one line without its markup; empty if there is none."""
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
    question = clip_line(first_sentence(question) or "no words", TERSE_LIMIT - len(tools) - 14)
    return f"asked: {question} ({tools})"


def _tools_used(entries: Iterable[Entry]) -> str:
    counts: dict[str, int] = {}
    for entry in entries:
        for call in () if entry.is_ours else entry.message.calls:
            counts[call.name] = counts.get(call.name, 0) + 1
    return clip_line(", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items()), 60)


def _line(entry: TerseEntry, text: str | None = None) -> str:
    """Return the line of an entry, or of another ``text`` in its place."""
    return f"[{write_turn_id(entry.turn)} {_minute(entry.created_at)}] {entry.role}: {text or _text(entry)}"


def _text(entry: TerseEntry) -> str:
    return " ".join(entry.text.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class _OlderTurns:
    turns: int
    at: datetime | None


def _minute(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()[:16]


@dataclass(frozen=True, slots=True)
class _NewestLines:
    """The lines of the newest entries, in order, and the tokens of each."""

    texts: list[str]
    tokens: list[int]

    def fitting(self, budget: int) -> int:
        """Return how many of the newest lines fit into ``budget`` tokens."""
        spent = 0
        for count, tokens in enumerate(reversed(self.tokens)):
            spent += tokens + 1
            if spent > budget:
                return count
        return len(self.tokens)


def _newest_lines(entries: Sequence[TerseEntry], *, limit: int, encode: Encode) -> _NewestLines:
    """Return as many of the newest lines as may fit: together they may come to a token less a line than apart."""
    texts: list[str] = []
    tokens: list[int] = []
    spent = 0
    for entry in reversed(entries):
        text = _line(entry)
        count = encode(text)
        spent += count - 1
        if spent > limit:
            break
        texts.append(text)
        tokens.append(count)
    return _NewestLines(texts[::-1], tokens[::-1])


def _write(entries: Sequence[TerseEntry], shown: Sequence[str], older: _OlderTurns, *, roll_chars: int) -> str:
    """Return the log with the lines ``shown`` of the newest entries, behind lines for all older ones."""
    rolled = entries[: len(entries) - len(shown)]
    return "\n".join([ACTIVITY_LOG_TITLE, *_roll_up(rolled, older, roll_chars), *shown])


def _roll_up(entries: Sequence[TerseEntry], older: _OlderTurns, chars: int) -> list[str]:
    """Range lines for the oldest entries: about as many turns in each, and ``chars`` characters of words in all.

    Few characters are few lines, so that each says something.
    """
    if not entries:
        return [_range_line(_Span(first=1, last=older.turns), older.turns, older.at, NO_LINES)] if older.turns else []
    count = max(1, min(ROLLED_LINES, chars // LEAST_GIST))
    size = -(-len(entries) // count)
    rolled = []
    for start in range(0, len(entries), size):
        group = entries[start : start + size]
        extra = older.turns if start == 0 else 0
        if len(group) == 1 and not extra:
            rolled.append(_line(group[0], clip_line(_text(group[0]))))
            continue
        span = _Span(first=1 if extra else group[0].turn, last=group[-1].turn)
        at = older.at if extra and older.at else group[0].created_at
        turns = len({entry.turn for entry in group}) + extra
        rolled.append(_range_line(span, turns, at, _gist(group, max(LEAST_GIST, chars // count))))
    return rolled


def _gist(entries: Sequence[TerseEntry], chars: int) -> str:
    """Return the beginnings of as many texts as ``chars`` characters hold, spread evenly over all of them."""
    said = [entry for entry in entries if entry.text.strip()]
    if not said:
        return NO_LINES
    room = max(1, min(len(said), chars // LEAST_WORDS))
    chosen = [_text(said[index * len(said) // room]).removeprefix(f"{EARLIER_STEPS}: ") for index in range(room)]
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
