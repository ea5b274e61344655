"""Old tool results that make way for their summaries (tiancaiamao/ai, "Tool Result Summarization During Loops").

The document hides an archived result and appends a user message with its summary. A hidden result would leave a call
without one, which providers refuse; taking the call away too would hide what the model did, and what it said with it.
So the call and the place of its result stay, and the text becomes a line that names its summary: pairing, roles
and order are what they were. A result is archived only once its summary is there to be named.

Which results are archived is a `Tier`, chosen when an epoch starts: an archived result stays so for the whole epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from app.domain.history import Entry, HeadMessage, Summary
from app.domain.tiers import Tier, Way
from app.domain.tokens import Encode, count_text_message
from app.strategies.extractive import digest_result
from app.strategies.pipeline import Draft, Stage
from app.strategies.shortening import shorten_results

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
    way: Way,
    encode: Encode,
    originals: Mapping[int, Entry],
    now: datetime,
) -> Stage:
    """Results beyond ``cutoff`` archived, and the digest of their summaries, at most ``limit`` tokens, in the head.

    The document appends its digest to the recent messages. There it would stand behind the question that is to be
    answered next, and move with each compaction; in the head it is as visible, and stays. ``heuristic``: summaries are
    made here, of the ``originals``, instead of by a model beforehand.
    """

    def stage(draft: Draft) -> Draft:
        known = list(summaries)
        if heuristic:
            known = [
                _summarize(originals.get(entry.seq, entry), draft.entries, encode, now)
                for entry in results_to_archive(draft.entries, cutoff=cutoff)
            ]
        tiers = archive_tiers(draft.entries, known, cutoff=cutoff, way=way)
        if not tiers:
            return draft
        archived = replace(shorten_results(tiers, encode=encode)(draft), tiers=(*draft.tiers, *tiers))
        digest = tool_digest_message(archived_summaries(known, tiers), limit=limit, encode=encode)
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
    """The messages of the oldest results, until no more than ``cutoff`` visible results are left, in order."""
    carriers = [entry for entry in entries if entry.message.results]
    visible = sum(len(entry.message.results) for entry in carriers)
    count = 0
    while visible > max(0, cutoff):
        visible -= len(carriers[count].message.results)
        count += 1
    return tuple(carriers[:count])


def archive_tiers(
    entries: Sequence[Entry], summaries: Iterable[Summary], *, cutoff: int = TOOL_CALL_CUTOFF, way: Way = ""
) -> tuple[Tier, ...]:
    """A tier for what is to be archived, up to the first result that has no summary yet; none where that is nothing."""
    known = {summary.first_seq for summary in summaries if summary.first_seq == summary.last_seq}
    until = 0
    for entry in results_to_archive(entries, cutoff=cutoff):
        if entry.seq not in known:
            break
        until = entry.seq
    return (Tier(subject="archive", until=until, way=way),) if until else ()


def archived_summaries(summaries: Iterable[Summary], tiers: Sequence[Tier]) -> tuple[Summary, ...]:
    """Those of ``summaries`` that stand for results archived by ``tiers``, the latest for each, in order."""
    until = max((tier.until or 0 for tier in tiers if tier.subject == "archive"), default=0)
    latest = {s.first_seq: s for s in summaries if s.first_seq == s.last_seq <= until}
    return tuple(latest[seq] for seq in sorted(latest))


def tool_digest_message(summaries: Sequence[Summary], *, limit: int, encode: Encode) -> HeadMessage | None:
    """The one user message that a compaction makes of all ``summaries``; None without any.

    At most ``limit`` tokens, the newest results first; how many older ones found no room is said.
    """
    shown: list[str] = []
    room = limit - encode(DIGEST_TITLE)
    for summary in reversed(summaries):
        text = f"#{summary.first_seq}: {summary.text}"
        room -= encode(text) + 1
        if room < 0:
            break
        shown.append(text)
    if not shown:
        return None
    left_out = len(summaries) - len(shown)
    notes = [f"({left_out} older results are not shown here.)"] if left_out else []
    return _message("\n".join([DIGEST_TITLE, *notes, *reversed(shown)]), encode)


def _message(text: str, encode: Encode) -> HeadMessage:
    return HeadMessage(layer=LAYER, role="user", text=text, tokens=count_text_message(text, encode))
