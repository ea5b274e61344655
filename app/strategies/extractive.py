"""A summary without a model: what was asked, decided and done, which names were touched, what failed, what is open.

Deterministic, bounded in tokens, and in the same sections as the checkpoint that a model is asked for, so that either
can take up the other. Lines compete for the budget: each section in turn gets its best next line until nothing fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.domain.clipping import ends, head
from app.domain.history import Entry
from app.domain.messages import Message, Text, ToolResult
from app.domain.tokens import Encode
from app.domain.turns import Turn, group_turns, write_turn_id
from app.strategies.activity_log import clip_line, derive_terse
from app.strategies.references import gather

SECTIONS = ("Goals", "Decisions", "Done", "Files and names", "Errors", "Open")

LINE = 200
# The task itself may take more room than what is said about it.
TASK = 600
# So much of a text is looked through, half of it at each end: what fails is said at the end, what is asked in front.
LOOK_AT = 20_000
MAX_LINES = 400
# Of a longer history the beginning and the newest messages are looked through: of each section the first lines and the
# newest are what stays anyway, and reading ten thousand messages takes seconds.
FIRST_ENTRIES, NEWEST_ENTRIES = 100, 900
HEADING = "### STATE"
# A turn of so many steps is told step by step; a sentence of fewer blanks says little.
LONG_TURN = 6
FEW_WORDS = 3
LOOK_AHEAD = 2_000
# Lines that a section may have at all; what was carried over from an earlier summary counts.
MOST = {"Goals": 12, "Decisions": 24, "Done": 40, "Files and names": 40, "Errors": 16, "Open": 12}
# What other checkpoints call them.
ALIASES = {
    "constraints": "Goals",
    "task": "Goals",
    "key decisions": "Decisions",
    "critical": "Files and names",
    "next": "Open",
    "in progress": "Open",
    "blocked": "Open",
    "to do": "Open",
}
# A round gives each section one line; names are short and many.
PER_ROUND = {"Files and names": 3}

_SENTENCES = re.compile(r"(?<=[.!?。！？])\s+|\n+")
# What an assistant settles, and what a user demands.
_DECISION = re.compile(
    r"\b(?:decid\w+|decision|chose\w*|agreed|instead of|rather than|we(?:'ll| will) (?:use|keep|go)|going with|"
    r"because|the (?:root )?(?:cause|reason) (?:is|was))\b",
    re.IGNORECASE,
)
_DEMAND = re.compile(
    r"\b(?:must(?: not|n't)?|should(?: not|n't)|do not|don't|never|always|prefer\w*|instead|rather than|only|"
    r"make sure|be sure|keep)\b",
    re.IGNORECASE,
)
_ERROR = re.compile(
    r"\b[A-Za-z_.]*(?:Error|Exception)\b|\b(?:error|fatal|panic)\b ?[:\[(]|\b(?:failed|denied|not found|timed out)\b|"
    r"\bFAILED\b|\bsegfault\b|exit (?:code|status) [1-9]"
)
_OPEN = re.compile(
    r"\b(?:TODO|FIXME|next steps?|next,|remaining|remains|still (?:need|have|to|fails?)|not yet|left to do|"
    r"follow[- ]up|blocked|waiting for|action items?)\b",
    re.IGNORECASE,
)
_TERSE = re.compile(r"<terse>.*?</terse>", re.DOTALL)
_MARKUP = re.compile(r"^[\s#>*\-`\d.)]{1,16}")
_HEADING = re.compile(r"#{1,4} +(.{1,40})")


def summarize(entries: Sequence[Entry], *, limit: int, encode: Encode, earlier: str = "") -> str:
    """The summary of ``entries`` in at most ``limit`` tokens; never empty unless there is nothing to summarise.

    ``earlier`` is a summary of what came before (extractive, or a checkpoint with the same headings), merged in.
    """
    if not entries and not earlier:
        return ""
    found = _merge(read_sections(earlier), _sections(entries))
    return _render(found, limit=limit, encode=encode) or _least(entries, earlier, limit=limit, encode=encode)


def digest_result(call: str, text: str, *, runes: int) -> str:
    """One archived tool result without a model: its call, then beginning and end, in at most ``runes`` characters."""
    body = text.strip() or "(no output)"
    return ends(f"{clip_line(call, runes // 4)}\n{body}" if call else body, runes, "\n[...]\n")


def derive_state(entries: Sequence[Entry], *, limit: int, encode: Encode) -> str:
    """A ``### STATE`` block (std::slop, "State Format") in at most ``limit`` tokens: as much of each line as fits."""
    found = _sections(entries)
    names = [line.rpartition(" ")[0] for line in found["Files and names"]]
    values = [name for name in names if name.replace(".", "").replace(":", "").lstrip("#$").isdigit()]
    lines = {
        "Goal": [_bare(line) for line in found["Goals"][-1:]],
        "Context": [name for name in names if name not in values][:12],
        "Resolved": [_bare(line) for line in found["Done"][-6:]],
        "Technical Anchors": values[:12],
    }
    for runes in (TASK, LINE, LINE // 2, LINE // 4, LINE // 8):
        text = "\n".join([HEADING, *(f"{name}: {clip_line('; '.join(said), runes)}" for name, said in lines.items())])
        if encode(text) <= limit:
            return text
    return HEADING


def read_sections(text: str) -> dict[str, list[str]]:
    """The lines of a summary by section; what stands under no known heading is taken for done."""
    found: dict[str, list[str]] = {}
    section = "Done"
    for raw in text.splitlines():
        line = raw.strip()
        if heading := _HEADING.fullmatch(line):
            section = _known(heading[1])
        elif line and line not in ("-", "(none)", "none"):
            found.setdefault(section, []).append(clip_line(line.removeprefix("- "), TASK))
    return found


def _known(heading: str) -> str:
    word = heading.strip(" :").lower()
    known = {**{name.split()[0].lower().rstrip("s"): name for name in SECTIONS}, **ALIASES}
    return next((section for start, section in known.items() if word.startswith(start)), "Done")


def _sections(entries: Sequence[Entry]) -> dict[str, list[str]]:
    if len(entries) > FIRST_ENTRIES + NEWEST_ENTRIES:
        entries = [*entries[:FIRST_ENTRIES], *entries[-NEWEST_ENTRIES:]]
    turns = group_turns(entries)
    names = gather((), entries)[: MOST["Files and names"]]
    return {
        "Goals": list(_goals(turns)),
        "Decisions": list(_decisions(entries)),
        "Done": list(_done(turns)),
        "Files and names": [f"{name.text} {write_turn_id(name.turn)}" for name in names],
        "Errors": list(_errors(entries)),
        "Open": list(_open_ends(turns)),
    }


def _decisions(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in _of(entries, "assistant", "user"):
        pattern = _DEMAND if entry.message.role == "user" else _DECISION
        for line in _matching(_words(entry), pattern):
            yield _at(entry, line)


def _errors(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in _of(entries, "tool", "user"):
        for line in _matching(_outcome(entry), _ERROR):
            yield _at(entry, line)


def _of(entries: Iterable[Entry], *roles: str) -> Iterator[Entry]:
    return (entry for entry in entries if entry.message.role in roles)


def _at(entry: Entry, line: str) -> str:
    return f"{write_turn_id(entry.turn)}: {line}"


def _goals(turns: Sequence[Turn]) -> Iterator[str]:
    for turn in turns:
        for number, entry in enumerate(turn.opening):
            asked = clip_line(_words(entry), TASK if turn is turns[0] and number == 0 else LINE)
            if asked:
                yield _at(entry, asked)


def _done(turns: Sequence[Turn]) -> Iterator[str]:
    """What a turn came to; of a long one also what was said on the way."""
    for turn in turns:
        steps = turn.steps
        if not steps:
            continue
        said = [line for step in steps[:-1] if (line := _telling(step.entries[0]))] if len(steps) >= LONG_TURN else []
        final = steps[-1].entries[0]
        last = "" if final.message.calls else _telling(final)
        for line in [*said[-MOST["Done"] // 2 :], last or derive_terse(turn.entries).text]:
            yield _at(final, line)


def _telling(entry: Entry) -> str:
    """The first sentence of a message that says anything: "Great!" does not."""
    pieces = (clip_line(_MARKUP.sub("", piece), LINE) for piece in _SENTENCES.split(_words(entry)[:LOOK_AHEAD]))
    return next((line for line in pieces if line.count(" ") >= FEW_WORDS), "")


def _open_ends(turns: Sequence[Turn]) -> Iterator[str]:
    for turn in turns:
        for entry in _of(turn.entries, "assistant"):
            for line in _matching(_words(entry), _OPEN):
                yield _at(entry, line)
    if not turns:
        return
    last = turns[-1].entries[-1]
    answered = {result.call_id for entry in turns[-1].entries for result in entry.message.results}
    for entry in turns[-1].entries:
        for call in entry.message.calls:
            if call.id not in answered:
                yield _at(entry, f"no result yet of {clip_line(f'{call.name} {call.arguments}', LINE)}")
    if last.message.starts_turn:
        yield _at(last, "not answered yet")
    elif last.message.role == "assistant" and (asked := _last_question(_words(last))):
        yield _at(last, f"the assistant asked: {asked}")


def _last_question(text: str) -> str:
    sentences = [piece for piece in _SENTENCES.split(text[-LINE * 4 :]) if piece.strip()]
    return clip_line(sentences[-1], LINE) if sentences and sentences[-1].rstrip().endswith(("?", "？")) else ""


def _words(entry: Entry) -> str:
    return _TERSE.sub("", _excerpt(entry.message.text))


def _outcome(entry: Entry) -> str:
    """What was reported to the model: results, and what the user says."""
    return "\n".join(_excerpt(part.text) for part in entry.message.parts if isinstance(part, Text | ToolResult))


def _excerpt(text: str) -> str:
    return ends(text, LOOK_AT, "\n")


def _matching(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """The sentences of ``text`` that ``pattern`` finds something in, each on one line; at most three."""
    pieces = (_MARKUP.sub("", piece) for piece in _SENTENCES.split(text)[:MAX_LINES])
    found = (clip_line(piece, LINE) for piece in pieces if pattern.search(piece[: LINE * 4]))
    return (line for line, _ in zip(found, range(3), strict=False) if line)


def _merge(earlier: dict[str, list[str]], found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Both, without doubles. Of too many lines the first (the task) and the newest stay; names are best first."""
    merged = {}
    for name in SECTIONS:
        # What an earlier summary held for open is told by what came after it, if anything is.
        old = earlier.get(name, []) if name != "Open" or not found[name] else earlier.get(name, [])[-3:]
        if name == "Files and names":
            lines = _without_doubles(sum(zip(found[name], old, strict=False), ()) + tuple(_rest(found[name], old)))
            merged[name] = lines[: MOST[name]]
            continue
        lines = _without_doubles([*old, *found[name]])
        merged[name] = lines if len(lines) <= MOST[name] else [lines[0], *lines[1 - MOST[name] :]]
    return merged


def _rest(one: list[str], other: list[str]) -> list[str]:
    shared = min(len(one), len(other))
    return one[shared:] + other[shared:]


def _without_doubles(lines: Iterable[str]) -> list[str]:
    seen: dict[str, str] = {}
    for line in lines:
        seen.setdefault(_bare(line), line)
    return list(seen.values())


def _bare(line: str) -> str:
    """A line without the turn that it is of."""
    return re.sub(r"^t\d+: | t\d+$", "", line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    section: str
    place: int
    text: str


def _render(sections: dict[str, list[str]], *, limit: int, encode: Encode) -> str:
    chosen: list[_Line] = []
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


def _by_turns(sections: dict[str, list[str]]) -> Iterator[_Line]:
    """The lines in the order in which they get room: round by round, one section after the other."""
    queues = {name: list(_preferred(name, sections.get(name, []))) for name in SECTIONS}
    while any(queues.values()):
        for name, queue in queues.items():
            for _ in range(PER_ROUND.get(name, 1)):
                if queue:
                    yield queue.pop(0)


def _preferred(section: str, lines: Sequence[str]) -> Iterator[_Line]:
    """Names as they are ranked; of everything else the first line, then the newest backwards."""
    placed = [_Line(section=section, place=place, text=text) for place, text in enumerate(lines)]
    if section == "Files and names":
        return iter(placed)
    return iter([*placed[:1], *reversed(placed[1:])])


def _write(chosen: Sequence[_Line]) -> str:
    pieces = []
    for name in SECTIONS:
        lines = sorted((line for line in chosen if line.section == name), key=lambda line: line.place)
        if lines:
            pieces.append("\n".join([f"## {name}", *(f"- {line.text}" for line in lines)]))
    return "\n".join(pieces)


def _least(entries: Sequence[Entry], earlier: str, *, limit: int, encode: Encode) -> str:
    """Where not one line fits, or nothing was said: as much of one line as there is room for."""
    said = next((clip_line(text) for entry in entries if (text := _any_words(entry.message))), "") or clip_line(earlier)
    text = said or f"{len(entries)} messages without words"
    while len(text) > 1 and encode(text) > limit:
        text = head(text, len(text) // 2) or text[0]
    return text


def _any_words(message: Message) -> str:
    return " ".join(part.text for part in message.parts if isinstance(part, Text | ToolResult))[:LINE].strip()
