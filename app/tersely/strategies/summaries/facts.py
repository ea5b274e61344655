"""Facts of a history, from which summaries without a model are written.

A fact is a quotation with its turn, or something that can be checked: a call without a result, the last mention of a
name. When more messages are covered, `cover` removes facts that no longer hold. Summaries are not copied into later
ones, so no outdated sentence survives. Facts are bounded in number and length: the cost depends on the new messages
alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

from msgspec.structs import replace

from tersely.domain.history.history import CoveredFacts, Entry, Fact
from tersely.domain.history.turns import Turn, group_turns, write_turn_id
from tersely.domain.messages import Text, ToolCall, ToolResult
from tersely.domain.text.clipping import ends
from tersely.strategies.summaries.activity_log import clip_line
from tersely.strategies.summaries.references import gather

GOALS, DECISIONS, DONE, NAMES, ERRORS, OPEN = SECTIONS = (
    "Goals",
    "Decisions",
    "Done",
    "Files and names",
    "Errors",
    "Open",
)
# Parts of sections that are kept apart until they are written.
USED, CALLS, STATED = "used", "calls", "said to be open"

LINE = 200
# Characters of the task, which may be longer than other facts.
TASK = 600
# Characters of a text that are searched, half of them at each end: errors stand at the end, requests at the beginning.
LOOK_AT = 20_000
MAX_LINES = 400
# Number of steps from which on a turn is described step by step; minimum of blanks in a meaningful sentence.
LONG_TURN = 6
FEW_WORDS = 3
LOOK_AHEAD = 2_000
# Number of facts kept in a section: the first one and the newest.
MOST: Mapping[str, int] = {GOALS: 12, DECISIONS: 24, DONE: 40, ERRORS: 16, OPEN: 8, CALLS: 12, STATED: 8, USED: 24}
MOST_NAMES = 40

_SENTENCES = re.compile(r"(?<=[.!?。！？])\s+|\n+")
# Patterns of an assistant's decisions and of a user's demands.
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


def cover(before: CoveredFacts, entries: Iterable[Entry]) -> CoveredFacts:
    """Return the facts that hold after ``entries``, which follow the messages that ``before`` covers (or precede them,
    if late).
    """
    new = sorted((entry for entry in entries if not entry.is_ours), key=lambda entry: entry.seq)
    if not new:
        return before
    turns = group_turns(new)
    replied = [entry for entry in new if entry.message.role == "assistant" and not entry.message.calls]
    outdated = (OPEN, STATED) if replied else (OPEN,)
    facts = [fact for fact in before.facts if fact.section not in outdated]
    facts = _settle_calls_and_errors(facts, new)
    for section, found in (
        (GOALS, _goals(turns)),
        (DECISIONS, _decisions(new)),
        (DONE, _done(turns)),
        (STATED, _said_to_be_open(replied[-1]) if replied else ()),
        (OPEN, _open_ends(turns[-1])),
    ):
        facts += [replace(fact, section=section) for fact in found]
    facts = _add_used(facts, turns)
    names = gather(before.names, new)[:MOST_NAMES]
    return replace(
        before,
        facts=tuple(_bounded(facts)),
        names=names,
        first_seq=min(before.first_seq, new[0].seq) if before.last_seq else new[0].seq,
        last_seq=max(before.last_seq, new[-1].seq),
    )


def write_sections(covered: CoveredFacts, *, after: int = 0, up_to: int | None = None) -> dict[str, list[str]]:
    """Write the lines of each section for messages after ``after`` and up to ``up_to`` (sequence numbers).

    Open points are those at the end.
    """
    last = covered.last_seq if up_to is None else up_to
    is_end = last >= covered.last_seq > after
    lines: dict[str, list[str]] = {name: [] for name in SECTIONS}
    for fact in sorted(covered.facts, key=lambda each: each.seq):
        at = write_turn_id(fact.turn)
        if fact.section in (OPEN, CALLS, STATED):
            if is_end:
                replies = f"no result yet of {fact.text}" if fact.section == CALLS else fact.text
                lines[OPEN].append(f"{at}: {replies}")
        elif after < fact.seq <= last:
            replies = f"used {fact.text}" if fact.section == USED else fact.text
            lines[DONE if fact.section == USED else fact.section].append(f"{at}: {replies}")
    lines[NAMES] = [f"{n.text} {write_turn_id(n.turn)}" for n in covered.names if after < n.last_seq <= last]
    return {name: list(dict.fromkeys(found)) for name, found in lines.items()}


def _bounded(facts: Sequence[Fact]) -> Iterator[Fact]:
    """Return the first fact and the newest ones of each section, without repetitions in a turn."""
    for section, most in MOST.items():
        of_section = {(f.turn, f.text, f.key): f for f in facts if f.section == section}
        found = sorted(of_section.values(), key=lambda fact: fact.seq)
        yield from found if len(found) <= most else [found[0], *found[1 - most :]]


def _goals(turns: Sequence[Turn]) -> Iterator[Fact]:
    for index, turn in enumerate(turns):
        for number, entry in enumerate(turn.opening):
            question = clip_line(_words(entry), TASK if index == 0 and number == 0 else LINE)
            if question:
                yield _fact(entry, question)


def _decisions(entries: Sequence[Entry]) -> Iterator[Fact]:
    for entry in entries:
        if entry.message.role in ("assistant", "user"):
            pattern = _DEMAND if entry.message.role == "user" else _DECISION
            for line in _matching(_words(entry), pattern):
                yield _fact(entry, f"{entry.message.role} said: {line}")


def _done(turns: Sequence[Turn]) -> Iterator[Fact]:
    """Return the result of a turn in the assistant's words; for a long turn also its intermediate replies."""
    for turn in turns:
        steps = turn.steps
        if not steps:
            continue
        replies = [step.entries[0] for step in steps]
        for entry in [*(replies[:-1] if len(steps) >= LONG_TURN else [])[-MOST[DONE] // 2 :], replies[-1]]:
            if line := _telling(entry):
                yield _fact(entry, line)


def _add_used(facts: Sequence[Fact], turns: Sequence[Turn]) -> list[Fact]:
    """Add the tools of a turn that ended without text, as far as known."""
    used_turns = {fact.turn for fact in facts if fact.section == DONE}
    left = [fact for fact in facts if fact.section != USED or fact.turn not in used_turns]
    for turn in turns:
        calls = [(entry, call) for entry in turn.entries for call in entry.message.calls]
        if turn.number in used_turns or not calls:
            continue
        before = next((fact for fact in left if fact.section == USED and fact.turn == turn.number), None)
        names = dict.fromkeys([*(before.text.split(", ") if before else ()), *(call.name for _, call in calls)])
        left = [fact for fact in left if fact is not before]
        left.append(replace(_fact(calls[-1][0], clip_line(", ".join(names), LINE)), section=USED))
    return left


def _settle_calls_and_errors(facts: Sequence[Fact], entries: Sequence[Entry]) -> list[Fact]:
    """Return calls without a result, and errors, without those of calls that succeeded when repeated."""
    waiting = {fact.key.partition(" ")[2]: fact for fact in facts if fact.section == CALLS}
    signatures = {call: fact.key.partition(" ")[0] for call, fact in waiting.items()}
    met = [fact for fact in facts if fact.section == ERRORS]
    for entry in entries:
        for part in entry.message.parts:
            if isinstance(part, ToolCall):
                signatures[part.id] = _signature(part)
                text = clip_line(f"{part.name} {part.arguments}", LINE)
                key = f"{signatures[part.id]} {part.id}"
                waiting[part.id] = replace(_fact(entry, text), section=CALLS, key=key)
            elif isinstance(part, ToolResult):
                met = _answer(waiting, signatures, met, entry, part.call_id, part.text)
            elif isinstance(part, Text) and part.result_of:
                met = _answer(waiting, signatures, met, entry, part.result_of, part.text)
            elif isinstance(part, Text) and entry.message.role == "user":
                met += _errors_in(entry, part.text, "")
        for call_id in entry.answered:
            waiting.pop(call_id, None)
    return [*(fact for fact in facts if fact.section not in (CALLS, ERRORS)), *waiting.values(), *met]


def _answer(
    waiting: dict[str, Fact], signatures: Mapping[str, str], met: Sequence[Fact], entry: Entry, call_id: str, text: str
) -> list[Fact]:
    """Settle a call by its result; return the errors that are known then."""
    waiting.pop(call_id, None)
    key = signatures.get(call_id, "")
    return [*(fact for fact in met if not key or fact.key != key), *_errors_in(entry, text, key)]


def _errors_in(entry: Entry, text: str, key: str) -> Iterator[Fact]:
    for line in _matching(_excerpt(text), _ERROR):
        yield replace(_fact(entry, line), section=ERRORS, key=key)


def _signature(call: ToolCall) -> str:
    return blake2b(f"{call.name} {call.arguments}".encode("utf-8", "replace"), digest_size=6).hexdigest()


def _open_ends(turn: Turn) -> Iterator[Fact]:
    """Return what the last message leaves open."""
    last = turn.entries[-1]
    if last.message.starts_turn and not any(isinstance(p, Text) and p.result_of for p in last.message.parts):
        yield _fact(last, "not answered yet")
    if last.message.role == "assistant" and not last.message.calls and (question := _last_question(_words(last))):
        yield _fact(last, f"the assistant asked: {question}")


def _said_to_be_open(reply: Entry) -> Iterator[Fact]:
    """Return the points that the newest reply lists as open, if no later message reports on them."""
    for line in _matching(_words(reply), _OPEN):
        yield _fact(reply, f"the assistant said: {line}")


def _fact(entry: Entry, text: str) -> Fact:
    return Fact(section="", turn=entry.turn, seq=entry.seq, text=text)


def _telling(entry: Entry) -> str:
    """Return the first meaningful sentence of a message; "Great!" is none."""
    pieces = (clip_line(_MARKUP.sub("", piece), LINE) for piece in _SENTENCES.split(_words(entry)[:LOOK_AHEAD]))
    return next((line for line in pieces if line.count(" ") >= FEW_WORDS), "")


def _last_question(text: str) -> str:
    sentences = [piece for piece in _SENTENCES.split(text[-LINE * 4 :]) if piece.strip()]
    return clip_line(sentences[-1], LINE) if sentences and sentences[-1].rstrip().endswith(("?", "？")) else ""


def _words(entry: Entry) -> str:
    """Return the words of whoever wrote the message, without a result that is shown as text."""
    parts = entry.message.parts
    is_mixed = any(isinstance(part, Text) and part.result_of for part in parts)
    own = (part.text for part in parts if isinstance(part, Text) and not part.result_of)
    return _TERSE.sub("", _excerpt("\n".join(own) if is_mixed else entry.message.text))


def _excerpt(text: str) -> str:
    return ends(text, LOOK_AT, "\n")


def _matching(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Return at most three sentences of ``text`` that match ``pattern``, each on one line."""
    pieces = (_MARKUP.sub("", piece) for piece in _SENTENCES.split(text)[:MAX_LINES])
    found = (clip_line(piece, LINE) for piece in pieces if pattern.search(piece[: LINE * 4]))
    return (line for line, _ in zip(found, range(3), strict=False) if line)
