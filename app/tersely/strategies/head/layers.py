"""Layers of a head: state block, scratchpad, summaries, session memory, and the index of names. Each is a `Stage`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from msgspec.structs import replace

from tersely.domain.history.history import CoveredFacts, Entry, EpochInputs, HeadMessage, Prefix, Summary, TerseEntry
from tersely.domain.history.turns import write_turn_id
from tersely.domain.tokens import Encode, count_text_message
from tersely.strategies import prompts
from tersely.strategies.pipeline import Draft, Stage
from tersely.strategies.summaries.activity_log import clip_line, derive_missing
from tersely.strategies.summaries.extractive import (
    FIRST_ENTRIES,
    NEWEST_ENTRIES,
    join_summaries,
    summarize_without_model,
    without_ends,
    write_covered,
    write_least,
)
from tersely.strategies.summaries.facts import cover
from tersely.strategies.summaries.references import IdentifierCache, gather, render_references, visible_names
from tersely.strategies.summaries.summarizing import read_tasks

# Characters of a session memory entry, for a turn that has just left working memory and for an older one.
FRESH_ENTRY, OLD_ENTRY = 480, 160
# Tokens. A shorter condensed summary has no useful content.
LEAST_SUMMARY = 32


def exchange(layer: str, text: str, acknowledgement: str, encode: Encode) -> tuple[HeadMessage, ...]:
    """Return a user message and its acknowledgement, so that roles keep alternating; nothing for an empty text."""
    if not text:
        return ()
    return (
        HeadMessage(layer=layer, role="user", text=text, tokens=count_text_message(text, encode)),
        HeadMessage(
            layer=layer,
            role="assistant",
            text=acknowledgement,
            tokens=count_text_message(acknowledgement, encode),
        ),
    )


def insert_memos(memos: Sequence[Prefix]) -> Stage:
    """Make a stage that puts memos in front of the messages that the context shows (std::slop, "Semantic
    Memo System").
    """

    def stage(draft: Draft) -> Draft:
        shown = {entry.seq for entry in draft.entries}
        return replace(draft, prefixes=(*draft.prefixes, *(memo for memo in memos if memo.seq in shown)))

    return stage


def insert_text(layer: str, title: str, text: str, acknowledgement: str, *, encode: Encode, seq: int = 0) -> Stage:
    """Return a text under its title, with its acknowledgement; nothing for an empty text.

    ``seq``: the message that contained it, if any.
    """

    def stage(draft: Draft) -> Draft:
        if not text.strip():
            return draft
        covers_to = max(draft.head_covers_to, seq + 1 if seq else 0)
        return replace(draft, head_covers_to=covers_to).with_head(
            *exchange(layer, f"{title}\n{text}", acknowledgement, encode)
        )

    return stage


def insert_references(*, limit: int, encode: Encode, originals: Mapping[int, Entry] | None = None) -> Stage:
    """Return the index of identifiers that the context no longer shows. Candidates from earlier cuts are carried over.

    ``originals``: entries before they were shortened, by sequence number.
    """
    whole = originals or {}
    names = IdentifierCache()

    def stage(draft: Draft) -> Draft:
        shortened = [whole[e.seq] for e in draft.entries if e.is_shortened and e.seq in whole]
        if limit <= 0 or (draft.cut == 1 and not shortened):
            return draft
        references = gather(draft.references, (whole.get(entry.seq, entry) for entry in draft.gone), names)
        text = render_references(
            gather(references, shortened, names) if shortened else references,
            title=prompts.REFERENCES_TITLE,
            limit=limit,
            encode=encode,
            shown=visible_names(draft.entries, names),
            head="\n".join(message.text for message in draft.head),
        )
        found = replace(draft, references=references)
        return found.with_head(*exchange("references", text, prompts.REFERENCES_ACK, encode))

    return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierSummary:
    """The summary of the last epoch, and the range of messages that it covers (none without a summary).

    ``covered`` are the facts behind it; None if they were not stored.
    """

    text: str = ""
    first_seq: int = 1
    last_seq: int = 0
    covered: CoveredFacts | None = None


def insert_checkpoint(
    inputs: EpochInputs, *, earlier: EarlierSummary, limit: int, encode: Encode, is_requested: bool = False
) -> Stage:
    """Return the checkpoint as one user message (tiancaiamao/ai, "Rebuild context"). ``earlier``: the checkpoint of the
    last epoch.
    """

    def stage(draft: Draft) -> Draft:
        made = [summary for summary in inputs.summaries if summary.purpose == "checkpoint"]
        text, covered_to, covered = summary_of_cut(
            draft, made, earlier=earlier, limit=limit, encode=encode, is_requested=is_requested
        )
        if not text:
            return draft
        draft = replace(draft, summary_covers_to=covered_to, covered=covered)
        body = f"{prompts.CHECKPOINT_TITLE}\n\n{text}"
        message = HeadMessage(layer="summary", role="user", text=body, tokens=count_text_message(body, encode))
        return draft.with_head(message).marking(draft.gone, kept="summary", reason="in the summary")

    return stage


def inject_summary(
    inputs: EpochInputs, *, earlier: EarlierSummary, limit: int, encode: Encode, is_requested: bool = False
) -> Stage:
    """Make a stage that puts the summary in front of the first retained user message (CowAgent, "Turn Trimming")."""

    def stage(draft: Draft) -> Draft:
        made = [summary for summary in inputs.summaries if summary.purpose in ("trim", "ahead")]
        text, covered_to, covered = summary_of_cut(
            draft, made, earlier=earlier, limit=limit, encode=encode, is_requested=is_requested
        )
        first = next((entry for entry in draft.entries if entry.message.starts_turn), None)
        if not text or first is None:
            return draft
        draft = replace(draft, summary_covers_to=covered_to, covered=covered)
        body = f"{prompts.SUMMARY_TITLE}\n{text}\n{prompts.SUMMARY_END}\n\n"
        marked = draft.marking(draft.gone, kept="summary", reason="in the summary")
        return marked.with_prefix(Prefix(layer="summary", seq=first.seq, text=body, tokens=encode(body)))

    return stage


def summary_of_cut(
    draft: Draft,
    summaries: Sequence[Summary],
    *,
    earlier: EarlierSummary,
    limit: int,
    encode: Encode,
    is_requested: bool = False,
) -> tuple[str, int, CoveredFacts | None]:
    """Return the summary of everything before the cut that is not kept (empty if nothing was cut), the sequence number
    up to which it covers messages, and the facts behind it.

    It consists of the model's summaries, in order. Without any, it is written without a model, from the facts of all
    cut messages, which each epoch carries over. If it is too long, the newest parts stay. ``is_requested``: a summary
    of everything before the last turn was just requested; it is used even if it extends beyond the cut.
    """
    if draft.cut == 1:
        return "", 0, None
    carried = earlier.covered or CoveredFacts(
        base=earlier.text, base_first=earlier.first_seq, base_last=earlier.last_seq
    )
    covered = _cover(carried, draft.gone)
    fits = [each for each in summaries if (each.first_seq if is_requested else each.last_seq) < draft.cut]
    made = _chain([each for each in fits if each.source == "model"])
    if not made and not covered.base:
        # Summaries of messages before all loaded ones were written without a model, if at all.
        first = covered.first_seq or draft.cut
        made = [each for each in _chain([each for each in fits if each.source != "model"]) if each.first_seq < first]
    if made:
        covered = _with_base(covered, made, limit=limit, encode=encode)
    covered_to = max(draft.cut, covered.last_seq + 1, covered.base_last + 1)
    return _write_summary(covered, limit=limit, encode=encode), covered_to, covered


def _cover(carried: CoveredFacts, gone: Sequence[Entry]) -> CoveredFacts:
    """Return the facts after ``gone``; of very many messages the first and the newest are read."""
    if len(gone) <= FIRST_ENTRIES + NEWEST_ENTRIES:
        return cover(carried, gone)
    return cover(without_ends(cover(carried, gone[:FIRST_ENTRIES])), gone[-NEWEST_ENTRIES:])


def _with_base(covered: CoveredFacts, made: Sequence[Summary], *, limit: int, encode: Encode) -> CoveredFacts:
    """Return ``covered`` together with the summaries ``made``, preceded by an older base that they do not cover."""
    parts = [summary.text for summary in made]
    first = made[0].first_seq
    if covered.base and covered.base_first < first and covered.base_last < made[-1].last_seq:
        parts.insert(0, _without(covered.base, parts))
        first = covered.base_first
    base = _newest_within([part for part in parts if part], limit, encode)
    if covered.base_last > made[-1].last_seq:
        return covered
    return replace(covered, base=base, base_first=first, base_last=made[-1].last_seq)


def _write_summary(covered: CoveredFacts, *, limit: int, encode: Encode) -> str:
    """Write the facts before the base, the base, and the facts after it."""
    if not covered.base:
        return write_covered(covered, limit=limit, encode=encode) or write_least(covered)
    room = max(limit // 4, limit - encode(covered.base))
    after = write_covered(covered, limit=room, encode=encode, after=covered.base_last)
    before = ""
    if covered.last_seq and covered.first_seq < covered.base_first:
        before = write_covered(covered, limit=limit // 4, encode=encode, up_to=covered.base_first - 1)
    front = "\n\n".join(part for part in (before, covered.base) if part)
    return join_summaries(front, after, limit=limit, encode=encode)


def _without(earlier: str, parts: Iterable[str]) -> str:
    """Return ``earlier`` without the ``parts`` that it already contains."""
    for part in parts:
        earlier = earlier.replace(part, "")
    return re.sub(r"\n{3,}", "\n\n", earlier).strip()


def _chain(summaries: Iterable[Summary]) -> list[Summary]:
    """Return the newest summaries that do not overlap, in the order of the history."""
    chain: list[Summary] = []
    for summary in sorted(summaries, key=lambda s: (s.last_seq, -s.first_seq), reverse=True):
        if not chain or summary.last_seq < chain[0].first_seq:
            chain.insert(0, summary)
    return chain


def _newest_within(parts: Sequence[str], limit: int, encode: Encode) -> str:
    """Return the parts in order, within ``limit`` tokens. The newest parts stay unchanged, at least the last one; older
    ones are condensed.
    """
    shown: list[str] = []
    left = limit
    for end in range(len(parts), 0, -1):
        cost = encode(parts[end - 1])
        if cost > left and shown:
            older = "\n\n".join(parts[:end])
            condensed = (
                summarize_without_model((), limit=left, encode=encode, earlier=older) if left >= LEAST_SUMMARY else ""
            )
            return "\n\n".join(filter(None, (condensed, *shown)))
        left -= cost
        shown.insert(0, parts[end - 1])
    return "\n\n".join(shown)


def insert_session_memory(
    inputs: EpochInputs,
    scores: Mapping[int, float],
    *,
    budget: int,
    old_after: float,
    now: datetime,
    encode: Encode,
) -> Stage:
    """Return entries about turns that left working memory (Fifth): the best within ``budget``, in order of turns.

    Entries of turns older than ``old_after`` seconds are shorter. ``scores``: turn -> priority. A turn without a score
    is ranked by age, after those with one.
    """

    def stage(draft: Draft) -> Draft:
        shown = {entry.turn for entry in draft.entries}
        terse = [entry for entry in inputs.terse if entry.seq < draft.cut]
        past = sorted((e for e in draft.gone if e.turn not in shown), key=lambda entry: entry.seq)
        lines = _session_lines([*terse, *derive_missing(past, terse)], inputs.summaries, now, old_after)
        covered_to = {turn: line for turn, line in lines.items() if turn not in shown}
        text = _fill(covered_to, scores, budget=budget, encode=encode)
        inserted = draft.with_head(*exchange("session", text, prompts.SESSION_MEMORY_ACK, encode))
        return inserted.marking(past, kept="summary", reason="in session memory") if text else draft

    return stage


def _session_lines(
    terse: Sequence[TerseEntry], summaries: Sequence[Summary], now: datetime, old_after: float
) -> dict[int, str]:
    """Map each turn to its line, in order of turns: the model's line if there is one, else its entries."""
    texts: dict[int, list[str]] = {}
    ages: dict[int, float] = {}
    lasts: dict[int, int] = {}
    for entry in sorted(terse, key=lambda each: (each.turn, each.seq)):
        texts.setdefault(entry.turn, []).append(entry.text)
        ages[entry.turn] = (now - entry.created_at).total_seconds()
        lasts[entry.turn] = entry.seq
    alone = {summary.last_seq: summary.text for summary in summaries if summary.purpose == "task"}
    made = {
        turn: line
        for summary in summaries
        if summary.purpose == "tasks"
        for turn, line in read_tasks(summary.text).items()
    }
    lines = {}
    for turn, parts in texts.items():
        text = made.get(turn) or alone.get(lasts[turn]) or "; ".join(parts)
        length = OLD_ENTRY if ages[turn] > old_after else FRESH_ENTRY
        lines[turn] = f"[{write_turn_id(turn)}] {clip_line(text, length)}"
    return lines


def _fill(lines: Mapping[int, str], scores: Mapping[int, float], *, budget: int, encode: Encode) -> str:
    best = sorted(lines, key=lambda turn: (turn in scores, scores.get(turn, 0.0), turn), reverse=True)
    left = budget - encode(prompts.SESSION_MEMORY_TITLE) - 1
    chosen = []
    for turn in best:
        cost = encode(lines[turn]) + 1
        if cost > left:
            break
        left -= cost
        chosen.append(turn)
    if not chosen:
        return ""
    omitted = len(lines) - len(chosen)
    note = [f"({omitted} more turns are not listed)"] if omitted else []
    return "\n".join([prompts.SESSION_MEMORY_TITLE, *(lines[turn] for turn in sorted(chosen)), *note])
