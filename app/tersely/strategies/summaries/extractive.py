"""Write a summary without a model: requests, decisions, results, names, errors and open points.

It is deterministic, bounded in tokens, and has the sections of the checkpoint that a model is asked for. It is written
from the facts of the messages (`tersely.strategies.summaries.facts`). The sections share the budget: each in turn gets
its best next line until no line fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tersely.domain.history.history import CoveredFacts, Entry
from tersely.domain.messages import Message, Text, ToolResult
from tersely.domain.text.clipping import ends, head
from tersely.domain.tokens import Encode
from tersely.strategies.summaries.activity_log import clip_line
from tersely.strategies.summaries.facts import LINE, NAMES, SECTIONS, cover, write_sections

# Of a longer history the beginning and the newest messages are looked through: of each section the first lines and the
# newest are what stays anyway, and reading ten thousand messages takes seconds.
FIRST_ENTRIES, NEWEST_ENTRIES = 100, 900
# Separates a model's summary from the facts after it.
SINCE = "(After that:)"
# A round gives each section one line; names are short and many.
PER_ROUND = {NAMES: 3}


def summarize_without_model(entries: Sequence[Entry], *, limit: int, encode: Encode, earlier: str = "") -> str:
    """Return the summary of ``entries`` in at most ``limit`` tokens; empty only if there is nothing to summarise.

    ``earlier`` is a summary of earlier messages. It stands in front unchanged, as far as there is room. Of very many
    entries only the first and the newest are read.
    """
    if not entries and not earlier:
        return ""
    new = write_covered(cover_bounded(entries), limit=limit * 3 // 4 if earlier else limit, encode=encode)
    text = join_summaries(earlier, new, limit=limit, encode=encode) if earlier else new
    return text or _least(entries, earlier, limit=limit, encode=encode)


def cover_bounded(entries: Sequence[Entry]) -> CoveredFacts:
    """Return the facts of ``entries``; of very many, those of the first and the newest.

    Facts of the first entries that messages in between may have revoked are left out.
    """
    if len(entries) <= FIRST_ENTRIES + NEWEST_ENTRIES:
        return cover(CoveredFacts(), entries)
    return cover(without_ends(cover(CoveredFacts(), entries[:FIRST_ENTRIES])), entries[-NEWEST_ENTRIES:])


def without_ends(covered: CoveredFacts) -> CoveredFacts:
    """Return ``covered`` without what later messages can make untrue."""
    lasting = tuple(fact for fact in covered.facts if fact.section in ("Goals", "Decisions", "Done", "used"))
    return replace(covered, facts=lasting, names=())


def write_covered(
    covered: CoveredFacts, *, limit: int, encode: Encode, after: int = 0, up_to: int | None = None
) -> str:
    """Write the facts of messages after ``after`` and up to ``up_to``; empty if none fits."""
    return _render(write_sections(covered, after=after, up_to=up_to), limit=limit, encode=encode)


def write_least(covered: CoveredFacts) -> str:
    """Return the shortest summary where no fact exists or fits; empty if nothing is covered."""
    if not covered.last_seq:
        return ""
    return f"Messages {covered.first_seq} to {covered.last_seq} of the conversation are not shown."


def join_summaries(earlier: str, later: str, *, limit: int, encode: Encode) -> str:
    """Join a summary and that of later messages, in at most ``limit`` tokens; the first one is shortened at its end."""
    if not earlier or not later:
        return _fitting(earlier or later, limit, encode)
    room = limit - encode(later) - encode(SINCE) - 4
    front = _fitting(earlier, room, encode)
    return f"{front}\n\n{SINCE}\n{later}" if front else later


def _fitting(text: str, limit: int, encode: Encode) -> str:
    """As many whole lines of ``text`` from its beginning as fit."""
    lines = text.splitlines()
    if encode(text) <= limit:
        return text
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if encode("\n".join(lines[:middle])) <= limit else (low, middle - 1)
    return "\n".join(lines[:low])


def digest_result(call: str, text: str, *, runes: int) -> str:
    """Digest one archived tool result without a model: its call, then beginning and end, in at most ``runes``
    characters.
    """
    body = text.strip() or "(no output)"
    return ends(f"{clip_line(call, runes // 4)}\n{body}" if call else body, runes, "\n[...]\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SectionLine:
    section: str
    index: int
    text: str


def _render(sections: Mapping[str, list[str]], *, limit: int, encode: Encode) -> str:
    chosen: list[_SectionLine] = []
    spent = 0
    for line in _by_turns(sections):
        is_first = all(other.section != line.section for other in chosen)
        cost = encode(f"- {line.text}\n") + (encode(f"## {line.section}\n") if is_first else 0)
        if spent + cost <= limit:
            spent += cost
            chosen.append(line)
    # Tokens of pieces need not add up to those of the whole.
    while chosen and encode(_write(chosen)) > limit:
        chosen.pop()
    return _write(chosen)


def _by_turns(sections: Mapping[str, list[str]]) -> Iterator[_SectionLine]:
    """Yield the lines in the order in which they get room: round by round, one section after the other."""
    queues = {name: list(_preferred(name, sections.get(name, []))) for name in SECTIONS}
    while any(queues.values()):
        for name, queue in queues.items():
            for _ in range(PER_ROUND.get(name, 1)):
                if queue:
                    yield queue.pop(0)


def _preferred(section: str, lines: Sequence[str]) -> Iterator[_SectionLine]:
    """Names as they are ranked; of everything else the first line, then the newest backwards."""
    placed = [_SectionLine(section=section, index=index, text=text) for index, text in enumerate(lines)]
    if section == NAMES:
        return iter(placed)
    return iter([*placed[:1], *reversed(placed[1:])])


def _write(chosen: Sequence[_SectionLine]) -> str:
    pieces = []
    for name in SECTIONS:
        lines = sorted((line for line in chosen if line.section == name), key=lambda line: line.index)
        if lines:
            pieces.append("\n".join([f"## {name}", *(f"- {line.text}" for line in lines)]))
    return "\n".join(pieces)


def _least(entries: Sequence[Entry], earlier: str, *, limit: int, encode: Encode) -> str:
    """Return as much of one line as fits, if no whole line does."""
    line = next((clip_line(text) for entry in entries if (text := _any_words(entry.message))), "") or clip_line(earlier)
    text = line or f"{len(entries)} messages without words"
    while len(text) > 1 and encode(text) > limit:
        text = head(text, len(text) // 2) or text[0]
    return text


def _any_words(message: Message) -> str:
    return " ".join(part.text for part in message.parts if isinstance(part, Text | ToolResult))[:LINE].strip()
