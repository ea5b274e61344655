"""Embed messages in the background, for sessions that are searched by relevance.

A session is embedded from its beginning, a batch at a time. The stored progress lets any process continue. After a
failure the next search tries again; until then, and while the model host is unavailable, searches work without
embeddings.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence

from tersely.domain.errors import StoreUnavailable, UpstreamRefused, UpstreamUnavailable
from tersely.domain.search.relevance import Ranked
from tersely.service.search.term_indexes import LIMIT, document_words
from tersely.store.db.connection import Database
from tersely.store.search import embeddings
from tersely.store.search import pages as pages
from tersely.upstream.embeddings import EmbeddingsHost

BATCH = 64
# Characters of a message that are embedded: models take some thousand tokens.
EMBEDDED = 8_000
# Maximum of waiting sessions. Others are embedded after their next search.
WAITING = 1_000
# Messages whose vectors are compared, chosen by their signs.
COMPARED = 200
# Seconds that a search waits for the model, and seconds of a pause after a failure of the host.
QUERY_LIMIT = 2.0
REST = 30.0

CHARS_PER_TOKEN = 4

_log = logging.getLogger(__name__)


def charge_nobody(_tenant: str, _tokens: int) -> None:
    """Count nothing."""


class Embedder:
    """Embeds sessions in the background, and finds messages by meaning."""

    def __init__(
        self,
        database: Database,
        host: EmbeddingsHost,
        *,
        monotonic: Callable[[], float],
        charge: Callable[[str, int], None] = charge_nobody,
    ) -> None:
        """``charge`` counts tokens for a tenant's limits."""
        self._charge = charge
        self._database = database
        self._host = host
        self._monotonic = monotonic
        self._waiting: dict[tuple[str, str], None] = {}
        self._wanted = asyncio.Event()
        self._rests_until = 0.0
        self._working: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start working."""
        await self._host.open()
        self._working = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Stop, wherever it is."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait([self._working])
        await self._host.close()

    def schedule(self, tenant: str, session_id: str) -> None:
        """Embed what is new in a session, some time. Never waits."""
        if len(self._waiting) < WAITING:
            self._waiting[tenant, session_id] = None
            self._wanted.set()

    async def nearest(self, tenant: str, session_id: str, text: str, most: int) -> list[Ranked]:
        """Return the messages with a meaning similar to ``text``: sequence numbers with cosines, most similar first.

        Empty if nothing is embedded yet or the host does not answer in time: a search does not fail for that.
        """
        if self._monotonic() < self._rests_until:
            return []
        try:
            async with asyncio.timeout(QUERY_LIMIT):
                (vector,) = await self._embed(tenant, [text[:EMBEDDED]])
        except (UpstreamUnavailable, UpstreamRefused, TimeoutError) as error:
            self._rest(error)
            return []
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            model = self._host.model
            found = await embeddings.nearest(connection, tenant, session_id, model, vector, COMPARED)
        # Vectors that point away are unrelated.
        ranked = sorted((-cosine, -seq) for seq, cosine in found if cosine > 0)
        return [Ranked(number=-seq, score=-cosine) for cosine, seq in ranked[:most]]

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(max(0.0, self._rests_until - self._monotonic()))
            tenant, session_id = next(iter(self._waiting))
            del self._waiting[tenant, session_id]
            if not self._waiting:
                self._wanted.clear()
            try:
                while await self._embed_some(tenant, session_id):
                    pass
            except (UpstreamUnavailable, StoreUnavailable) as error:
                self._rest(error)
                self.schedule(tenant, session_id)

    def _rest(self, error: Exception) -> None:
        self._rests_until = self._monotonic() + REST
        _log.warning("embeddings: %s; searching without them for %.0f s", type(error).__name__, REST)

    async def _embed_some(self, tenant: str, session_id: str) -> bool:
        """Embed the next batch; False when there is nothing left to do."""
        model = self._host.model
        async with self._database.reading(tenant, limit=LIMIT) as connection:
            edits = await pages.edits(connection, tenant, session_id)
            first = await embeddings.last(connection, tenant, session_id, model) + 1
            content = await pages.content(connection, tenant, session_id, first, first + BATCH - 1)
        if edits is None or not content:
            return False
        texts = {each.seq: words for each in content if (words := document_words(each)[:EMBEDDED].strip())}
        vectors = dict(zip(texts, await self._embed_all(tenant, list(texts.values())), strict=True))
        async with self._database.transaction(tenant, limit=LIMIT) as connection:
            now = await pages.edits(connection, tenant, session_id, lock=True)
            # Messages that were removed meanwhile must not come back: then the batch is read again.
            if now == edits:
                rows = [(each.seq, vectors.get(each.seq)) for each in content]
                await embeddings.add(connection, tenant, session_id, model, rows)
        return now is not None

    async def _embed_all(self, tenant: str, texts: Sequence[str]) -> Sequence[array[float] | None]:
        """Return a vector for each text; None for a text that the model refuses."""
        if not texts:
            return []
        try:
            return await self._embed(tenant, texts)
        except UpstreamRefused:
            if len(texts) == 1:
                return [None]
        middle = len(texts) // 2
        return [*await self._embed_all(tenant, texts[:middle]), *await self._embed_all(tenant, texts[middle:])]

    async def _embed(self, tenant: str, texts: Sequence[str]) -> Sequence[array[float]]:
        found = await self._host.embed(texts)
        # Some hosts report no usage.
        self._charge(tenant, sum(map(len, texts)) // CHARS_PER_TOKEN if found.tokens is None else found.tokens)
        return found.vectors
