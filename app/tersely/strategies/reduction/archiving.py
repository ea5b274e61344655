"""Replace old tool results by their summaries (tiancaiamao/ai, "Tool Result Summarization During Loops").

The document hides an archived result and appends a user message with its summary. A hidden result would leave a call
without one, which providers refuse. To remove the call too would hide what the model did. So call and result stay, and
the result's text becomes a line that names its summary: pairing, roles and order do not change. A result is archived
only once it has a summary. The digest lists only results that the context shows as archived; a result whose summary
does not fit into the digest names its own content.

A `Tier` selects the archived results when an epoch starts: they stay archived for the whole epoch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime

from msgspec import structs

from tersely.domain.history.history import Entry, HeadMessage, Summary
from tersely.domain.history.pairing import repair
from tersely.domain.history.tiers import ReadBack, Tier
from tersely.domain.tokens import Encode, count_text_message
from tersely.strategies.pipeline import Draft, Stage
from tersely.strategies.reduction.shortening import archived_line, shorten_results
from tersely.strategies.summaries.extractive import digest_result

TOOL_CALL_CUTOFF = 10
DIGEST_TITLE = "[Compaction tool digest]"
LAYER = "tool_summary"
TOOL_RESULT = "tool_result"
HEURISTIC_RUNES = 800


def archive_results(
    summaries: Sequence[Summary],
    *,
    cutoff: int,
    heuristic: bool,
    limit: int,
    read_back: ReadBack,
    encode: Encode,
    originals: Mapping[int, Entry],
    now: datetime,
) -> Stage:
    """Make a stage that archives results beyond ``cutoff`` and puts a digest of their summaries, at most ``limit``
    tokens, into the head.

    The document appends its digest to the recent messages. There it would follow the open question and move with each
    compaction; in the head it stays in place. ``heuristic``: summaries are made here from the ``originals`` instead of
    by a model in advance.
    """

    def stage(draft: Draft) -> Draft:
        known = list(summaries)
        if heuristic:
            known = [
                _summarize(originals.get(entry.seq, entry), draft.entries, encode, now)
                for entry in results_to_archive(draft.entries, cutoff=cutoff)
            ]
        tiers = archive_tiers(draft.entries, known, cutoff=cutoff, read_back=read_back)
        if not tiers:
            return draft
        made = archived_summaries(known, tiers, candidates=_replaced(draft.entries, tiers[0]))
        shown = fit_digest(made, limit=limit, encode=encode)
        tiers = (structs.replace(tiers[0], digest_seqs=tuple(summary.first_seq for summary in shown)),)
        archived = structs.replace(shorten_results(tiers, encode=encode)(draft), tiers=(*draft.tiers, *tiers))
        digest = tool_digest_message(shown, left_out=len(made) - len(shown), encode=encode)
        return archived.with_head(digest) if digest else archived

    return stage


def _summarize(entry: Entry, entries: Sequence[Entry], encode: Encode, now: datetime) -> Summary:
    calls = {call.id: f"{call.name} {call.arguments}" for each in entries for call in each.message.calls}
    results = entry.message.results
    runes = HEURISTIC_RUNES // max(1, len(results))
    texts = [digest_result(calls.get(result.call_id, ""), result.text, runes=runes) for result in results]
    text = "\n".join(texts)
    return Summary(
        first_seq=entry.seq,
        last_seq=entry.seq,
        purpose=TOOL_RESULT,
        text=text,
        tokens=encode(text),
        source="extractive",
        created_at=now,
    )


def results_to_archive(entries: Sequence[Entry], *, cutoff: int = TOOL_CALL_CUTOFF) -> tuple[Entry, ...]:
    """Return the messages of the oldest results, until no more than ``cutoff`` visible results are left, in order."""
    carriers = [entry for entry in entries if entry.message.results]
    visible = sum(len(entry.message.results) for entry in carriers)
    count = 0
    while visible > max(0, cutoff):
        visible -= len(carriers[count].message.results)
        count += 1
    return tuple(carriers[:count])


def archive_tiers(
    entries: Sequence[Entry], summaries: Iterable[Summary], *, cutoff: int = TOOL_CALL_CUTOFF, read_back: ReadBack = ""
) -> tuple[Tier, ...]:
    """Return a tier for the results to archive, up to the first one without a summary; none if there are no such
    results.
    """
    known = {summary.first_seq for summary in summaries if summary.first_seq == summary.last_seq}
    until = 0
    for entry in results_to_archive(entries, cutoff=cutoff):
        if entry.seq not in known:
            break
        until = entry.seq
    return (Tier(subject="archive", until=until, read_back=read_back),) if until else ()


def _replaced(entries: Sequence[Entry], tier: Tier) -> frozenset[int]:
    """Return the messages of ``entries`` whose result is sent as a line. Short results and results that pairing removes
    do not count.
    """
    covered = [entry for entry in entries if entry.message.results and tier.covers(entry.seq)]
    sent = {entry.seq: entry.message.results for entry in repair(entries)[0]} if covered else {}
    return frozenset(
        entry.seq
        for entry in covered
        if any(len(archived_line(each.text, tier, entry)) < len(each.text) for each in sent.get(entry.seq, ()))
    )


def archived_summaries(
    summaries: Iterable[Summary], tiers: Sequence[Tier], *, candidates: Container[int]
) -> tuple[Summary, ...]:
    """Return the latest summary for each of the messages ``candidates`` that ``tiers`` archive."""
    until = max((tier.until or 0 for tier in tiers if tier.subject == "archive"), default=0)
    latest = {s.first_seq: s for s in summaries if s.first_seq == s.last_seq <= until and s.first_seq in candidates}
    return tuple(latest[seq] for seq in sorted(latest))


def fit_digest(summaries: Sequence[Summary], *, limit: int, encode: Encode) -> tuple[Summary, ...]:
    """Return the newest of ``summaries`` that a digest of ``limit`` tokens has room for, in order."""
    room = limit - encode(DIGEST_TITLE)
    first = len(summaries)
    while first:
        room -= encode(_item(summaries[first - 1])) + 1
        if room < 0:
            break
        first -= 1
    return tuple(summaries[first:])


def tool_digest_message(summaries: Sequence[Summary], *, left_out: int = 0, encode: Encode) -> HeadMessage | None:
    """Return the one user message that a compaction makes of all ``summaries``; None without any.

    It states how many older results were left out.
    """
    if not summaries:
        return None
    notes = [f"({left_out} older results are described in their places.)"] if left_out else []
    return _message("\n".join([DIGEST_TITLE, *notes, *map(_item, summaries)]), encode)


def _item(summary: Summary) -> str:
    return f"#{summary.first_seq}: {summary.text}"


def _message(text: str, encode: Encode) -> HeadMessage:
    return HeadMessage(layer=LAYER, role="user", text=text, tokens=count_text_message(text, encode))
