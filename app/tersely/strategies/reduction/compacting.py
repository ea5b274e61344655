"""Compaction thresholds and the split (tiancaiamao/ai, "Triggering Rules" and "Split logic")."""

from __future__ import annotations

from tersely.strategies.epochs.cutting import cut_places, must_stay
from tersely.strategies.pipeline import Draft, Stage


def effective_limit(context_window: int | None, *, reserve_tokens: int, max_tokens: int) -> int | None:
    """Return the tokens at which to compact: the window less the reserve, else ``max_tokens``, else None (no
    threshold).
    """
    if context_window is not None and context_window > 0:
        # A window smaller than the reserve would ask for a compaction of nothing at every call.
        room = context_window - reserve_tokens
        return room if room > 0 else max(1, context_window // 2)
    return max_tokens if max_tokens > 0 else None


def tokens_to_keep(keep_recent_tokens: int, limit: int | None) -> int:
    """``keep_recent_tokens``, clamped to half of the effective limit."""
    return keep_recent_tokens if limit is None else min(keep_recent_tokens, limit // 2)


def split_by_tokens(tokens: int) -> Stage:
    """Make a stage that keeps the newest messages within ``tokens``, at least the last one with its results."""

    def stage(draft: Draft) -> Draft:
        left = tokens
        index = len(draft.tail)
        while index and draft.tail[index - 1].tokens <= left:
            index -= 1
            left -= draft.tail[index].tokens
        return _split(draft, index)

    return stage


def split_by_count(messages: int) -> Stage:
    """Make a stage that keeps the newest ``messages`` messages."""

    def stage(draft: Draft) -> Draft:
        return _split(draft, max(0, len(draft.tail) - messages))

    return stage


def _split(draft: Draft, index: int) -> Draft:
    """Cut before ``tail[index]`` or, where calls and results would be parted, at the nearest better place."""
    starts = cut_places(draft.tail)
    if not starts:
        return draft
    later = [start for start in starts if start >= index]
    first = draft.tail[later[0] if later else starts[-1]].seq
    if first == draft.tail[0].seq:
        return draft
    return draft.with_cut(first, must_stay(draft.kept, draft.tail))
