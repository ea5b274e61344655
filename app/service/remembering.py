"""What leaves contexts at somebody's word goes into the tenant's memory, and is told anew where it changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.domain.messages import Dialect as DialectName
from app.service.summarizer import Summarizer
from app.service.summary_jobs import Job
from app.store import summaries
from app.store.connection import Database
from app.strategies.foresight import MEMORY

# One entry of the memory tells of so many messages at most, and of more than so many entries' worth only the newest
# are told: a session may be of any length.
PIECE = 1_000
MOST = 32
# Seconds that whoever clears or hides something waits for the memory; what takes longer goes on behind.
PATIENCE = 5.0

Range = tuple[int, int]


class Remembering:
    """Has ranges of sessions summarised into the memory, by the summarizer's model where there is one."""

    def __init__(self, database: Database, summarizer: Summarizer) -> None:
        self._database = database
        self._summarizer = summarizer

    async def write(
        self,
        tenant: str,
        session_id: str,
        ranges: Iterable[Range],
        *,
        strategy: str,
        dialect: DialectName = "openai_chat",
        model: str = "",
        credentials: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Write what is live in ``ranges`` (sequence numbers, inclusive) into the memory, unless it is there already.

        Returns when that is done, or has taken too long to be waited for.
        """
        pieces: list[Range] = []
        async with self._database.reading(tenant) as connection:
            for first, last in ranges:
                told = await summaries.ranges(connection, tenant, session_id, MEMORY, first, last)
                for gap in _gaps(first, last, told):
                    pieces += await summaries.pieces(connection, tenant, session_id, *gap, size=PIECE, most=MOST)
        jobs = [
            Job(
                tenant=tenant,
                session_id=session_id,
                purpose=MEMORY,
                first_seq=first,
                last_seq=last,
                strategy=strategy,
                dialect=dialect,
                model=model,
                credentials=tuple(credentials),
                is_beside=True,
            )
            for first, last in sorted(pieces)[-MOST:]
        ]
        await self._summarizer.see_to(jobs, PATIENCE)


def _gaps(first: int, last: int, told: Iterable[Range]) -> list[Range]:
    """What of ``first`` to ``last`` is in none of the ranges that were told."""
    gaps = []
    for start, end in sorted(told):
        if start > first:
            gaps.append((first, min(last, start - 1)))
        first = max(first, end + 1)
    return [*gaps, (first, last)] if first <= last else gaps
