"""Write one summary: with a model, in pieces if the range is long, or without one if that fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from tersely.domain.history.history import Entry, SummarySource
from tersely.domain.tokens import Encode
from tersely.service.common import tokens
from tersely.service.common.metrics import Metrics
from tersely.service.money.charges import credible_count
from tersely.service.summaries.jobs import Job, SummaryInput
from tersely.service.summaries.models import ModelAnswer, ModelFailed, Models, SelectedModel
from tersely.store.db.connection import Connection, Database
from tersely.store.notes import summary_costs
from tersely.store.notes.summary_costs import SummaryCosts
from tersely.store.ops import breakers
from tersely.strategies.prefetch import MEMORY_UPDATE
from tersely.strategies.summaries import extractive
from tersely.strategies.summaries.prompts import INSTRUCTIONS
from tersely.strategies.summaries.summarizing import (
    SummaryQuestion,
    UnusableSummary,
    build_question,
    check_reply,
    clip,
    without_model,
    write_records,
)

_log = logging.getLogger(__name__)

# Maximum of tokens of a summary without a model. It never takes more than half of what it replaces.
EXTRACT = 1_500
# Shorter summaries have no useful content, so messages of less than twice this length are left unchanged.
LEAST = 24
# Of a longer history than this many calls take, the oldest part is condensed without a model.
MAX_RECORDS = 16
MIN_RECORD = 500
# Marks, framing, and what an estimate may be off by.
SPARE = 300
MAX_GIVEN = 4_000
NOTHING_SHORTER = "nothing shorter was found"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSummary:
    """A summary, or None if nothing shorter was found. ``error`` says why no model wrote it, if one should have."""

    text: str | None
    tokens: int
    source: SummarySource
    model: str = ""
    error: str = ""


# Tenant, model, tokens of input and of output, USD (None: no price is configured).
Charge = Callable[[str, str, int, int, float | None], None]


def charge_nobody(_tenant: str, _model: str, _input: int, _output: int, _money: float | None) -> None:
    """Count nothing."""


class LimitReached(Exception):
    """The session's summaries have cost what they may cost in a day. The reason is a fixed text."""


class SummaryWriter:
    """Writes summaries. Reads nothing but breakers and costs, and holds no connection while a model works."""

    def __init__(
        self,
        database: Database,
        models: Models,
        metrics: Metrics,
        *,
        clock: Callable[[], datetime],
        charge: Charge = charge_nobody,
    ) -> None:
        """``charge`` counts the tokens of a call for a tenant's limits."""
        self._charge = charge
        self._database = database
        self._models = models
        self._metrics = metrics
        self._clock = clock

    def has_model(self, job: Job) -> bool:
        """Return whether there is a model that can be asked to write the summary of ``job``."""
        return self._models.select(job) is not None

    def model_of(self, job: Job) -> str:
        """Return the name of the model that would write the summary of ``job``; empty if there is none."""
        chosen = self._models.select(job)
        return chosen.name if chosen is not None else ""

    def reason_for_none(self, job: Job) -> str:
        """Return why no model can be asked although one is configured; empty if none is."""
        return self._models.reason_for_none(job)

    async def write(self, job: Job, source: SummaryInput, *, prolong: Callable[[], Awaitable[None]]) -> WrittenSummary:
        """Return the summary of ``source``. ``prolong`` is called before each call of a model and may raise."""
        entries = await asyncio.to_thread(source.read)
        encode = _encoder(job.model)
        if source.earlier is not None and job.purpose == MEMORY_UPDATE and not entries:
            # A model summarised exactly these messages in advance.
            text = source.earlier.text
            return WrittenSummary(text=text, tokens=source.earlier.tokens, source=source.earlier.source)
        chosen = self._models.select(job)
        if error := self._models.reason_for_none(job):
            _log.warning("a summary is extracted instead of written: %s", error)
        if chosen is not None and (source.tokens >= 2 * LEAST or not _replaces(job)):
            try:
                return await self._by_model(job, source, entries, chosen, encode, prolong)
            except (ModelFailed, UnusableSummary) as failure:
                error = failure.reason
                _log.info("a summary was not written by the model: %s", error)
            except LimitReached as reached:
                error = str(reached)
        return await asyncio.to_thread(_without_model, job, source, entries, encode, error)

    async def _by_model(
        self,
        job: Job,
        source: SummaryInput,
        entries: Sequence[Entry],
        chosen: SelectedModel,
        encode: Encode,
        prolong: Callable[[], Awaitable[None]],
    ) -> WrittenSummary:
        if await self._database.run(self._is_open(job, chosen), tenant=job.tenant):
            raise ModelFailed("the model is paused after repeated failures")
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
        return WrittenSummary(text=text, tokens=encode(text), source="model", model=chosen.name)

    async def _piece_by_piece(
        self,
        job: Job,
        source: SummaryInput,
        entries: Sequence[Entry],
        chosen: SelectedModel,
        encode: Encode,
        prolong: Callable[[], Awaitable[None]],
    ) -> str:
        window = self._models.window(chosen)
        limit = self._models.config.output
        earlier = source.earlier.text if source.earlier else ""
        records, text = await asyncio.to_thread(_records, job, entries, earlier, window, _encoder(chosen.model))
        for number, record in enumerate(records, start=1):
            question = build_question(job.purpose, record, earlier=text, given=clip(job.earlier, MAX_GIVEN))
            await prolong()
            await self._reserve(job, chosen)
            day = self._clock().date()
            answered = await self._models.ask(chosen, question)
            await self._count(job, chosen, question, answered, day)
            answer = answered.reply
            replaced = encode(record) + encode(text)
            if number == len(records):
                replaced = source.tokens if _replaces(job) else limit + 1
            text = check_reply(job.purpose, answer, replaced=replaced, limit=limit, encode=encode)
        return text

    # Costs

    async def _reserve(self, job: Job, chosen: SelectedModel) -> None:
        """Count a call before it is made. Raises `LimitReached`.

        The caller holds the session's lease, so there is no concurrent count.
        """
        config, day = self._models.config, self._clock().date()
        async with self._database.transaction(job.tenant) as connection:
            spent = await summary_costs.total(connection, *job.session_key, day)
            reason = ""
            if config.daily_calls and spent.calls >= config.daily_calls:
                reason = f"the session has used its {config.daily_calls} summary calls of the day"
            elif config.daily_tokens and spent.tokens >= config.daily_tokens:
                reason = f"the session has used its {config.daily_tokens} summary tokens of the day"
            new = SummaryCosts(refused=1) if reason else SummaryCosts(calls=1)
            await summary_costs.add(connection, *job.session_key, day, chosen.name, new)
        if reason:
            self._metrics.summarizer_calls.labels("refused").inc()
            raise LimitReached(reason)

    async def _count(
        self, job: Job, chosen: SelectedModel, question: SummaryQuestion, answered: ModelAnswer, day: date
    ) -> None:
        """Add the tokens of a finished call; Tersely's own count if the host did not report them."""
        encode = _encoder(chosen.model)
        input_tokens, output_tokens = credible_count(answered.input_tokens), credible_count(answered.output_tokens)
        if not input_tokens:
            input_tokens = await asyncio.to_thread(encode, question.instructions + question.message)
        if output_tokens is None:
            output_tokens = encode(answered.reply.text)
        costs = SummaryCosts(input_tokens=input_tokens, output_tokens=output_tokens)
        price = self._models.config.price_of(costs.input_tokens, costs.output_tokens)
        if price:
            self._metrics.summarizer_cost.inc(price)
        self._charge(job.tenant, chosen.model, costs.input_tokens, costs.output_tokens, price)
        async with self._database.transaction(job.tenant) as connection:
            await summary_costs.add(connection, *job.session_key, day, chosen.name, costs)

    # Breakers

    def _is_open(self, job: Job, chosen: SelectedModel) -> Callable[[Connection], Awaitable[bool]]:
        return lambda connection: breakers.is_open(connection, job.tenant, chosen.name, self._clock())

    async def _count_failure(self, job: Job, chosen: SelectedModel) -> None:
        async with self._database.transaction(job.tenant) as connection:
            opened = await breakers.fail(connection, job.tenant, chosen.name, self._clock())
        if opened:
            self._metrics.breaker_opened.inc()
            _log.warning("the summarizer's model failed repeatedly and is paused")

    async def _forget_failures(self, job: Job, chosen: SelectedModel) -> None:
        async with self._database.transaction(job.tenant) as connection:
            await breakers.reset(connection, job.tenant, chosen.name)


def _replaces(job: Job) -> bool:
    """Return whether the summary replaces its input, so that it must be shorter. A state does not replace messages."""
    return job.purpose not in ("state", MEMORY_UPDATE)


def _encoder(model: str) -> Encode:
    name = tokens.encoding_for(model)
    return lambda text: tokens.count_text(text, name)


def _records(job: Job, entries: Sequence[Entry], earlier: str, window: int, encode: Encode) -> tuple[list[str], str]:
    """Return the records for each call of the model, and the summary that precedes them."""
    # Each further call contains the summary of the earlier ones.
    overhead = encode(INSTRUCTIONS[job.purpose]) + encode(clip(job.earlier, MAX_GIVEN)) + SPARE
    limit = max(MIN_RECORD, (window - overhead) * 3 // 4)
    older, newer = _split(entries, MAX_RECORDS * limit)
    if older:
        earlier = extractive.summarize_without_model(older, limit=EXTRACT, encode=encode, earlier=earlier)
    return write_records(job.purpose, newer, limit=limit, encode=encode), earlier


def _split(entries: Sequence[Entry], room: int) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Return the newest entries that fit into ``room`` tokens, and those before them."""
    start = len(entries)
    while start and (room := room - entries[start - 1].tokens) >= 0:
        start -= 1
    start = min(start, max(0, len(entries) - 1))
    return entries[:start], entries[start:]


def _without_model(
    job: Job, source: SummaryInput, entries: Sequence[Entry], encode: Encode, error: str
) -> WrittenSummary:
    limit = min(EXTRACT, source.tokens // 2) if _replaces(job) else EXTRACT
    earlier = source.earlier.text if source.earlier else ""
    if limit < LEAST:
        return WrittenSummary(text=None, tokens=0, source="extractive", error=error or NOTHING_SHORTER)
    text = without_model(job.purpose, entries, limit=limit, encode=encode, earlier=earlier, given=job.earlier)
    length = encode(text)
    if not text or length > limit:
        return WrittenSummary(text=None, tokens=0, source="extractive", error=error or NOTHING_SHORTER)
    return WrittenSummary(text=text, tokens=length, source="extractive", error=error)
