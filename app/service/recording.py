"""What a proxied call leaves behind: the request's messages, the reply, the report, and what Prometheus is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from app.dialects.dialect import Dialect
from app.dialects.dialect import Reply as SaidReply
from app.domain.errors import Conflict, NotFound, StoreUnavailable
from app.domain.history import Entry
from app.domain.messages import Message
from app.service import tokens
from app.service.arrival import digest, extend
from app.service.calibrations import Calibrations
from app.service.metrics import Metrics
from app.service.preparing import Prepared
from app.service.told import NOTHING_BESIDE, Beside, Hidden
from app.store.artifacts import spilled
from app.store.sessions import write_epoch
from app.store.writer import Writer
from app.store.writes import CallReport, NewEpoch, NewReply, ReplyWrite
from app.strategies.activity_log import derive_terse
from app.strategies.levels import measure_levels
from app.strategies.pipeline import summarize_repairs
from app.strategies.presets import Slim, Tiered

_log = logging.getLogger(__name__)

MAX_REPLY_ID = 200


class Recorder:
    """Stores and counts the calls of one dialect."""

    def __init__(
        self,
        *,
        dialect: Dialect,
        writer: Writer,
        calibrations: Calibrations,
        metrics: Metrics,
        clock: Callable[[], datetime],
        fail_open: bool,
    ) -> None:
        self._dialect = dialect
        self._writer = writer
        self._calibrations = calibrations
        self._metrics = metrics
        self._clock = clock
        self._fail_open = fail_open

    async def store_request(self, prepared: Prepared) -> None:
        """Count and queue the request's new messages, while the upstream works."""
        write = prepared.write
        placed = prepared.found.decision.placed
        new = [message for message, p in zip(prepared.arrival.messages, placed, strict=True) if p.is_new]
        counts = iter(await tokens.count_messages(new, prepared.request.model))
        write.tokens = [next(counts) if p.is_new else 0 for p in placed]
        prepared.written = self._writer.submit(write)

    async def commit(
        self, prepared: Prepared, said: SaidReply, status: int, *, is_whole: bool, beside: Beside = NOTHING_BESIDE
    ) -> None:
        """Return when request and reply are on disk; with failing open, when that has failed."""
        try:
            await asyncio.shield(self.submit_reply(prepared, said, status, is_whole=is_whole, beside=beside))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            if not self._fail_open:
                raise StoreUnavailable("the reply could not be stored") from error
            self._metrics.fail_open.labels("write").inc()
            _log.warning("a reply was not stored: %s", error)

    async def commit_failure(self, prepared: Prepared, status: int | None) -> None:
        """Return when the failed call is on disk: its client may try again at once, and be first at another worker."""
        if prepared.written is None:
            return
        try:
            await asyncio.shield(self.submit_reply(prepared, SaidReply(), status, is_whole=False))
        except (StoreUnavailable, Conflict, NotFound, ValueError) as error:
            _log.warning("a failed call was not stored: %s", error)

    def record_failure(self, prepared: Prepared, status: int | None) -> None:
        """Record a call that came to nothing, without waiting for it."""
        if prepared.written is not None:
            self.submit_reply(prepared, SaidReply(), status, is_whole=False)

    def submit_reply(
        self,
        prepared: Prepared,
        said: SaidReply,
        status: int | None,
        *,
        is_whole: bool,
        beside: Beside = NOTHING_BESIDE,
    ) -> asyncio.Future[None]:
        """Queue what was said (``is_whole``: to its end) with the report of the call, and count both.

        ``beside`` is stored with a reply, or not at all: without one, the request may be sent again.
        """
        usage = self._dialect.read_usage(said.usage)
        now = self._clock()
        report = prepared.built.context.report if prepared.built else None
        call_report = CallReport(
            model=_short(prepared.request.model),
            strategy=prepared.labels.strategy,
            epoch=report.epoch if report else 0,
            cut=report.cut if report else 1,
            tools=tokens.content_digest(prepared.request.tools) if prepared.request.tools else None,
            tokens_before=report.tokens_before if report else 0,
            tokens_after=report.tokens_after if report else 0,
            input_tokens=_credible(usage.input),
            cached_tokens=_credible(usage.cached),
            output_tokens=_credible(usage.output),
            status=status,
        )
        replies = self._replies(prepared, said, is_whole=is_whole, now=now)
        if replies and beside != NOTHING_BESIDE:
            before, after = (self._hidden(prepared, hidden) for hidden in (beside.before, beside.after))
            replies = [*before, *map(self._as_input, replies), *after]
        self._count_call(prepared, call_report, is_one=not beside.before)
        return self._writer.submit(
            ReplyWrite(
                request=prepared.write,
                replies=replies,
                report=call_report,
                started=prepared.started,
                now=now,
                # A reply in which nothing was said is not stored, but the model was sent this context all the same.
                epoch=self._new_epoch(prepared) if said.choices else None,
            )
        )

    def _replies(self, prepared: Prepared, said: SaidReply, *, is_whole: bool, now: datetime) -> list[NewReply]:
        found: list[NewReply] = []
        head_chain = prepared.found.head_chain or prepared.arrival.head_chain
        reply_id = self._id_of(said)
        for choice in said.choices:
            client = self._dialect.read_reply(choice.client_message)
            model = self._dialect.read_reply(choice.model_message)
            if not model.parts:
                continue
            identity_of_reply, _ = digest(client)
            finish = _short(choice.finish_reason) or (None if is_whole else "interrupted")
            terse = [(text, "model") for text in choice.terse]
            if not terse and is_whole and not found and not model.calls:
                terse = self._derive(prepared, model, now)
            found.append(
                NewReply(
                    raw=choice.client_message,
                    model_raw=choice.model_message if choice.model_message != choice.client_message else None,
                    digest=identity_of_reply,
                    chain=extend(head_chain, identity_of_reply),
                    tokens=tokens.count_message(model, prepared.request.model),
                    finish=finish,
                    terse=tuple(terse),
                    # A block that broke off would take away what the one before it still says.
                    state=choice.state if is_whole else None,
                    is_alternative=bool(found),
                    id=reply_id,
                    keeper=prepared.keeper if is_whole else "tersely",
                    items=self._items_of(choice.client_message) if prepared.request.is_kept else (),
                )
            )
        return found

    def _id_of(self, said: SaidReply) -> str:
        """The id by which the client may go on from a reply."""
        return said.id if self._dialect.lacks_history is not None and _is_usable(said.id) else ""

    def _items_of(self, message: bytes) -> tuple[str, ...]:
        """The ids by which the client may refer to items of a reply."""
        references = self._dialect.references
        return tuple(filter(_is_usable, references.items_by_id(message))) if references is not None else ()

    def _as_input(self, reply: NewReply) -> NewReply:
        """A reply said in rounds: it goes back to the model as that said it last, whatever the client makes of it."""
        return replace(reply, model_raw=self._dialect.as_input(reply.model_raw)) if reply.model_raw else reply

    def _hidden(self, prepared: Prepared, messages: Sequence[Hidden]) -> list[NewReply]:
        """What the client never sees. All of it is the model's view: nothing else tells it from what a client sent."""
        read = [self._dialect.read_message(hidden.raw) for hidden in messages]
        return [
            NewReply(
                raw=hidden.raw,
                model_raw=hidden.raw,
                digest=digest(message)[0],
                chain=None,
                tokens=tokens.count_message(message, prepared.request.model),
                finish=_short(hidden.choice.finish_reason) if hidden.choice else None,
                terse=tuple((text, "model") for text in hidden.choice.terse) if hidden.choice else (),
                state=hidden.choice.state if hidden.choice else None,
                role=message.role,
                spilled=tuple(spilled(read, index)),
            )
            for index, (hidden, message) in enumerate(zip(messages, read, strict=True))
        ]

    def _derive(self, prepared: Prepared, reply: Message, now: datetime) -> list[tuple[str, str]]:
        """A log entry made without a model, for a turn whose reply carried none."""
        strategy = prepared.recipe.strategy
        if not (isinstance(strategy, Slim) and strategy.derive_terse):
            return []
        answered = prepared.found.decision.answered
        turn = answered.turn if answered else 1
        entries = [entry for entry in prepared.history.snapshot.entries if entry.turn == turn]
        last = Entry(seq=prepared.found.decision.last_seq + 1, turn=turn, message=reply, tokens=0, created_at=now)
        return [(derive_terse([*entries, last]).text, "derived")]

    def _new_epoch(self, prepared: Prepared) -> NewEpoch | None:
        built = prepared.built
        if built is None or not built.starts_epoch:
            return None
        context = built.context
        return NewEpoch(
            epoch=context.epoch,
            plan=write_epoch(context.epoch),
            tokens_before=context.report.tokens_before,
            tokens_after=context.report.tokens_after,
            derived=built.derived,
        )

    def _count_call(self, prepared: Prepared, report: CallReport, *, is_one: bool) -> None:
        """``is_one``: the upstream was asked once, so that what it reports can be held against what was estimated."""
        metrics = self._metrics
        built = prepared.built
        if built is not None:
            context = built.context
            metrics.tokens_before.observe(report.tokens_before)
            metrics.tokens_after.observe(report.tokens_after)
            metrics.tokens_saved.inc(max(0, report.tokens_before - report.tokens_after))
            if built.starts_epoch:
                metrics.epochs.labels(report.strategy, context.epoch.reason).inc()
                metrics.compression.observe(report.tokens_after / max(1, report.tokens_before))
            for level in measure_levels(context) if isinstance(prepared.recipe.strategy, Tiered) else ():
                metrics.level_tokens.labels(level.name).observe(level.tokens)
                metrics.level_messages.labels(level.name).observe(level.messages)
            for kind, count in summarize_repairs(context.repairs).items():
                metrics.repairs.labels(kind).inc(count)
        for kind, reported in (
            ("input", report.input_tokens),
            ("cached", report.cached_tokens),
            ("output", report.output_tokens),
        ):
            if reported:
                metrics.reported_tokens[kind].inc(reported)
        if is_one and report.input_tokens and report.tokens_after:
            metrics.estimate_error.observe(report.input_tokens / report.tokens_after)
            self._calibrations.observe(
                prepared.request.model, estimated=report.tokens_after, reported=report.input_tokens
            )


def _short(text: str) -> str:
    """What a column takes of a text that anybody may have made up."""
    return text[:200].encode(errors="replace").decode().replace("\0", "?")


def _credible(tokens_reported: int | None) -> int | None:
    """A count of tokens, unless it can be none."""
    return tokens_reported if tokens_reported is not None and 0 <= tokens_reported < 2**31 else None


def _is_usable(name: str) -> bool:
    return 0 < len(name) <= MAX_REPLY_ID and name.isprintable()
