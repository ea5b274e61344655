"""The report of a call: its figures, costs and outcome, as they are stored."""

from __future__ import annotations

from tersely.dialects.clients.names import client_name
from tersely.dialects.dialect import Dialect, Reply, Usage
from tersely.domain.text.encodable import encodable
from tersely.domain.tokens import estimate
from tersely.service.money.charges import (
    Charge,
    charge_of,
    credible_count,
    credible_usage,
    estimate_reply,
    is_error,
    is_reported,
)
from tersely.service.money.prices import Prices, scale_writes
from tersely.service.proxy.call.call import Call
from tersely.service.proxy.sending.sent_call import SentCall
from tersely.store.commit.records import CallReport

# The strategy that a forwarded call amounts to.
FULL = "full"


class CallReports:
    """Makes the report of a call from what its provider reported and what Tersely counted."""

    def __init__(self, dialect: Dialect, prices: Prices) -> None:
        self._dialect = dialect
        self._prices = prices

    def report(
        self,
        sent_call: SentCall,
        reply: Reply,
        status: int | None,
        *,
        sent: bytes | None,
        client: str | None,
        epoch: int,
        cut: int,
        tools: bytes | None,
        tokens_before: int,
        tokens_after: int,
        tokens_new: int,
    ) -> CallReport:
        """Return the figures of a call. ``tokens_new``: those of the messages that the call adds to its session."""
        usage = credible_usage(self._dialect.read_usage(reply.usage))
        last = credible_usage(self._dialect.read_usage(reply.last_usage)) if reply.last_usage else usage
        model, labels = sent_call.request.model, sent_call.labels
        cost_sent, cost_full = self._costs(model, reply.model, usage, tokens_before, tokens_after, tokens_new)
        return CallReport(
            sent=sent,
            client=client,
            request_id=sent_call.call.request_id or None,
            overhead_ms=labels.overhead_ms,
            cost_sent=cost_sent,
            cost_full=cost_full,
            model=storable_name(model),
            strategy=labels.strategy,
            epoch=epoch,
            cut=cut,
            tools=tools,
            tokens_before=tokens_before,
            tokens_after=tokens_after,
            input_tokens=usage.input,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            written_tokens=usage.written,
            weight=_weigh(last, tokens_after),
            status=status,
            host=sent_call.call.host,
        )

    def report_unchanged(
        self, call: Call, requested: str, reply: Reply, status: int, *, tools: bytes | None, tokens_sent: int
    ) -> CallReport:
        """Return the figures of a call for the model ``requested`` that was sent as its client wrote it. ``tools``: the
        digest of its tools.
        """
        usage = credible_usage(self._dialect.read_usage(reply.usage))
        cost_sent, cost_full = self._costs(requested, reply.model, usage, tokens_sent, tokens_sent, tokens_sent)
        return CallReport(
            client=client_name(call.header_map) or None,
            request_id=call.request_id or None,
            cost_sent=cost_sent,
            cost_full=cost_full,
            model=storable_name(requested),
            strategy=FULL,
            epoch=0,
            cut=1,
            tools=tools,
            tokens_before=tokens_sent,
            tokens_after=tokens_sent,
            input_tokens=usage.input,
            cached_tokens=usage.cached,
            output_tokens=usage.output,
            written_tokens=usage.written,
            weight=_weigh(usage, tokens_sent),
            status=status,
            host=call.host,
        )

    def estimate_charge(
        self, sent_call: SentCall, reply: Reply, report: CallReport, *, is_whole: bool, is_answered: bool
    ) -> Charge | None:
        """Return the charge of a call whose usage the host has not reported, or not to its end; None: it has.

        ``is_answered``: the host has begun its last reply, or was at work when the client left. A request that it
        refused costs nothing. O(size of the reply).
        """
        usage = Usage(
            input=report.input_tokens,
            cached=report.cached_tokens,
            output=report.output_tokens,
            written=report.written_tokens,
        )
        if is_reported(usage, is_whole=is_whole and not (reply.lacks_last_usage or reply.unreported_rounds)):
            return None
        price = self._prices.of_call(sent_call.request.model, reply.model, self._dialect.name)
        is_answered = is_answered and not is_error(reply)
        unreported = reply.unreported_rounds + (is_answered and reply.lacks_last_usage)
        if not usage.input:
            unreported = reply.rounds - (not is_answered)
        # Without a context, the client's own bytes were sent.
        context = report.tokens_after or estimate(len(sent_call.body))
        return charge_of(
            usage, price, sent=unreported * context, answered=estimate_reply(self._dialect, reply) if is_answered else 0
        )

    def _costs(
        self, requested: str, answered: str, usage: Usage, tokens_before: int, tokens_after: int, new: int
    ) -> tuple[float | None, float | None]:
        """Return the cost of the call in USD, and that of the full history with a perfect cache; None: not known.

        A perfect cache holds every message that earlier calls of the session sent, and the provider's own hits: only
        the rest of this request is new to it, ``new`` tokens. Of these the same share is written as of this call's:
        where nothing is written, the full history would have paid no more for writing either.
        """
        price = self._prices.of_call(requested, answered, self._dialect.name)
        if price is None or not usage.input:
            return None, None
        output, read = usage.output or 0, usage.cached or 0
        written: float | None = usage.written
        sent = price.cost(input_tokens=usage.input, cached=read, output=output, written=written)
        if not tokens_after:
            return sent, sent
        ratio = usage.input / tokens_after
        known = max(0, tokens_before - new)
        whole = max(usage.input, int(tokens_before * ratio))
        cached = max(read, int(known * ratio))
        if written is not None:
            written = scale_writes(written, fresh=usage.input - read, to=whole - cached)
        full = price.cost(input_tokens=whole, cached=cached, output=output, written=written)
        return sent, full


def _weigh(last: Usage, sent: int) -> int | None:
    """Return the tokens of prompt and completion in the ``last`` round, as the provider reported them.

    ``sent`` is Tersely's count of the context, for providers that report none.
    """
    return credible_count((sent if last.input is None else last.input) + (last.output or 0))


def storable_name(text: str) -> str:
    """Return a name from outside as a column can hold it."""
    return encodable(text[:200]).replace("\0", "?")
