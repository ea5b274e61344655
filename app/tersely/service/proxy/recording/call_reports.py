"""The report of a call: its figures, costs and outcome, as they are stored."""

from __future__ import annotations

from tersely.dialects.dialect import Dialect, Reply, Usage
from tersely.domain.text.encodable import encodable
from tersely.service.money.prices import Prices
from tersely.service.proxy.sending.sent_call import SentCall
from tersely.store.commit.records import CallReport


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
        usage = _credible(self._dialect.read_usage(reply.usage))
        last = _credible(self._dialect.read_usage(reply.last_usage)) if reply.last_usage else usage
        model, labels = sent_call.request.model, sent_call.labels
        cost_sent, cost_full = self._costs(model, usage, tokens_before, tokens_after, tokens_new)
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
            weight=_weigh(last, tokens_after),
            status=status,
            host=sent_call.call.host,
        )

    def _costs(
        self, model: str, usage: Usage, tokens_before: int, tokens_after: int, new: int
    ) -> tuple[float | None, float | None]:
        """Return the cost of the call in USD, and that of the full history with a perfect cache; None: not known.

        A perfect cache holds every message that earlier calls of the session sent, and the provider's own hits: only
        the rest of this request is written to it, ``new`` tokens.
        """
        price = self._prices.of(model, self._dialect.name)
        if price is None or not usage.input:
            return None, None
        output, read = usage.output or 0, usage.cached or 0
        sent = price.cost(input_tokens=usage.input, cached=read, output=output)
        if not tokens_after:
            return sent, sent
        ratio = usage.input / tokens_after
        known = max(0, tokens_before - new)
        whole = max(usage.input, int(tokens_before * ratio))
        full = price.cost(input_tokens=whole, cached=max(read, int(known * ratio)), output=output)
        return sent, full


def _weigh(last: Usage, sent: int) -> int | None:
    """Return the tokens of prompt and completion in the ``last`` round, as the provider reported them.

    ``sent`` is Tersely's count of the context, for providers that report none.
    """
    return credible_count((sent if last.input is None else last.input) + (last.output or 0))


def _credible(usage: Usage) -> Usage:
    """Return reported counts without impossible ones."""
    return Usage(
        input=credible_count(usage.input), cached=credible_count(usage.cached), output=credible_count(usage.output)
    )


def storable_name(text: str) -> str:
    """Return a name from outside as a column can hold it."""
    return encodable(text[:200]).replace("\0", "?")


def credible_count(tokens_reported: int | None) -> int | None:
    """Return a reported token count; None if it is impossible."""
    return tokens_reported if tokens_reported is not None and 0 <= tokens_reported < 2**31 else None
