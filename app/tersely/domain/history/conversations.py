"""Conversations that a model host keeps: their calls are one history, whatever else its session holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tersely.domain.history.links import StoredLink


def links_in_conversation(
    rows: Sequence[StoredLink], *, failed: Collection[int], outside: Collection[int]
) -> frozenset[int]:
    """Return the sequence numbers of the live links that a call of the conversation must not supersede.

    ``rows`` are a session's, in order; ``failed`` are the links of failed requests. ``outside`` are replies to requests
    that were no part of the conversation; their questions are none either. A question without a reply is a part of it:
    its call may be under way.
    """
    found: set[int] = set()
    exchange: list[int] = []
    for row in rows:
        if not row.is_link or row.status != "live" or row.seq in failed:
            continue
        exchange.append(row.seq)
        if row.role == "assistant" and row.relayed:
            if row.seq not in outside:
                found.update(exchange)
            exchange = []
    return frozenset(found.union(exchange))
