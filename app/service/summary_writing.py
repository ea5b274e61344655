"""Writing one summary: by a model, piece by piece where the range is long, or without one where that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from app.domain.history import Entry, SummarySource
from app.domain.tokens import Encode
from app.service import tokens
from app.service.summary_jobs import Job, Source
from app.service.summary_models import Chosen, ModelFailed, Models
from app.store import breakers
from app.store.connection import Connection, Database
from app.strategies import extractive
from app.strategies.summarizing import UnusableSummary, ask, check, clip, without_model, write_records
from app.strategies.summary_prompts import INSTRUCTIONS

_log = logging.getLogger(__name__)

# Tokens of a summary without a model, at most; it never takes more than half of what it stands for.
EXTRACT = 1_500
# What says less than this says nothing, so what is not twice as long is left as it is.
LEAST = 24
# Of a longer history than this many calls take, the oldest part is condensed without a model.
MAX_RECORDS = 16
MIN_RECORD = 500
# Marks, framing, and what an estimate may be off by.
SPARE = 300
MAX_GIVEN = 4_000
NOTHING_SHORTER = "nothing shorter was found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A summary, or None where nothing shorter was found. ``error`` says why no model wrote it, if one should have."""

    text: str | None
    tokens: int
    source: SummarySource
    model: str = ""
    error: str = ""


class Scribe:
    """Writes summaries. Reads nothing but the breakers, and holds no connection while a model works."""

    def __init__(self, database: Database, models: Models, *, clock: Callable[[], datetime]) -> None:
        self._database = database
        self._models = models
        self._clock = clock

    async def write(self, job: Job, source: Source, *, prolong: Callable[[], Awaitable[None]]) -> Written:
        """The summary of ``source``. ``prolong`` is called before each call of a model and may raise."""
        entries = await asyncio.to_thread(source.read)
        encode = _encoder(job.model)
        error = ""
        chosen = self._models.choose(job)
        if chosen is not None and (source.tokens >= 2 * LEAST or not _replaces(job)):
            try:
                return await self._by_model(job, source, entries, chosen, encode, prolong)
            except (ModelFailed, UnusableSummary) as failure:
                error = failure.reason
                _log.info("a summary was not written by the model: %s", error)
        return await asyncio.to_thread(_without_model, job, source, entries, encode, error)

    async def _by_model(
        self,
        job: Job,
        source: Source,
        entries: Sequence[Entry],
        chosen: Chosen,
        encode: Encode,
        prolong: Callable[[], Awaitable[None]],
    ) -> Written:
        if await self._database.run(self._is_open(job, chosen), tenant=job.tenant):
            raise ModelFailed("the model is left alone after repeated failures")
        try:
            text = await self._piece_by_piece(job, source, entries, chosen, encode, prolong)
        except ModelFailed:
            await self._count_failure(job, chosen)
            raise
        except UnusableSummary as failure:
            if failure.is_fault:
                await self._count_failure(job, chosen)
            raise
        await self._forget_failures(job, chosen)
        return Written(text=text, tokens=encode(text), source="model", model=chosen.name)

    async def _piece_by_piece(
        self,
        job: Job,
        source: Source,
        entries: Sequence[Entry],
        chosen: Chosen,
        encode: Encode,
        prolong: Callable[[], Awaitable[None]],
    ) -> str:
        window = self._models.window(chosen)
        limit = self._models.config.output
        earlier = source.earlier.text if source.earlier else ""
        records, text = await asyncio.to_thread(_records, job, entries, earlier, window, _encoder(chosen.model))
        for number, record in enumerate(records, start=1):
            question = ask(job.purpose, record, earlier=text, given=clip(job.given, MAX_GIVEN))
            await prolong()
            answer = await self._models.ask(chosen, question)
            replaced = encode(record) + encode(text)
            if number == len(records):
                replaced = source.tokens if _replaces(job) else limit + 1
            text = check(job.purpose, answer, replaced=replaced, limit=limit, encode=encode)
        return text

    # Breakers

    def _is_open(self, job: Job, chosen: Chosen) -> Callable[[Connection], Awaitable[bool]]:
        return lambda connection: breakers.is_open(connection, job.tenant, chosen.name, self._clock())

    async def _count_failure(self, job: Job, chosen: Chosen) -> None:
        async with self._database.transaction(job.tenant) as connection:
            opened = await breakers.fail(connection, job.tenant, chosen.name, self._clock())
        if opened:
            _log.warning("the summarizer's model failed repeatedly and is left alone for a while")

    async def _forget_failures(self, job: Job, chosen: Chosen) -> None:
        async with self._database.transaction(job.tenant) as connection:
            await breakers.reset(connection, job.tenant, chosen.name)


def _replaces(job: Job) -> bool:
    """Whether the summary stands in for what it is made of, so that it must be shorter. A state stands beside it."""
    return job.purpose != "state" and not job.is_beside


def _encoder(model: str) -> Encode:
    name = tokens.encoding_for(model)
    return lambda text: tokens.count_text(text, name)


def _records(job: Job, entries: Sequence[Entry], earlier: str, window: int, encode: Encode) -> tuple[list[str], str]:
    """What the model is given call by call, and the summary of what comes before it."""
    # Each further call carries the summary of those before it.
    overhead = encode(INSTRUCTIONS[job.purpose]) + encode(clip(job.given, MAX_GIVEN)) + SPARE
    limit = max(MIN_RECORD, (window - overhead) * 3 // 4)
    older, newer = _split(entries, MAX_RECORDS * limit)
    if older:
        earlier = extractive.summarize(older, limit=EXTRACT, encode=encode, earlier=earlier)
    return write_records(job.purpose, newer, limit=limit, encode=encode), earlier


def _split(entries: Sequence[Entry], room: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """The newest entries that fit ``room`` tokens, and those before them."""
    start = len(entries)
    while start and (room := room - entries[start - 1].tokens) >= 0:
        start -= 1
    start = min(start, max(0, len(entries) - 1))
    return entries[:start], entries[start:]


def _without_model(job: Job, source: Source, entries: Sequence[Entry], encode: Encode, error: str) -> Written:
    limit = min(EXTRACT, source.tokens // 2) if _replaces(job) else EXTRACT
    earlier = source.earlier.text if source.earlier else ""
    if limit < LEAST:
        return Written(text=None, tokens=0, source="extractive", error=error or NOTHING_SHORTER)
    text = without_model(job.purpose, entries, limit=limit, encode=encode, earlier=earlier, given=job.given)
    length = encode(text)
    if not text or length > limit:
        return Written(text=None, tokens=0, source="extractive", error=error or NOTHING_SHORTER)
    return Written(text=text, tokens=length, source="extractive", error=error)
