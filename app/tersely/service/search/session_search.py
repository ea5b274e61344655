"""`context_search`: search the whole history of a session without loading it.

It searches the live messages as the client saw them: no superseded, dropped, undone or removed ones, and no calls to
Tersely's own tools, since otherwise it would find excerpts of excerpts. Instructions (system and developer text) are
not part of the history: every context contains them anyway. Positions (``messages 14-18 of 42``) count exactly these
messages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from weakref import WeakValueDictionary

from msgspec.structs import replace

from tersely.dialects.registry import dialect_named
from tersely.domain.errors import InvalidRequest, NotFound
from tersely.domain.history.message_numbers import MessageNumbers, NumberingException
from tersely.domain.history.sessions import Session
from tersely.domain.messages import Message, Part, Text, ToolResult, searchable_text
from tersely.domain.search import excerpts, overview
from tersely.domain.search.excerpts import (
    ExcerptRow,
    FirstMessages,
    LastMessages,
    Lookup,
    OverviewSearch,
    Range,
    RangeLookup,
    RelevanceSearch,
    TextSearch,
    TurnMessages,
)
from tersely.domain.search.relevance import (
    PHRASED,
    Corpus,
    Ranked,
    build_query,
    fuse,
    prefer_phrases,
    query_terms,
    search_corpus,
)
from tersely.domain.search.terms import tokenize
from tersely.service.common.metrics import Metrics
from tersely.service.search.embedder import Embedder
from tersely.service.search.missing_pages import make_missing_pages
from tersely.service.search.term_indexes import TermIndexes, terms_at
from tersely.store.commit import turns
from tersely.store.db.connection import Connection, Database
from tersely.store.history import messages as message_store
from tersely.store.history import numbering, sessions
from tersely.store.history.messages import StoredMessage
from tersely.store.search import pages as pages

# Separates the messages of a page: a code point without a character, which is replaced in the texts.
SEPARATOR = "\ufffe"
_UNSTORABLE = re.compile("[\x00\ufffe\ud800-\udfff]")
_WORD = re.compile(r"\w+")
# So many of the longest words of a query narrow the search down.
PROBES = 3
# Segments whose pages are scanned at once, the newest first; frequent words are found in the first ones.
SEGMENTS_AT_ONCE = 4
BUILD_PAGES = 8
# So many of each ranking are fused.
FUSED = 100
# Phrases of a query are looked for in so many characters of a message.
PHRASED_CHARS = 4_000
# Sessions of more messages are not divided into topics.
MAX_DIVIDED = 20_000
# Seconds for one step of a search. A slow search does not mean that the database is unavailable, so it has its own
# limit.
LIMIT = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """The limits of an answer. Matches beyond ``matches`` are left out, oldest first, and the answer says so."""

    matches: int = 200
    messages: int = 1_000
    message_chars: int = 20_000
    chars: int = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A contiguous range of the history. ``rows`` and ``seqs`` are its messages, in order."""

    range: Range
    rows: tuple[ExcerptRow, ...]
    seqs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """A lookup's result: the document's ``text``, the same as values, and whether something was left out."""

    text: str
    excerpts: tuple[Excerpt, ...]
    total: int
    is_truncated: bool


def fold(text: str) -> str:
    """Return the text in its searched form."""
    return _UNSTORABLE.sub("\ufffd", text.casefold())


def search_words(folded: str) -> list[str]:
    """Return the longest words of a query, which a text must contain (maybe as parts of longer words) to match."""
    return sorted(set(_WORD.findall(folded)), key=lambda word: (-len(word), word))[:PROBES]


class Searcher:
    """Lookups in stored sessions."""

    def __init__(
        self,
        database: Database,
        metrics: Metrics,
        embedder: Embedder | None = None,
        *,
        bounds: SearchLimits | None = None,
    ) -> None:
        """With an ``embedder``, what is relevant is found by meaning too."""
        self._database = database
        self._embedder = embedder
        self._metrics = metrics
        self._bounds = bounds or SearchLimits()
        self._indexes = TermIndexes(database)
        # If several searches of a session start at once, the first one makes the pages and the others wait for it.
        self._building: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def within(self, bounds: SearchLimits) -> Searcher:
        """Return the same searches, with other bounds of what an answer may hold."""
        other = copy(self)
        other._bounds = bounds  # noqa: SLF001 it is one of us
        return other

    async def search(self, tenant: str, session_id: str, lookup: Lookup) -> LookupResult:
        """Raises `NotFound` for a session that is not there."""
        with self._metrics.search_seconds.labels(_mode(lookup)).time():
            if isinstance(lookup, TextSearch):
                await self._build(tenant, session_id)
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                session, exceptions = await _load(connection, tenant, session_id)
                if not isinstance(lookup, RelevanceSearch | OverviewSearch):
                    order = _order(session, exceptions)
                    ranges, notes = await self._ranges(connection, tenant, session_id, lookup, order, session.last_seq)
                    return await self._show(connection, tenant, session_id, lookup, order, ranges, notes)
            # Ranking may take its time: no connection is held meanwhile.
            hidden = frozenset(row.seq for row in exceptions if is_hidden(row))
            if isinstance(lookup, OverviewSearch):
                return await self._overview(tenant, session, lookup, _order(session, exceptions), hidden)
            seqs = await self.rank(tenant, session, lookup.query, hidden=hidden, limit=self._most(lookup))
            order = _order(session, exceptions)
            ranges = excerpts.plan_windows(
                _positions(order, seqs), before=lookup.before, after=lookup.after, total=order.total
            )
            ranks = {seq: rank for rank, seq in enumerate(seqs, start=1)}
            async with self._database.reading(tenant, limit=LIMIT) as connection:
                return await self._show(connection, tenant, session_id, lookup, order, ranges, [], ranks)

    async def build_pages(self, tenant: str, session_id: str) -> None:
        """Build what searches of a session would have to build first."""
        await self._build(tenant, session_id)
        await self._indexes.store_pages(tenant, session_id)

    async def _build(self, tenant: str, session_id: str) -> None:
        lock = self._building.setdefault((tenant, session_id), asyncio.Lock())
        async with lock:
            await self._build_pages(tenant, session_id)

    async def rank(
        self, tenant: str, session: Session, text: str, *, hidden: frozenset[int] = frozenset(), limit: int
    ) -> list[int]:
        """Return the sequence numbers of the ``limit`` messages that ``text`` is about, the best first.

        ``hidden`` are sequence numbers of messages that are no part of the history.
        """
        if not limit or not tokenize(text):
            return []
        if self._embedder is None:
            found = await self._rank_words(tenant, session, text, hidden, limit)
            return [each.number for each in found]
        self._embedder.schedule(tenant, session.id)
        by_meaning, by_words = await asyncio.gather(
            self._embedder.nearest(tenant, session.id, text, FUSED),
            self._rank_words(tenant, session, text, hidden, max(limit, FUSED)),
        )
        near = [each for each in by_meaning if each.number not in hidden and each.number <= session.last_seq]
        return fuse(by_words, near)[:limit]

    async def _rank_words(
        self, tenant: str, session: Session, text: str, hidden: frozenset[int], limit: int, phrased: int = PHRASED
    ) -> list[Ranked]:
        """Return the ``limit`` messages by words, by their sequence numbers. Phrases count in ``phrased`` of them."""
        unseen = frozenset(seq - 1 for seq in hidden if seq <= session.last_seq)
        async with self._indexes.index_for(tenant, session, query_terms(text)) as index:
            corpus = Corpus(lengths=index.lengths, postings=index.postings)
            first = await asyncio.to_thread(build_query, text, corpus, hidden=unseen)
            best: list[list[str]] = []
            if index.is_whole:
                async with self._database.reading(tenant, limit=LIMIT) as connection:
                    best = await terms_at(connection, tenant, session.id, [each.number + 1 for each in first.best])
            found = await asyncio.to_thread(search_corpus, first, corpus, best, limit=max(limit, phrased))
            if phrased and found:
                async with self._database.reading(tenant, limit=LIMIT) as connection:
                    seqs = [each.number + 1 for each in found[:phrased]]
                    documents = await terms_at(connection, tenant, session.id, seqs, PHRASED_CHARS)
                found = prefer_phrases(first, found, documents, corpus)[:limit]
        return [Ranked(number=each.number + 1, score=each.score) for each in found]

    async def _overview(
        self, tenant: str, session: Session, lookup: OverviewSearch, order: MessageNumbers, hidden: frozenset[int]
    ) -> LookupResult:
        """Return the turns that cover the session as to a question, in time order, a few lines of each."""
        if not lookup.most or not tokenize(lookup.query):
            return LookupResult(text=excerpts.NOTHING_FOUND, excerpts=(), total=order.total, is_truncated=False)
        found = await self._rank_words(tenant, session, lookup.query, hidden, overview.CANDIDATES, phrased=0)
        starts = await self._topic_starts(tenant, session)
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            turn_of = await turns.of_messages(connection, tenant, session.id, [each.number for each in found])
            best = overview.order_turns(found, turn_of, starts)
            ends = await turns.ends(connection, tenant, session.id, list(best)[: overview.MOST_TURNS])
            seqs = {turn: sorted({*ends[turn], best[turn]}) for turn in best if turn in ends}
            wanted = [seq for each in seqs.values() for seq in each]
            stored = {m.seq: m for m in await message_store.content(connection, tenant, session.id, wanted)}
        rows = await asyncio.to_thread(_overview_rows, seqs, stored, order)
        chosen = overview.fit_turns(
            {turn: [searchable_text(row.message) for row in of_turn] for turn, of_turn in rows.items()}
        )
        shown = sorted([*rows][: lookup.most] if len(chosen) > lookup.most else chosen)
        return _overview_findings([rows[turn] for turn in shown], order, is_all=len(shown) == len(best))

    async def _topic_starts(self, tenant: str, session: Session) -> list[int]:
        """Return the sequence numbers at which topics start. A session of very many messages counts as one topic."""
        if session.last_seq > MAX_DIVIDED:
            return [1]
        async with self._indexes.index_for(tenant, session, ()) as index:
            corpus = Corpus(lengths=index.lengths, postings=index.postings)
            return [number + 1 for number in await asyncio.to_thread(overview.topic_starts, corpus)]

    def _most(self, lookup: RelevanceSearch) -> int:
        """Return how many messages an answer may contain, with their neighbours."""
        context_size = lookup.before + lookup.after + 1
        return min(lookup.first, self._bounds.matches, max(1, self._bounds.messages // context_size))

    async def _show(
        self,
        connection: Connection,
        tenant: str,
        session_id: str,
        lookup: RangeLookup,
        order: MessageNumbers,
        ranges: tuple[Range, ...],
        notes: list[str],
        ranks: Mapping[int, int] | None = None,
    ) -> LookupResult:
        ranges, cut = _bound(ranges, self._bounds.messages, newest=not isinstance(lookup, FirstMessages))
        notes += cut
        wanted = [seq for span in ranges for seq in order.seqs(span.first, span.last)]
        stored = {m.seq: m for m in await message_store.content(connection, tenant, session_id, wanted)}
        query = lookup.query if isinstance(lookup, TextSearch | RelevanceSearch) else ""
        return self._render(ranges, order, stored, notes, query=query, ranks=ranks or {})

    async def _ranges(
        self,
        connection: Connection,
        tenant: str,
        session_id: str,
        lookup: TextSearch | LastMessages | FirstMessages | TurnMessages,
        order: MessageNumbers,
        last_seq: int,
    ) -> tuple[tuple[Range, ...], list[str]]:
        match lookup:
            case TextSearch(before=before, after=after):
                matches, is_all = await self._matches(connection, tenant, session_id, lookup.query, order, last_seq)
                notes = [] if is_all else [f"the newest {len(matches)} matches; there are older ones"]
                return excerpts.plan_windows(matches, before=before, after=after, total=order.total), notes
            case LastMessages() | FirstMessages():
                return excerpts.plan_ends(lookup, total=order.total), []
            case TurnMessages():
                seqs = await turns.live_seqs(connection, tenant, session_id, lookup.first_turn, lookup.last_turn)
                return excerpts.plan_windows(_positions(order, seqs), before=0, after=0, total=order.total), []

    async def _matches(
        self, connection: Connection, tenant: str, session_id: str, query: str, order: MessageNumbers, last_seq: int
    ) -> tuple[list[int], bool]:
        """Return the positions of the newest matches, and whether those are all."""
        folded = fold(query)
        most = self._bounds.matches
        full = last_seq // pages.PAGE
        recent = await pages.content(connection, tenant, session_id, full * pages.PAGE + 1, last_seq)
        found = _positions(order, [each.seq for each in recent if folded in searchable_text_of(each)])
        for among in await self._candidates(connection, tenant, session_id, folded, full):
            below = among
            while below and len(found) <= most:
                batch = await pages.find_pages(connection, tenant, session_id, folded, among=below, limit=8)
                for page, text in batch:
                    found += _positions(order, _seqs_in_page(page, text, folded))
                below = [page for page in below if page < batch[-1][0]] if len(batch) == 8 else []
        found.sort()
        return found[-most:], len(found) <= most

    async def _candidates(
        self, connection: Connection, tenant: str, session_id: str, folded: str, full: int
    ) -> list[list[int]]:
        """Return the pages that may contain a text, in portions, the newest first."""
        whole = full // pages.SEGMENT
        probes = search_words(folded)
        if probes:
            segments = await pages.find_segments(connection, tenant, session_id, probes)
        else:
            segments = list(range(whole))
        portions = [list(range(whole * pages.SEGMENT, full))]
        for start in range(len(segments), 0, -SEGMENTS_AT_ONCE):
            some = segments[max(0, start - SEGMENTS_AT_ONCE) : start]
            portions.append([page for segment in some for page in pages.pages_of(segment)])
        return portions

    async def _build_pages(self, tenant: str, session_id: str) -> None:
        """Make missing pages and words."""
        full = await make_missing_pages(
            self._database,
            tenant,
            session_id,
            find_missing=pages.missing_pages,
            make=lambda _, contents: page_text(contents),
            add=pages.add_pages,
            at_once=BUILD_PAGES,
            limit=LIMIT,
        )
        if full is not None and (segments := full // pages.SEGMENT):
            await self._build_words(tenant, session_id, segments)

    async def _build_words(self, tenant: str, session_id: str, full: int) -> None:
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            missing = await pages.missing_segments(connection, tenant, session_id, full)
        for segment in missing:
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                edits = await pages.edits(connection, tenant, session_id)
                texts = await pages.texts(connection, tenant, session_id, pages.pages_of(segment))
            if len(texts) < pages.SEGMENT:
                continue
            words = await asyncio.to_thread(_join_words, texts)
            async with self._database.transaction(tenant, limit=LIMIT) as connection:
                if await pages.edits(connection, tenant, session_id, lock=True) == edits:
                    await pages.add_words(connection, tenant, session_id, segment, words)

    def _render(
        self,
        ranges: Sequence[Range],
        order: MessageNumbers,
        stored: dict[int, StoredMessage],
        notes: list[str],
        *,
        query: str,
        ranks: Mapping[int, int],
    ) -> LookupResult:
        found: list[Excerpt] = []
        room = self._bounds.chars
        clipped = 0
        for span in ranges:
            rows: list[ExcerptRow] = []
            seqs = order.seqs(span.first, span.last)
            for position, seq in zip(range(span.first, span.last + 1), seqs, strict=True):
                if seq not in stored:
                    continue  # the session was deleted meanwhile
                message, was_clipped = _clip(_read(stored[seq]), min(self._bounds.message_chars, max(room, 200)), query)
                clipped += was_clipped
                room -= len(searchable_text(message))
                rank = ranks.get(seq, 0)
                rows.append(ExcerptRow(number=position, turn=stored[seq].turn, message=message, rank=rank, query=query))
            found.append(Excerpt(range=span, rows=tuple(rows), seqs=tuple(seq for seq in seqs if seq in stored)))
        if clipped:
            notes = [*notes, f"{clipped} long messages are cut short"]
        text = excerpts.render_excerpts(ranges, (row for each in found for row in each.rows), order.total)
        if notes:
            text += f"\n--- not everything is shown: {'; '.join(notes)} ---"
        return LookupResult(
            text=_UNSTORABLE.sub("\ufffd", text),
            excerpts=tuple(found),
            total=order.total,
            is_truncated=bool(notes),
        )


async def _load(connection: Connection, tenant: str, session_id: str) -> tuple[Session, list[numbering.ExceptionRow]]:
    session = await sessions.get(connection, tenant, session_id)
    if session is None:
        raise NotFound("there is no such session")
    return session, await numbering.exceptions(connection, tenant, session_id)


def _order(session: Session, rows: Iterable[numbering.ExceptionRow]) -> MessageNumbers:
    return MessageNumbers(
        session.last_seq,
        (NumberingException(seq=row.seq, position=row.position, is_hidden=is_hidden(row)) for row in rows),
    )


def is_hidden(row: numbering.ExceptionRow) -> bool:
    """Return whether a message is no part of the history that is searched."""
    return row.status != "live" or row.turn == 0 or not (row.model_visible and row.client_visible)


def searchable_text_of(content: pages.MessageColumns) -> str:
    """Return a message's text in its searched form; empty for instructions and unreadable messages."""
    if content.turn == 0 or not content.raw:
        return ""
    try:
        return fold(searchable_text(dialect_named(content.dialect).read_reply(content.raw)))
    except InvalidRequest:
        return ""


def page_text(contents: Iterable[pages.MessageColumns]) -> str:
    """Return the text of a page: one piece for each of its messages, even if it is empty."""
    return SEPARATOR.join(searchable_text_of(content) for content in contents)


def _join_words(texts: Iterable[str]) -> str:
    words: set[str] = set()
    for text in texts:
        words.update(_WORD.findall(text))
    return " ".join(sorted(words))


def _seqs_in_page(page: int, text: str, folded: str) -> list[int]:
    first = page * pages.PAGE + 1
    return [first + at for at, piece in enumerate(text.split(SEPARATOR)) if folded in piece]


def _overview_rows(
    seqs: Mapping[int, Sequence[int]], stored: Mapping[int, StoredMessage], order: MessageNumbers
) -> dict[int, list[ExcerptRow]]:
    """Return the lines of each turn whose messages are ``stored``."""
    rows: dict[int, list[ExcerptRow]] = {}
    for turn, numbers in seqs.items():
        for seq in numbers:
            number = order.number_of(seq)
            if number is None or seq not in stored:
                continue
            message = _read(stored[seq])
            line = overview.shorten_line(searchable_text(message), is_users=message.role == "user")
            if line:
                message = replace(message, parts=(Text(text=line),))
                rows.setdefault(turn, []).append(ExcerptRow(number=number, turn=turn, message=message))
    return rows


def _overview_findings(
    turns_shown: Sequence[Sequence[ExcerptRow]], order: MessageNumbers, *, is_all: bool
) -> LookupResult:
    rows = sorted((row for of_turn in turns_shown for row in of_turn), key=lambda row: row.number)
    if not rows:
        return LookupResult(text=excerpts.NOTHING_FOUND, excerpts=(), total=order.total, is_truncated=False)
    numbers = {row.number: row for row in rows}
    spans = excerpts.plan_windows(numbers, before=0, after=0, total=order.total)
    shown = tuple(
        Excerpt(
            range=span,
            rows=tuple(numbers[number] for number in range(span.first, span.last + 1)),
            seqs=tuple(order.seqs(span.first, span.last)),
        )
        for span in spans
    )
    title = f"--- overview: {len(turns_shown)} turns of {order.total} messages, in order ---"
    note = "--- not everything is shown: mode 'turn' shows a turn whole ---"
    text = "\n".join([title, *map(excerpts.render_row, rows), *([] if is_all else [note])])
    return LookupResult(
        text=_UNSTORABLE.sub("\ufffd", text), excerpts=shown, total=order.total, is_truncated=not is_all
    )


def _positions(order: MessageNumbers, seqs: Iterable[int]) -> list[int]:
    return [position for seq in seqs if (position := order.number_of(seq)) is not None]


def _mode(lookup: Lookup) -> str:
    return {
        TextSearch: "search",
        RelevanceSearch: "relevant",
        OverviewSearch: "relevant",
        LastMessages: "tail",
        FirstMessages: "head",
        TurnMessages: "turn",
    }[type(lookup)]


def _read(stored: StoredMessage) -> Message:
    if not stored.raw:  # removed meanwhile
        return Message(role=stored.role, parts=(), raw=b"")  # type: ignore[arg-type]
    return dialect_named(stored.dialect).read_reply(stored.raw)


def _bound(ranges: Sequence[Range], limit: int, *, newest: bool) -> tuple[tuple[Range, ...], list[str]]:
    """Return the newest (or first) ranges with at most ``limit`` messages in total, and a note if some were
    left out.
    """
    kept: list[Range] = []
    room = limit
    for span in reversed(ranges) if newest else ranges:
        size = span.last - span.first + 1
        if room <= 0:
            break
        first = span.last - room + 1 if newest and size > room else span.first
        kept.append(Range(first=first, last=first + min(size, room) - 1))
        room -= size
    kept.sort(key=lambda span: span.first)
    is_all = sum(s.last - s.first + 1 for s in ranges) <= limit
    return tuple(kept), [] if is_all else [f"an answer holds at most {limit} messages"]


def _clip(message: Message, limit: int, query: str = "") -> tuple[Message, bool]:
    """Return the message with at most about ``limit`` characters of text in all, and whether something went.

    What stays of a text has ``query`` in it, if the text has.
    """
    if len(searchable_text(message)) <= limit:
        return message, False
    parts: list[Part] = []
    for part in message.parts:
        if isinstance(part, Text | ToolResult):
            text = _clip_text(part.text, max(0, limit), query)
            limit -= len(text)
            parts.append(replace(part, text=text))
        else:
            parts.append(part)
    return replace(message, parts=tuple(parts)), True


def _clip_text(text: str, limit: int, query: str) -> str:
    if len(text) <= limit:
        return text
    first, last = excerpts.find_around(text, query, max(limit, len(query)))
    before = f"[... {first} characters before]" if first else ""
    after = f"[... {len(text) - last} more characters]" if last < len(text) else ""
    return before + text[first:last] + after
