"""Find the writes that are stored in portions, apart from the others."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.store.commit import large_values
from tersely.store.commit.records import Attribute, ReplyWrite, RequestWrite

# A write is large if it has more new messages, bytes, or literals of the context that was sent. It is encoded in a
# thread, sent in portions of so many rows and bytes, and has a time limit of its own (seconds).
LARGE = 2_000
LARGE_BYTES = 4 * 1024 * 1024
PORTION = 400
PORTION_BYTES = 2 * 1024 * 1024
LARGE_LIMIT = 60.0


def is_large(request: RequestWrite) -> bool:
    """Return whether a request's new messages, or the context that was sent, are stored in portions."""
    if request.attributes and are_many(request.attributes):
        return True
    new = request.decision.last_seq - (request.session.last_seq if request.session else 0)
    if new > LARGE or request.size <= LARGE_BYTES:
        return new > LARGE
    placed = request.decision.placed
    return sum(len(raw) for raw, each in zip(request.raws, placed, strict=True) if each.is_new) > LARGE_BYTES


def are_many(attributes: Sequence[Attribute]) -> bool:
    """Return whether attributes are stored in portions."""
    return len(attributes) > LARGE or sum(len(each.raw) for each in attributes) > LARGE_BYTES


def has_long_epoch(write: ReplyWrite) -> bool:
    """Return whether the epoch that starts with a reply has so many log entries that they are stored in portions."""
    return write.epoch is not None and len(write.epoch.derived) > LARGE


def has_large_reply(write: ReplyWrite) -> bool:
    """Return whether a reply comes with so much that it is stored in portions."""
    if write.attributes and are_many(write.attributes):
        return True
    sizes = [max(len(reply.raw), len(reply.model_raw or b"")) for reply in write.replies]
    return bool(sizes) and max(sizes) > large_values.LARGE_VALUE
