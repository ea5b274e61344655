"""The term index of a session: which messages contain a term, and how often. It is built in pages and extended at its
end.

A posting is one number of four bytes: the document's number, shifted, and the count of the term (up to `MAX_TIMES`). An
index of 100,000 messages takes some tens of megabytes. Extending it costs only the new messages.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

SHIFT = 6
MAX_TIMES = (1 << SHIFT) - 1
MAX_DOCUMENTS = 1 << (32 - SHIFT)
# Approximate bytes of a term besides its postings.
_TERM_BYTES = 200


class TermPage(msgspec.Struct, frozen=True, array_like=True):
    """The terms of consecutive documents, numbered from ``first`` on, in stored form.

    ``lengths`` holds one unsigned 32-bit number for each document, ``postings`` one or more for each term.
    """

    first: int
    lengths: bytes
    postings: dict[str, bytes]


_page_decoder = msgspec.msgpack.Decoder(TermPage)


def make_page(first: int, documents: Iterable[Sequence[str]]) -> TermPage:
    """Return the page of documents given as terms, numbered from ``first`` on."""
    lengths = array("I")
    postings: dict[str, array[int]] = {}
    for number, document in enumerate(documents, first):
        lengths.append(len(document))
        for term, times in Counter(document).items():
            postings.setdefault(term, array("I")).append(number << SHIFT | min(times, MAX_TIMES))
    stored = {term: found.tobytes() for term, found in postings.items()}
    return TermPage(first=first, lengths=lengths.tobytes(), postings=stored)


def write_page(page: TermPage) -> bytes:
    """Return a page as bytes."""
    return msgspec.msgpack.encode(page)


def read_page(stored: bytes) -> TermPage:
    """Decode a page of `write_page`. Raises `msgspec.DecodeError` for anything else."""
    return _page_decoder.decode(stored)


class TermIndex:
    """The documents 0 to ``len(lengths) - 1`` of a session, by their terms.

    With ``only``, nothing but the postings of these terms is kept.
    """

    __slots__ = ("_only", "lengths", "postings", "size")

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self._only = only
        self.lengths = array("I")
        self.postings: dict[str, array[int]] = {}
        self.size = 0
        """Bytes of memory, about."""

    @property
    def is_whole(self) -> bool:
        """Return whether all terms are kept."""
        return self._only is None

    def add(self, page: TermPage) -> None:
        """Add a page. Documents that are indexed already are skipped. Raises `ValueError` if a document is missing."""
        have = len(self.lengths)
        if page.first > have:
            raise ValueError(f"document {have} is missing before {page.first}")
        self.lengths.frombytes(page.lengths[4 * (have - page.first) :])
        wanted = page.postings.keys() if self._only is None else page.postings.keys() & self._only
        for term in wanted:
            found = array("I")
            found.frombytes(page.postings[term])
            if page.first < have:
                found = array("I", (posting for posting in found if posting >> SHIFT >= have))
            if not found:
                continue
            self.size += 4 * len(found)
            known = self.postings.get(term)
            if known is None:
                self.postings[term] = found
                self.size += _TERM_BYTES
            else:
                known.extend(found)
        self.size += 4 * (len(self.lengths) - have)
