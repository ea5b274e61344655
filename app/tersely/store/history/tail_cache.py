"""Cache the counters and tail rows of the sessions that this process has seen last.

The cache only saves reading and decoding: every use first checks in the database that the session is still at the
cached version (see `tersely.store.history.lookups`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from tersely.domain.history.history import WINDOW_FULL, Epoch
from tersely.domain.history.links import StoredLink
from tersely.domain.history.sessions import Session
from tersely.store.db.statements import Record
from tersely.store.history import model_views
from tersely.store.history.messages import TailRow

# Bytes of a row and of a session besides their contents; measured, rounded up.
ROW_SIZE = 600
SESSION_SIZE = 2_000


class CachedTail(msgspec.Struct, frozen=True, kw_only=True):
    """A session at one version, with its current rows from the cut on, in order. ``size`` in bytes.

    ``chain`` is the chain value of the whole history up to the newest relayed reply, if it is known.
    """

    session: Session
    rows: list[TailRow]
    chain: bytes | None
    size: int


def cached_tail(session: Session, rows: Sequence[TailRow], chain: bytes | None) -> CachedTail:
    """Return the tail as it was read."""
    kept = tail_rows(rows, session)
    size = SESSION_SIZE + _size_of_plan(session.plan) + sum(map(_size_of, kept))
    return CachedTail(session=session, rows=kept, chain=chain, size=size)


def tail_rows(rows: Sequence[TailRow], session: Session) -> list[TailRow]:
    """Return the rows of the tail: from the cut on, and instructions."""
    cut = session.cut
    return [each for each in rows if (row := each.row).seq >= cut or row.turn == 0]


def appended(before: CachedTail | None, session: Session, records: Iterable[Record], chain: bytes | None) -> CachedTail:
    """Return ``before`` with the messages that were written since (as `tersely.store.commit.apply` lists them)."""
    added = [row_of(record) for record in records if record[6] != "superseded"]
    rows = [*before.rows, *added] if before is not None else added
    if before is None or before.session.epoch != session.epoch:
        return cached_tail(session, sorted(rows, key=_place), chain)
    newest = [*before.rows[-1:], *added]
    if any(_place(one) > _place(other) for one, other in pairwise(newest)):
        rows.sort(key=_place)  # a late reply, or new instructions
    return CachedTail(session=session, rows=rows, chain=chain, size=before.size + sum(map(_size_of, added)))


def row_of(record: Record) -> TailRow:
    (
        _, seq, turn, tokens, position, role, status, dialect, is_shown, _, pinned, finish, call, digest, chain,
        created_at, raw, *model_view, follows, _, _,
    ) = record  # fmt: skip
    row = StoredLink(
        seq=seq, position=position, turn=turn, tokens=tokens, role=role, status=status, digest=digest,
        relayed=chain is not None, call=call, follows=follows,
    )  # fmt: skip
    return TailRow(
        row=row, dialect=dialect, pinned=pinned, created_at=created_at,
        model_raw=model_views.view_of(raw, tuple(model_view)), is_hidden=not is_shown,
        ran_out=finish == WINDOW_FULL,
    )  # fmt: skip


def _place(row: TailRow) -> tuple[float, int]:
    return row.row.position, row.row.seq


def _size_of(row: TailRow) -> int:
    return ROW_SIZE + len(row.model_raw or b"")


def _size_of_plan(plan: Epoch | None) -> int:
    if plan is None:
        return 0
    texts = sum(len(message.text) for message in plan.head) + sum(len(excerpt.text) for excerpt in plan.excerpts)
    return 4 * texts + 300 * len(plan.references) + 40 * len(plan.kept)


class TailCache:
    """The tails that were used last, of at most ``budget`` bytes in all."""

    def __init__(self, budget: int = 32 * 1024 * 1024) -> None:
        self._budget = budget
        self._size = 0
        self._tails: OrderedDict[tuple[str, str], CachedTail] = OrderedDict()
        self._by_chain: dict[tuple[str, bytes], str] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def get(self, tenant: str, session_id: str) -> CachedTail | None:
        """Return the cached tail of a session, at any version."""
        tail = self._tails.get((tenant, session_id))
        if tail is not None:
            self._tails.move_to_end((tenant, session_id))
        return tail

    def ending_with(self, tenant: str, chain: bytes) -> CachedTail | None:
        """Return the cached tail of the session whose newest relayed reply has that chain value."""
        session_id = self._by_chain.get((tenant, chain))
        return None if session_id is None else self.get(tenant, session_id)

    def put(self, tenant: str, tail: CachedTail) -> None:
        """Cache a session in place of its earlier entry."""
        key = (tenant, tail.session.id)
        self.forget(*key)
        if tail.size > self._budget:
            return
        self._tails[key] = tail
        self._size += tail.size
        if tail.chain is not None:
            self._by_chain[tenant, tail.chain] = tail.session.id
        while self._size > self._budget:
            self.forget(*next(iter(self._tails)))

    def forget(self, tenant: str, session_id: str) -> None:
        """Remember nothing of a session."""
        tail = self._tails.pop((tenant, session_id), None)
        if tail is None:
            return
        self._size -= tail.size
        if tail.chain is not None and self._by_chain.get((tenant, tail.chain)) == session_id:
            del self._by_chain[tenant, tail.chain]
