"""Layers of a head: state block, scratchpad, summaries, session memory, and the index of names. Each is a `Stage`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from app.domain.history import Entry, HeadMessage, Material, Prefix, Summary, TerseEntry
from app.domain.tokens import Encode, count_text_message
from app.domain.turns import write_turn_id
from app.strategies import prompts
from app.strategies.activity_log import clip_line, derive_missing
from app.strategies.extractive import summarize
from app.strategies.pipeline import Draft, Stage
from app.strategies.references import Names, gather, render_references, visible_names

# Characters of a session memory entry: of a turn that has just left working memory, and of an old one.
FRESH_ENTRY, OLD_ENTRY = 480, 160


def exchange(layer: str, text: str, acknowledgement: str, encode: Encode) -> tuple[HeadMessage, ...]:
    """A user message and its acknowledgement, so that roles go on alternating; nothing for an empty text."""
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
    """Memos in front of those messages that are shown (std::slop, "Semantic Memo System")."""

    def stage(draft: Draft) -> Draft:
        shown = {entry.seq for entry in draft.entries}
        return replace(draft, prefixes=(*draft.prefixes, *(memo for memo in memos if memo.seq in shown)))

    return stage


def insert_text(layer: str, title: str, text: str, acknowledgement: str, *, encode: Encode, seq: int = 0) -> Stage:
    """A text under its title, with its acknowledgement; nothing where there is no text.

    ``seq``: the message that it came with, if it came with one.
    """

    def stage(draft: Draft) -> Draft:
        if not text.strip():
            return draft
        quoted = max(draft.quoted, seq + 1 if seq else 0)
        return replace(draft, quoted=quoted).with_head(*exchange(layer, f"{title}\n{text}", acknowledgement, encode))

    return stage


def insert_references(*, limit: int, encode: Encode, originals: Mapping[int, Entry] | None = None) -> Stage:
    """The index of names that the context no longer shows; candidates of what was cut are carried on.

    ``originals``: entries as they were before anything shortened them, by sequence number.
    """
    whole = originals or {}
    names = Names()

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
        )
        found = replace(draft, references=references)
        return found.with_head(*exchange("references", text, prompts.REFERENCES_ACK, encode))

    return stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The summary of the last epoch, and the range of messages that it stands for; without one, none."""

    text: str = ""
    first_seq: int = 1
    last_seq: int = 0


def insert_checkpoint(
    material: Material, *, earlier: Earlier, limit: int, encode: Encode, asked: bool = False
) -> Stage:
    """The checkpoint as one user message (tiancaiamao/ai, "Rebuild context"); ``earlier``: that of the last epoch."""

    def stage(draft: Draft) -> Draft:
        made = [summary for summary in material.summaries if summary.purpose == "checkpoint"]
        text, told = summary_of_cut(draft, made, earlier=earlier, limit=limit, encode=encode, asked=asked)
        if not text:
            return draft
        draft = replace(draft, told=told)
        body = f"{prompts.CHECKPOINT_TITLE}\n\n{text}"
        message = HeadMessage(layer="summary", role="user", text=body, tokens=count_text_message(body, encode))
        return draft.with_head(message).marking(draft.gone, kept="summary", reason="in the summary")

    return stage


def inject_summary(material: Material, *, earlier: Earlier, limit: int, encode: Encode, asked: bool = False) -> Stage:
    """The summary in front of the first retained user message (CowAgent, "Turn Trimming")."""

    def stage(draft: Draft) -> Draft:
        made = [summary for summary in material.summaries if summary.purpose == "trim"]
        text, told = summary_of_cut(draft, made, earlier=earlier, limit=limit, encode=encode, asked=asked)
        first = next((entry for entry in draft.entries if entry.message.starts_turn), None)
        if not text or first is None:
            return draft
        draft = replace(draft, told=told)
        body = f"{prompts.SUMMARY_TITLE}\n{text}\n{prompts.SUMMARY_END}\n\n"
        marked = draft.marking(draft.gone, kept="summary", reason="in the summary")
        return marked.with_prefix(Prefix(layer="summary", seq=first.seq, text=body, tokens=encode(body)))

    return stage


def summary_of_cut(
    draft: Draft,
    summaries: Sequence[Summary],
    *,
    earlier: Earlier,
    limit: int,
    encode: Encode,
    asked: bool = False,
) -> tuple[str, int]:
    """What stands for everything before the cut, as far as it is not kept: empty where nothing was cut. And before
    which sequence number the messages are that it tells of.

    The summaries that were made of it, in order, and where there are none yet, what can be said without a model.
    Of too much, the newest stays. ``asked``: somebody had one made just now, of everything before the last turn; it
    counts also where it goes on behind the cut.
    """
    if draft.cut == 1:
        return "", 0
    made = _chain([each for each in summaries if (each.first_seq if asked else each.last_seq) < draft.cut])
    rest = [e for e in draft.gone if not any(s.first_seq <= e.seq <= s.last_seq for s in made)]
    last = max((summary.last_seq for summary in made), default=0)
    told = max(draft.cut, last + 1, earlier.last_seq + 1 if earlier.text else 0)
    if not made:
        text = summarize(rest, limit=limit, encode=encode, earlier=earlier.text) if rest else earlier.text
        return text, told
    parts = [summary.text for summary in made]
    left = _without(earlier.text, parts)
    if left and made[0].first_seq > earlier.first_seq:
        parts.insert(0, left)
    elif left and made[-1].last_seq < earlier.last_seq:
        parts.append(left)
    if rest:
        parts.append(summarize(rest, limit=max(limit // 4, limit - made[-1].tokens), encode=encode))
    return _newest_within(parts, limit, encode), told


def _without(earlier: str, parts: Iterable[str]) -> str:
    """``earlier`` less what is said again: it may hold some of ``parts`` already."""
    for part in parts:
        earlier = earlier.replace(part, "")
    return re.sub(r"\n{3,}", "\n\n", earlier).strip()


def _chain(summaries: Iterable[Summary]) -> list[Summary]:
    """The newest summaries that do not overlap, in the order of the history."""
    chain: list[Summary] = []
    for summary in sorted(summaries, key=lambda s: (s.last_seq, -s.first_seq), reverse=True):
        if not chain or summary.last_seq < chain[0].first_seq:
            chain.insert(0, summary)
    return chain


def _newest_within(parts: Sequence[str], limit: int, encode: Encode) -> str:
    """The parts in order; where ``limit`` tokens do not hold all of them, the newest, the last one in any case."""
    shown: list[str] = []
    left = limit
    for part in reversed(parts):
        left -= encode(part)
        if left < 0 and shown:
            break
        shown.insert(0, part)
    return "\n\n".join(shown)


def insert_session_memory(
    material: Material,
    scores: Mapping[int, float],
    *,
    budget: int,
    old_after: float,
    now: datetime,
    encode: Encode,
) -> Stage:
    """What turns that left working memory came to, the best first as far as ``budget`` goes, told in order (Fifth).

    ``old_after`` seconds: entries of older turns are shorter. ``scores``: turn -> priority; a turn without one is
    ranked by its age alone, after those that have one.
    """

    def stage(draft: Draft) -> Draft:
        shown = {entry.turn for entry in draft.entries}
        terse = [entry for entry in material.terse if entry.seq < draft.cut]
        past = sorted((e for e in draft.gone if e.turn not in shown), key=lambda entry: entry.seq)
        lines = _session_lines([*terse, *derive_missing(past, terse)], material.summaries, now, old_after)
        told = {turn: line for turn, line in lines.items() if turn not in shown}
        text = _fill(told, scores, budget=budget, encode=encode)
        inserted = draft.with_head(*exchange("session", text, prompts.SESSION_MEMORY_ACK, encode))
        return inserted.marking(past, kept="summary", reason="in session memory") if text else draft

    return stage


def _session_lines(
    terse: Sequence[TerseEntry], summaries: Sequence[Summary], now: datetime, old_after: float
) -> dict[int, str]:
    """Turn -> its line, in order of turns: the summary of exactly this turn where there is one, else its entries."""
    texts: dict[int, list[str]] = {}
    ages: dict[int, float] = {}
    lasts: dict[int, int] = {}
    for entry in sorted(terse, key=lambda each: (each.turn, each.seq)):
        texts.setdefault(entry.turn, []).append(entry.text)
        ages[entry.turn] = (now - entry.created_at).total_seconds()
        lasts[entry.turn] = entry.seq
    made = {summary.last_seq: summary.text for summary in summaries if summary.purpose == "task"}
    lines = {}
    for turn, said in texts.items():
        text = made.get(lasts[turn]) or "; ".join(said)
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
