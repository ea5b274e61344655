"""Truncation: single parts are shortened by tiers. Tiers are chosen when an epoch starts and apply throughout it.

The shortened form depends on the message and the tier alone, so a result is the same in every context of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import is_

from msgspec.structs import replace

from tersely.domain.history.history import Entry, Epoch
from tersely.domain.history.tiers import ReadBack, Style, Tier, TierContent
from tersely.domain.messages import Part, Text, ToolResult
from tersely.domain.text.clipping import ends, head
from tersely.domain.text.tool_output import DEFAULT_LIMITS, ToolOutputLimits, count_lines, normalize
from tersely.domain.tokens import Encode, count_message, estimate_text
from tersely.strategies.pipeline import Draft, Edit, Stage

PAST_RESULT_CHARS = 20_000
OVERFLOW_CHARS = 10_000
# Characters that an archived result keeps if the context has no summary of it.
ARCHIVED_WORDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationSettings:
    """std::slop's limits, in characters, for the ``recent`` newest results of the active turn, its older ones, and
    those of inactive turns.
    """

    recent: int = 5
    recent_chars: int = 5_000
    older_chars: int = 1_000
    inactive_chars: int = 300


DEFAULT_TRUNCATION = TruncationSettings()


def window_tiers(
    entries: Sequence[Entry], *, read_back: ReadBack = "", settings: TruncationSettings = DEFAULT_TRUNCATION
) -> tuple[Tier, ...]:
    """Return three tiers by recency and by whether the turn is active (std::slop, "Dynamic Tool Truncation").

    ``entries`` in order, the active turn last. Results in one message share the tier of the newest one.
    """
    active = _active(entries)
    inactive_until = active[0].seq - 1 if active else 0
    room = settings.recent
    older_until = inactive_until
    for entry in reversed(active):
        results = len(entry.message.results)
        if results and room <= 0:
            older_until = max(older_until, entry.seq)
            break
        room -= results
    return (
        Tier(subject="results", until=inactive_until, chars=settings.inactive_chars, read_back=read_back),
        Tier(subject="results", until=older_until, chars=settings.older_chars, read_back=read_back),
        Tier(subject="results", chars=settings.recent_chars, read_back=read_back),
    )


def past_result_tiers(
    entries: Sequence[Entry], *, chars: int = PAST_RESULT_CHARS, read_back: ReadBack = ""
) -> tuple[Tier, ...]:
    """CowAgent, "Tool Result Truncation": past results keep beginning and end, the current turn's are whole."""
    active = _active(entries)
    until = active[0].seq - 1 if active else 0
    return (Tier(subject="results", until=until, chars=chars, style="ends", read_back=read_back),)


def overflow_tiers(*, chars: int = OVERFLOW_CHARS, read_back: ReadBack = "") -> tuple[Tier, ...]:
    """CowAgent, "Overflow Emergency Handling", step 2: tool results and user text limited, wherever they stand."""
    return (
        Tier(subject="results", chars=chars, style="ends", read_back=read_back),
        Tier(subject="user_text", chars=chars, style="ends", read_back=read_back),
    )


def output_tiers(limits: ToolOutputLimits = DEFAULT_LIMITS, *, read_back: ReadBack = "") -> tuple[Tier, ...]:
    """tiancaiamao/ai, "Tool Output Processing": holds for every result, whatever its age."""
    return (Tier(subject="output", limits=limits, read_back=read_back),)


def shorten_results(tiers: Sequence[Tier], *, encode: Encode) -> Stage:
    """Make a stage that shortens the draft's messages by ``tiers``. Changed turns are reported as truncated."""

    def stage(draft: Draft) -> Draft:
        kept = apply_tiers(draft.kept, tiers, encode=encode)
        tail = apply_tiers(draft.tail, tiers, encode=encode)
        turns = _changed_turns(draft.kept, kept) | _changed_turns(draft.tail, tail)
        if not turns:
            return draft
        known = {edit.turn for edit in draft.edits}
        edits = tuple(
            Edit(stage="shorten_results", turn=turn, kept="truncated", reason="long texts shortened")
            for turn in sorted(turns - known)
        )
        return replace(draft, kept=kept, tail=tail, edits=(*draft.edits, *edits))

    return stage


def apply_tiers(entries: Sequence[Entry], tiers: Sequence[Tier], *, encode: Encode) -> tuple[Entry, ...]:
    """Return ``entries`` shortened; unchanged entries are the same objects. ``encode`` recounts the others."""
    if not tiers:
        return tuple(entries)
    harmless = min(map(_harmless, tiers))
    return tuple([e if 0 < len(e.message.raw) <= harmless else _shorten(e, tiers, encode) for e in entries])


def shortens(epoch: Epoch, entries: Sequence[Entry]) -> bool:
    """Return whether ``epoch`` shows any of the entries shortened."""
    applied = apply_tiers(entries, epoch.tiers, encode=estimate_text)
    return any(new is not old for old, new in zip(entries, applied, strict=True))


def _harmless(tier: Tier) -> int:
    """Return whether ``tier`` cannot shorten a message of so many bytes: each character takes at least one."""
    match tier.subject:
        case "output":
            return (tier.limits or DEFAULT_LIMITS).safe_chars
        case "results" | "user_text":
            return tier.chars
        case "archive":
            return 0


def _active(entries: Sequence[Entry]) -> list[Entry]:
    """Return the messages of the last turn."""
    turn = entries[-1].turn if entries else 0
    return [entry for entry in entries if entry.turn == turn]


def _changed_turns(before: Iterable[Entry], after: Iterable[Entry]) -> set[int]:
    return {new.turn for old, new in zip(before, after, strict=True) if new is not old}


def _shorten(entry: Entry, tiers: Sequence[Tier], encode: Encode) -> Entry:
    message = entry.message
    if message.role == "assistant":
        return entry
    parts = _shorten_results(entry, tiers)
    if message.starts_turn:
        parts = _shorten_words(entry, parts, tiers)
    if parts is message.parts:
        return entry
    shortened = replace(message, parts=parts)
    tokens = count_message(shortened, encode)
    if entry.prefix:
        tokens += encode(entry.prefix)
    return replace(entry, message=shortened, is_shortened=True, tokens=tokens)


def _shorten_results(entry: Entry, tiers: Sequence[Tier]) -> tuple[Part, ...]:
    parts = entry.message.parts
    out = tuple([_shorten_part(part, entry, tiers) for part in parts])
    return parts if all(map(is_, out, parts)) else out


def _shorten_part(part: Part, entry: Entry, tiers: Sequence[Tier]) -> Part:
    if not isinstance(part, ToolResult):
        return part
    text = _shorten_result(part.text, entry, tiers)
    return part if text is part.text else replace(part, text=text)


def _shorten_result(text: str, entry: Entry, tiers: Sequence[Tier]) -> str:
    archive = _holding(tiers, "archive", entry.seq)
    if archive is not None:
        line = archived_line(text, archive, entry)
        if len(line) < len(text):
            return line
    output = _holding(tiers, "output", entry.seq)
    if output is not None:
        limits = output.limits or DEFAULT_LIMITS
        if len(text) > limits.safe_chars:
            is_readable = output.read_back.startswith("read_artifact")
            normal = normalize(text, limits, way=_way_sentence(output.read_back, entry), is_readable=is_readable)
            if normal.spilled_sha256 and output.read_back:
                return normal.text  # a notice: nothing is left to shorten
            text = normal.text
    results = _holding(tiers, "results", entry.seq)
    return text if results is None else shorten_text(text, results, entry)


def _shorten_words(entry: Entry, parts: tuple[Part, ...], tiers: Sequence[Tier]) -> tuple[Part, ...]:
    """Shorten a user's text to the limit, in the first text part, as dialects write it; media stay."""
    tier = _holding(tiers, "user_text", entry.seq)
    words = entry.message.text if tier else ""
    if tier is None or len(words) <= tier.chars:
        return parts
    shorter = shorten_text(words, tier, entry)
    if shorter is words:
        return parts
    first = next(index for index, part in enumerate(parts) if isinstance(part, Text))
    rest = [part for part in parts[first:] if not isinstance(part, Text)]
    kept = parts[first]
    assert isinstance(kept, Text)
    return (*parts[:first], replace(kept, text=shorter), *rest)


def _holding(tiers: Sequence[Tier], subject: TierContent, seq: int) -> Tier | None:
    return next((tier for tier in tiers if tier.subject == subject and tier.covers(seq)), None)


def shorten_text(text: str, tier: Tier, entry: Entry) -> str:
    """Return ``text`` as ``tier`` shows it, with a notice; the same object if that would not be shorter.

    ``head`` keeps ``chars`` characters followed by the notice, as std::slop does; ``ends`` keeps within ``chars``
    including the notice.
    """
    if len(text) <= tier.chars:
        return text
    shorter = _cut(text, tier.chars, tier.style, _notice(text, tier, entry))
    return shorter if len(shorter) < len(text) else text


def _cut(text: str, chars: int, style: Style, notice: str) -> str:
    if style == "head":
        return f"{head(text, chars)}... {notice}"
    return ends(text, chars, f"\n... {notice} ...\n")


def _notice(text: str, tier: Tier, entry: Entry) -> str:
    sentence = _way_sentence(tier.read_back, entry)
    # std::slop's words, if the model can read the whole text; otherwise the notice states how much is missing.
    is_short = tier.style == "head" and sentence
    notice = "TRUNCATED" if is_short else f"TRUNCATED {len(text)} characters to {tier.chars}"
    return f"[{notice}. {sentence}]" if sentence else f"[{notice}]"


def archived_line(text: str, tier: Tier, entry: Entry) -> str:
    """Return the line that replaces an archived result: it names the summary or the content."""
    sentence = _way_sentence(tier.read_back, entry)
    if tier.digest_seqs is None or entry.seq in tier.digest_seqs:
        notice = f"Tool result archived; its summary is #{entry.seq}."
    else:
        lines = count_lines(text)
        began = " ".join(text[: 4 * ARCHIVED_WORDS].split())
        notice = (
            f"Tool result archived: {len(text)} characters in {lines} {'line' if lines == 1 else 'lines'}, "
            f"beginning with {head(began, ARCHIVED_WORDS)!r}."
        )
    return f"[{notice}{f' {sentence}' if sentence else ''}]"


def _way_sentence(read_back: ReadBack, entry: Entry) -> str:
    """Return the sentence that tells the model how to get the whole text of ``entry``: std::slop's words, without the
    full stop.
    """
    match read_back:
        case "query_db" | "read_artifact, query_db":
            return f'Use query_db(sql="SELECT content FROM messages WHERE id={entry.seq}") to see full output'  # noqa: S608
        case "context_search" | "read_artifact, context_search":
            return f'Use context_search(mode="turn", turnId="t{entry.turn}") to see full output'
        case "" | "read_artifact":
            return ""
