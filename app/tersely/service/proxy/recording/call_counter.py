"""Count calls: tokens, costs, epochs, repairs, unknown fields."""

from __future__ import annotations

from collections.abc import Sequence

from tersely.dialects.known_fields import unknown_fields
from tersely.domain.history.context import Repair
from tersely.domain.messages import Dialect as DialectName
from tersely.domain.messages import Message
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.call_board import note_repairs
from tersely.service.common.call_fields import add_fields
from tersely.service.common.metrics import Metrics
from tersely.service.limits.admission import charge
from tersely.service.money.charges import Charge
from tersely.service.proxy.preparing.stages import PreparedCall
from tersely.store.commit.records import CallReport
from tersely.strategies.pipeline import summarize_repairs
from tersely.strategies.presets import Tiered
from tersely.strategies.reduction.levels import measure_levels

MAX_LOOKED_AT = 64 * 1024
"""Bytes of a request's new messages that are searched for unknown fields, newest first."""
MIN_LOOKED_AT = 1024
"""The bytes that a shorter message counts as."""


class CallCounter:
    """Counts the calls of one dialect in the metrics, and in the limits of their tenants."""

    def __init__(self, dialect: DialectName, metrics: Metrics, calibrations: Calibrations) -> None:
        self._dialect = dialect
        self._metrics = metrics
        self._calibrations = calibrations

    def count_call(
        self,
        prepared: PreparedCall,
        report: CallReport,
        estimate: Charge | None,
        *,
        is_one_round: bool,
        is_answered: bool,
    ) -> None:
        """``is_one_round``: the model was asked once, so the reported tokens can be compared with the estimate.

        ``estimate`` is charged if the host has not reported all of the usage. ``is_answered``: the host did not fail.
        """
        metrics = self._metrics
        built = prepared.built
        if built is not None:
            context = built.context
            self.count_tokens(report, is_answered=is_answered)
            if built.starts_epoch:
                metrics.epochs.labels(report.strategy, context.epoch.reason).inc()
                metrics.compression.observe(report.tokens_after / max(1, report.tokens_before))
            for level in measure_levels(context) if isinstance(prepared.config.strategy, Tiered) else ():
                metrics.level_tokens.labels(level.name).observe(level.tokens)
                metrics.level_messages.labels(level.name).observe(level.messages)
            self.count_repairs(context.repairs)
        self.count_reported(report, estimate, prepared.call.tenant, prepared.request.model, is_one_round=is_one_round)

    def count_tokens(self, report: CallReport, *, is_answered: bool = True) -> None:
        metrics = self._metrics
        metrics.tally.observe(metrics.tokens_before, report.tokens_before)
        metrics.tally.observe(metrics.tokens_after, report.tokens_after)
        if is_answered:  # a client sends the request again: it would save its tokens twice
            metrics.tally.add(metrics.tokens_saved, report.tokens_saved)

    def count_repairs(self, repairs: Sequence[Repair]) -> None:
        if repairs:
            note_repairs(len(repairs))
            for kind, count in summarize_repairs(repairs).items():
                self._metrics.repairs.labels(kind).inc(count)

    def count_reported(
        self, report: CallReport, estimate: Charge | None, tenant: str, model: str, *, is_one_round: bool
    ) -> None:
        metrics = self._metrics
        if estimate is None:
            charge((report.input_tokens or 0) + (report.output_tokens or 0), report.cost_sent)
        elif estimate.tokens:  # a failed call does not show how large calls are
            charge(estimate.tokens, estimate.money)
        add_fields(
            input_tokens=report.input_tokens,
            cached_tokens=report.cached_tokens,
            output_tokens=report.output_tokens,
        )
        metrics.add_cost(sent=report.cost_sent, full=report.cost_full)
        for kind, reported in (
            ("input", report.input_tokens),
            ("cached", report.cached_tokens),
            ("output", report.output_tokens),
        ):
            if reported:
                metrics.tally.add(metrics.reported_tokens[kind], reported)
        if is_one_round and report.input_tokens and report.tokens_after:
            metrics.tally.observe(metrics.estimate_error, report.input_tokens / report.tokens_after)
            self._calibrations.observe(
                model, tenant=tenant, estimated=report.tokens_after, reported=report.input_tokens
            )

    def count_unknown_fields(self, messages: Sequence[Message]) -> None:
        """Count unknown fields in the newest messages. The cost does not depend on the length of the history."""
        room = MAX_LOOKED_AT
        for message in reversed(messages):
            room -= max(MIN_LOOKED_AT, len(message.raw))
            if room < 0:
                return
            for dialect, block in unknown_fields(self._dialect, message):
                self._metrics.unknown_fields.labels(dialect, block).inc()
