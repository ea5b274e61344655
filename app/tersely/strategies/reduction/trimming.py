"""Trim by turns (CowAgent, "Short-term Memory"): drop the older half, or everything between question and reply.

All stages count the running turn and never drop it: it is the task.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from tersely.domain.history.history import Entry, HeadMessage
from tersely.domain.history.turns import Turn, group_turns
from tersely.domain.messages import Text
from tersely.domain.tokens import Encode, count_text_message
from tersely.strategies.epochs.cutting import must_stay
from tersely.strategies.pipeline import Draft, Edit, Stage, run
from tersely.strategies.prompts import ANSWER_NOW

# "Token Budget Trimming": with fewer turns than this a half of them would be next to everything.
FEW_TURNS = 5


def drop_half_over_turns(max_turns: int) -> Stage:
    """Make a stage that drops the older half of the complete turns, rounded up, when there are more than ``max_turns``
    turns ("Turn Trimming").

    A turn of which only pinned messages are left does not count, since it cannot be dropped.
    """

    def stage(draft: Draft) -> Draft:
        turns = _removable(draft)
        if len(turns) <= max_turns:
            return draft
        return _keep_turns(draft, turns[len(turns) // 2 :])

    return stage


def fit_budget(budget: int) -> Stage:
    """Make a stage that shrinks a draft over ``budget`` tokens: few turns are reduced to their texts, of many turns the
    first half goes ("Token Budget").
    """

    def stage(draft: Draft) -> Draft:
        if draft.tokens <= budget:
            return draft
        turns = _turns(draft)
        if len(turns) < FEW_TURNS:
            return _reduce(draft, turns)
        return _keep_turns(draft, turns[len(turns) // 2 :])

    return stage


def until_steady(*stages: Stage) -> Stage:
    """Make a stage that repeats ``stages`` until they change nothing."""

    def stage(draft: Draft) -> Draft:
        while True:
            before = draft
            draft = run(draft, stages)
            if draft.entries == before.entries:
                return draft

    return stage


def keep_texts(turns: int) -> Stage:
    """Make a stage that reduces the newest ``turns`` complete turns before the running one to question and reply
    ("Session Persistence").
    """

    def stage(draft: Draft) -> Draft:
        newest = _turns(draft)[-(turns + 1) :]
        return _reduce(_keep_turns(draft, newest), newest)

    return stage


def keep_newest_turns(turns: int) -> Stage:
    """Make a stage that keeps at most ``turns`` turns, the running one among them ("Overflow Emergency Handling", step
    2).
    """

    def stage(draft: Draft) -> Draft:
        return _keep_turns(draft, _turns(draft)[-turns:])

    return stage


def clear() -> Stage:
    """Make a stage that keeps only the running turn's question and pinned messages ("Overflow Emergency Handling", step
    3).
    """

    def stage(draft: Draft) -> Draft:
        if not draft.tail:
            return draft
        question = next((e for e in reversed(draft.tail) if e.message.starts_turn), None)
        if question is not None and question is draft.tail[-1]:
            return _cut(draft, question.seq, ())
        return draft.with_cut(_behind(draft), must_stay(draft.kept, draft.tail))

    return stage


def clear_all() -> Stage:
    """Make a stage that empties the context and keeps only pinned messages ("Commands")."""

    def stage(draft: Draft) -> Draft:
        pinned = [entry for entry in must_stay(draft.kept, draft.tail) if not entry.message.starts_turn or entry.pinned]
        return replace(draft.with_cut(_behind(draft), pinned), references=(), excerpts=())

    return stage


def ask_for_answer(max_steps: int, *, encode: Encode) -> Stage:
    """Make a stage that asks a running turn of ``max_steps`` tool steps to answer without further tools ("Key
    Configuration").
    """

    def stage(draft: Draft) -> Draft:
        turns = _turns(draft)
        steps = [step for step in turns[-1].steps if step.entries[0].message.calls] if turns else []
        if len(steps) < max_steps:
            return draft
        text = ANSWER_NOW.format(steps=max_steps)
        message = HeadMessage(layer="max_steps", role="user", text=text, tokens=count_text_message(text, encode))
        return replace(draft, closing=(*draft.closing, message))

    return stage


def _turns(draft: Draft) -> tuple[Turn, ...]:
    return group_turns(draft.entries)


def _removable(draft: Draft) -> tuple[Turn, ...]:
    """Return the running turn, and the earlier turns that contain something to drop."""
    turns = _turns(draft)
    permanent = {entry.seq for entry in must_stay(draft.kept, draft.tail)}
    return tuple(t for t in turns if t is turns[-1] or any(entry.seq not in permanent for entry in t.entries))


def _keep_turns(draft: Draft, turns: Sequence[Turn]) -> Draft:
    """Return the draft with only ``turns``, its newest ones, and the parts of other turns that must stay."""
    staying = {turn.number for turn in turns}
    first = next((entry.seq for entry in draft.tail if entry.turn in staying), draft.cut)
    return _cut(draft, first, (entry for entry in draft.kept if entry.turn in staying))


def _reduce(draft: Draft, turns: Sequence[Turn]) -> Draft:
    """Return complete turns reduced to their first question and last reply; the running turn is unchanged."""
    *complete, running = turns
    texts = [entry for turn in complete for entry in _texts(turn)]
    first = next((entry.seq for entry in draft.tail if entry.turn == running.number), draft.cut)
    edits = [Edit(stage="reduce", turn=turn.number, kept="truncated", reason="question and reply") for turn in complete]
    return _cut(draft, first, texts, edits)


def _behind(draft: Draft) -> int:
    """Return the cut that leaves the tail empty."""
    return max((entry.seq + 1 for entry in draft.tail), default=draft.cut)


def _texts(turn: Turn) -> list[Entry]:
    question = next((entry for entry in turn.entries if entry.message.starts_turn), None)
    reply = next((entry for entry in reversed(turn.entries) if _is_reply(entry)), None)
    return [entry for entry in (question, reply) if entry is not None]


def _is_reply(entry: Entry) -> bool:
    message = entry.message
    has_text = any(isinstance(part, Text) and part.text.strip() for part in message.parts)
    return message.role == "assistant" and has_text and not message.calls


def _cut(draft: Draft, first: int, kept: Iterable[Entry], edits: Iterable[Edit] = ()) -> Draft:
    permanent = must_stay(draft.kept, draft.tail)
    return draft.with_cut(max(first, draft.cut), (*kept, *permanent), edits=edits)
