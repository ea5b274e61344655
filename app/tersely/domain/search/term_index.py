"""The term index of a session: which messages contain a term, and how often. It is built in pages and extended at its
end.

A posting is one number of four bytes: the document's number, shifted, and the count of the term (up to `MAX_TIMES`). An
index of 100,000 messages takes some tens of megabytes. Extending it costs only the new messages.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence

import msgspec
from typing_extensions import override

SHIFT = 6
MAX_TIMES = (1 << SHIFT) - 1
MAX_DOCUMENTS = 1 << (32 - SHIFT)
# Pages of so many documents are kept as they are.
WHOLE_PAGE = 128
# Approximate bytes of a term in a page, besides its postings.
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
    postings: defaultdict[str, list[int]] = defaultdict(list)
    for number, document in enumerate(documents, first):
        lengths.append(len(document))
        shifted = number << SHIFT
        for term, times in Counter(document).items():
            postings[term].append(shifted | min(times, MAX_TIMES))
    stored = {term: array("I", found).tobytes() for term, found in postings.items()}
    return TermPage(first=first, lengths=lengths.tobytes(), postings=stored)


def merge_pages(pages: Sequence[TermPage]) -> TermPage:
    """Return consecutive pages as one."""
    lengths = b"".join([page.lengths for page in pages])
    postings: dict[str, list[bytes]] = {}
    for page in pages:
        for term, found in page.postings.items():
            postings.setdefault(term, []).append(found)
    joined = {term: b"".join(found) for term, found in postings.items()}
    return TermPage(first=pages[0].first, lengths=lengths, postings=joined)


def write_page(page: TermPage) -> bytes:
    """Return a page as bytes."""
    return msgspec.msgpack.encode(page)


def read_page(stored: bytes) -> TermPage:
    """Decode a page of `write_page`. Raises `msgspec.DecodeError` for anything else."""
    return _page_decoder.decode(stored)


class Postings(Mapping[str, Sequence[int]]):
    """The postings of each term, in the order of the documents.

    They are kept as the pages have them, and joined whenever a term is asked for: a search asks for few terms. What is
    added in small pieces is joined at once, so that there are few pages.
    """

    __slots__ = ("_newest", "_pages")

    def __init__(self) -> None:
        self._pages: list[Mapping[str, bytes | bytearray]] = []
        self._newest: dict[str, bytearray] = {}

    def add(self, postings: Mapping[str, bytes], *, documents: int) -> None:
        """Add the postings of so many later documents: for each term unsigned 32-bit numbers."""
        if documents >= WHOLE_PAGE:
            if self._newest:
                self._pages.append(self._newest)
                self._newest = {}
            self._pages.append(postings)
        else:
            _extend(self._newest, postings)

    @override
    def items(self) -> ItemsView[str, Sequence[int]]:
        joined: dict[str, bytearray] = {}
        for page in (*self._pages, self._newest):
            _extend(joined, page)
        return {term: array("I", bytes(found)) for term, found in joined.items()}.items()

    @override
    def __getitem__(self, term: str) -> Sequence[int]:
        joined = array("I")
        for page in (*self._pages, self._newest):
            if found := page.get(term):
                joined.frombytes(found)
        if not joined:
            raise KeyError(term)
        return joined

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(set().union(*self._pages, self._newest))

    @override
    def __len__(self) -> int:
        return len(set().union(*self._pages, self._newest))


def _extend(joined: dict[str, bytearray], page: Mapping[str, bytes | bytearray]) -> None:
    for term, found in page.items():
        if term in joined:
            joined[term] += found
        else:
            joined[term] = bytearray(found)


class TermIndex:
    """The documents 0 to ``len(lengths) - 1`` of a session, by their terms.

    With ``only``, nothing but the postings of these terms is kept.
    """

    __slots__ = ("_only", "lengths", "postings", "size")

    def __init__(self, only: frozenset[str] | None = None) -> None:
        self._only = only
        self.lengths = array("I")
        self.postings = Postings()
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
        postings = page.postings
        if self._only is not None:
            postings = {term: postings[term] for term in postings.keys() & self._only}
        if page.first < have:
            postings = _from_document(postings, have)
        added = len(self.lengths) - have
        self.postings.add(postings, documents=added)
        self.size += sum(map(len, postings.values())) + _TERM_BYTES * len(postings) + 4 * added


def _from_document(postings: Mapping[str, bytes], first: int) -> dict[str, bytes]:
    """Return the postings of the documents from ``first`` on."""
    later: dict[str, bytes] = {}
    for term, stored in postings.items():
        numbers = array("I")
        numbers.frombytes(stored)
        if found := array("I", (posting for posting in numbers if posting >> SHIFT >= first)):
            later[term] = found.tobytes()
    return later
