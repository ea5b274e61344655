"""The use of a model call that counts towards the limits of its tenant.

It is what the host reports. What a host does not report is estimated: else a client could use up nothing by not asking
for the usage, or by leaving before it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tersely.dialects.dialect import Dialect, Reply, Usage
from tersely.dialects.metering import MeteredReply, MeteredRequest
from tersely.domain.errors import InvalidRequest
from tersely.domain.tokens import estimate
from tersely.service.common.tokens import estimate_message
from tersely.service.money.prices import ModelPrice

MOST_CREDIBLE = 2**31
"""Tokens. The columns hold fewer."""
MOST_UNREAD = 128_000
"""Tokens that a reply counts that is not parsed. Models write no longer ones: a longer one holds images or sound."""


class Charge(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a call, sent and answered, and their cost in USD (None: not known)."""

    tokens: int
    money: float | None


def is_reported(usage: Usage, *, is_whole: bool) -> bool:
    """Return whether a host has reported the whole use of a call. ``is_whole``: the reply is. A request of 0 tokens is
    none that was counted.

    Anthropic's streams begin with the tokens of the request and with one token of the reply.
    """
    return is_whole and bool(usage.input) and usage.output is not None


def charge_of(usage: Usage, price: ModelPrice | None, *, sent: int = 0, answered: int = 0) -> Charge:
    """Return the charge of a call with its reported usage.

    ``sent`` and ``answered`` are estimates, in tokens: of the requests whose usage is not reported, and of the least
    that the model has written.
    """
    if not usage.input:
        usage = Usage(input=0, output=usage.output, written=0)
    tokens, output = sent + (usage.input or 0), max(answered, usage.output or 0)
    money = None
    if price is not None:
        money = price.cost(input_tokens=tokens, cached=usage.cached or 0, output=output, written=usage.written)
    return Charge(tokens + output, money)


def charge_of_metered(
    reply: MeteredReply,
    requests: Sequence[MeteredRequest],
    price_of: Callable[[str], ModelPrice | None],
    *,
    is_whole: bool,
) -> Charge:
    """Return the charge of a call that is no conversation. ``price_of``: the price of a model that a request names."""
    if reply.is_error:
        return Charge(0, None)
    usage, written = credible_usage(reply.usage), min(MOST_UNREAD, reply.written)
    if usage.input:
        is_reported = is_whole and usage.output is not None
        return charge_of(usage, price_of(requests[0].model), answered=0 if is_reported else written)
    tokens, money = 0, None
    for number, request in enumerate(requests):
        each = charge_of(usage, price_of(request.model), sent=request.tokens, answered=0 if number else written)
        tokens += each.tokens
        money = each.money if money is None else money + (each.money or 0.0)
    return Charge(tokens, money)


def estimate_request(dialect: Dialect, body: bytes, *, is_compressed: bool) -> int:
    """Return about how many tokens a request has. O(size of the body).

    A token takes four bytes, or one of a body that ``is_compressed``: text is compressed to about a quarter.
    """
    if is_compressed:
        return len(body)
    try:
        request = dialect.read_request(body)
    except InvalidRequest:
        return estimate(len(body))
    if request.unreadable is not None or not request.messages:
        return estimate(len(body))
    # Images and files count as what they are: they take many more bytes than tokens.
    return sum([estimate_message(message) for message in request.messages]) + estimate(len(request.tools))


def estimate_reply(dialect: Dialect, reply: Reply, unparsed: int = 0) -> int:
    """Return about how many tokens the model has written. ``unparsed`` bytes were not parsed. O(size of the reply)."""
    written = [choice.model_message for choice in reply.choices if choice.model_message]
    rest = estimate(unparsed + sum(map(len, reply.unread)))
    return sum([estimate_message(dialect.read_reply(raw)) for raw in written]) + min(MOST_UNREAD, rest)


def is_error(reply: Reply) -> bool:
    """Return whether a host reports an error in place of a reply, under a status that says otherwise."""
    return bool(reply.error) and not reply.choices


def credible_usage(usage: Usage) -> Usage:
    """Return reported counts without impossible ones."""
    for count in (usage.input, usage.cached, usage.output, usage.written):
        if count is not None and not 0 <= count < MOST_CREDIBLE:
            break
    else:
        return usage  # as nearly always; one call of a function instead of four
    return Usage(
        input=credible_count(usage.input),
        cached=credible_count(usage.cached),
        output=credible_count(usage.output),
        written=credible_count(usage.written),
    )


def credible_count(tokens_reported: int | None) -> int | None:
    """Return a reported token count; None if it is impossible."""
    return tokens_reported if tokens_reported is not None and 0 <= tokens_reported < MOST_CREDIBLE else None
