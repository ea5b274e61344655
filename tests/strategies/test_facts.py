"""A checkpoint without a model says nothing that is not so at the end of what it covers, over any number of epochs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersely.domain.history.history import CoveredFacts, Entry
from tersely.domain.history.turns import group_turns
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.epochs.policies import Auto
from tersely.strategies.presets import Compact, Strategy, Trim
from tersely.strategies.summaries.activity_log import clip_line
from tersely.strategies.summaries.extractive import summarize_without_model, write_covered
from tersely.strategies.summaries.facts import LINE, TASK, cover, write_sections
from tersely.strategies.summaries.references import extract_identifiers, message_text
from tests.builders import assistant, call, result, user
from tests.strategies.histories import call_model, load, place

ASKED = ["Please fix src/auth.py.", "You must not touch the schema.", "", "ok", "Why did build_7 fail?", "go on"]
SAID = [
    "Reading the file now.",
    "I decided to use a guard instead of a try block.",
    "All tests pass in src/auth.py now.",
    "TODO: a test for expired_tokens. Shall I push it?",
    "",
]
RESULTS = ["ok", "TypeError: 'NoneType' is not subscriptable", "exit code 1\nbuild_7 FAILED", "42 passed in mod_3.py"]


@st.composite
def steps(draw: st.DrawFn) -> list[Message]:
    """Generate a turn: a question, calls that may stay without result and may be made again, a reply or none."""
    messages: list[Message] = [user(draw(st.sampled_from(ASKED)))]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(1, 6))
        name = draw(st.sampled_from(["read", "bash"]))
        messages.append(assistant(draw(st.sampled_from(SAID)), call(f"c{number}", name, {"n": number % 3})))
        if draw(st.integers(0, 5)):
            messages.append(result(f"c{number}", draw(st.sampled_from(RESULTS))))
    if draw(st.integers(0, 4)):
        messages.append(assistant(draw(st.sampled_from(SAID))))
    return messages


histories = st.lists(steps(), min_size=1, max_size=12).map(lambda turns: place(*(m for turn in turns for m in turn)))


def untrue(text: str, entries: Sequence[Entry]) -> list[str]:
    """Return the statements of ``text`` that are not so at the end of ``entries``."""
    found: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("- "):
            found += [f"{section}: {line}"] if not _is_so(section, line[2:], entries) else []
        elif line and not line.startswith("Messages "):
            found.append(line)
    return found


def _is_so(section: str, line: str, entries: Sequence[Entry]) -> bool:
    if section == "Files and names":
        name, _, turn = line.rpartition(" t")
        mentions = [e.turn for e in entries if name in _names(e)]
        return bool(mentions) and mentions[-1] == int(turn)
    head = re.match(r"t(\d+): (.*)", line)
    assert head, line
    of_turn = [entry for entry in entries if entry.turn == int(head[1])]
    statement = head[2]
    if section == "Open":
        return _is_open(statement, of_turn, entries)
    if section == "Goals":
        return any(
            statement in (clip_line(e.message.text, TASK), clip_line(e.message.text, LINE))
            for e in _of(of_turn, "user")
        )
    if section == "Decisions":
        role, _, quote = statement.partition(" said: ")
        return any(quote in e.message.text for e in _of(of_turn, role))
    if section == "Errors":
        return _stands(statement, of_turn, entries)
    used = statement.removeprefix("used ")
    if used != statement:
        return set(used.split(", ")) <= {c.name for e in of_turn for c in e.message.calls}
    return any(statement in e.message.text for e in _of(of_turn, "assistant"))


def _is_open(statement: str, of_turn: Sequence[Entry], entries: Sequence[Entry]) -> bool:
    if statement.startswith("no result yet of "):
        return statement.removeprefix("no result yet of ") in _waiting(entries, of_turn)
    last = entries[-1]
    if statement == "not answered yet":
        return last in of_turn and last.message.role == "user"
    if statement.startswith("the assistant asked: "):
        question = statement.removeprefix("the assistant asked: ")
        return last in of_turn and last.message.role == "assistant" and last.message.text.endswith(question)
    quote = statement.removeprefix("the assistant said: ")
    replies = [e for e in entries if e.message.role == "assistant" and not e.message.calls]
    return quote != statement and replies[-1] in of_turn and quote in replies[-1].message.text


def _waiting(entries: Sequence[Entry], of_turn: Sequence[Entry]) -> set[str]:
    waiting: dict[str, tuple[Entry, str]] = {}
    for entry in entries:
        for each in entry.message.calls:
            waiting[each.id] = (entry, clip_line(f"{each.name} {each.arguments}", LINE))
        for part in entry.message.results:
            waiting.pop(part.call_id, None)
    return {text for entry, text in waiting.values() if entry in of_turn}


def _stands(line: str, of_turn: Sequence[Entry], entries: Sequence[Entry]) -> bool:
    """Return whether the error was met in the turn, and the same call did not go well later."""
    calls: dict[str, Any] = {}
    met: dict[tuple[Any, str], Entry] = {}
    for entry in entries:
        calls.update({each.id: (each.name, each.arguments) for each in entry.message.calls})
        for part in entry.message.results:
            key = calls.get(part.call_id)
            met = {k: e for k, e in met.items() if k[0] != key or key is None}
            met.update({(key, text): entry for text in part.text.splitlines()})
        if entry.message.role == "user":
            met[None, entry.message.text] = entry
    return any(text == line and entry in of_turn for (_, text), entry in met.items())


def _of(entries: Sequence[Entry], role: str) -> list[Entry]:
    return [entry for entry in entries if entry.message.role == role]


def _names(entry: Entry) -> list[str]:
    return [name for text in message_text(entry.message) for name in extract_identifiers(text)]


@given(histories, st.lists(st.integers(1, 60), max_size=6), st.integers(60, 800))
def test_facts_are_true_wherever_the_history_is_cut(entries, cuts, limit):
    covered = CoveredFacts()
    places = sorted({min(cut, len(entries)) for cut in cuts} | {len(entries)})
    for start, end in zip([0, *places], places, strict=False):
        covered = cover(covered, entries[start:end])
        assert untrue(write_covered(covered, limit=limit, encode=estimate_text), entries[:end]) == []
    assert untrue(summarize_without_model(entries, limit=2_000, encode=estimate_text), entries) == []


@given(histories, st.sampled_from([1, 2, 3, 5]))
def test_facts_covered_in_pieces_equal_facts_covered_at_once(entries, size):
    pieces = CoveredFacts()
    for start in range(0, len(entries), size):
        pieces = cover(pieces, entries[start : start + size])
    whole, sections = write_sections(cover(CoveredFacts(), entries)), write_sections(pieces)
    assert sections["Open"] == whole["Open"]
    assert sections["Errors"] == whole["Errors"] or len(sections["Errors"]) >= 3
    assert sorted(sections["Files and names"]) == sorted(whole["Files and names"])


@pytest.mark.parametrize(
    "strategy", [Compact(max_tokens=400, keep_recent_tokens=150), Trim(max_context_tokens=1_000, max_context_turns=3)]
)
@settings(max_examples=40)
@given(turns=st.lists(steps(), min_size=6, max_size=20))
def test_no_statement_of_a_checkpoint_is_false_over_several_epochs(strategy: Strategy, turns: list[list[Message]]):
    history = place(*(message for turn in turns for message in turn))
    epoch = None
    epochs = 0
    for end in range(1, len(history) + 1):
        if history[end - 1].message.role == "assistant":
            continue
        so_far = history[:end]
        now = so_far[-1].created_at + timedelta(seconds=1)
        context = call_model(load(so_far, epoch), strategy=strategy, policy=Auto(), now=now)
        if epoch is None or context.epoch.number != epoch.number:
            epochs += 1
        epoch = context.epoch
        covered = epoch.covered
        if covered is not None:
            gone = [entry for entry in so_far if entry.seq < epoch.cut and entry.seq not in epoch.kept]
            assert untrue(_text_of(context), gone) == []
    assert group_turns(history)


def _text_of(context: Any) -> str:
    texts = [m.text for m in context.epoch.head if m.layer == "summary"]
    texts += [p.text for p in context.epoch.prefixes if p.layer == "summary"]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("[")]
    return "\n".join(lines)
