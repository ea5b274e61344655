"""Stored requests that never got a reply."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tersely.domain.history.links import StoredLink


def links_without_reply(rows: Sequence[StoredLink]) -> list[int]:
    """Return the sequence numbers of live links that may have no reply. ``rows`` are in order.

    These are the links after the last reply, or before another request. A request with several messages looks the same.
    """
    found: list[int] = []
    block: list[StoredLink] = []
    for row in rows:
        if not row.is_link or row.status != "live":
            continue
        if not _is_reply(row):
            block.append(row)
            continue
        if any(each.role == "user" for each in block[1:]):
            found += [each.seq for each in block]
        block = []
    return [*found, *(row.seq for row in block)]


def failed_links(rows: Sequence[StoredLink], ended: Collection[int]) -> frozenset[int]:
    """Return the sequence numbers of the live links of requests whose call has ended without a reply.

    ``rows`` are in order; ``ended`` are those of `links_without_reply` that were the last message of a call which has
    ended.
    """
    links = [row for row in rows if row.is_link and row.status == "live"]
    failed: set[int] = set()
    request: list[int] = []
    for index, row in enumerate(links):
        if _is_reply(row):
            request = []
            continue
        request = [*request, row.seq] if request and row.follows == request[-1] else [row.seq]
        following = links[index + 1 : index + 2]
        if row.seq in ended and not any(map(_is_reply, following)):
            failed.update(request)
    return frozenset(failed)


def _is_reply(row: StoredLink) -> bool:
    """Return whether a link is a reply of the model; a request may bring messages of the assistant too."""
    return row.role == "assistant" and row.relayed
