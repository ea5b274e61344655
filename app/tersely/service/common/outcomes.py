"""The outcome of a request: one definition for its log line, its span, the metric of model hosts and the alerts."""

from __future__ import annotations

import asyncio
from typing import Literal, get_args

from tersely.service.common.call_fields import fields

# `refused`, `failed`: Tersely answered 4xx, 5xx. `upstream_refused`, `upstream_limited`, `upstream_error`: the model
# host answered another 4xx, 429, or 5xx or nothing. `interrupted`: the reply broke off. `not_stored`: it ended with an
# error since it could not be stored.
Outcome = Literal[
    "answered",
    "refused",
    "failed",
    "upstream_refused",
    "upstream_limited",
    "upstream_error",
    "interrupted",
    "not_stored",
    "client_gone",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
# The status of a request whose client left before there was an answer.
CLIENT_GONE = 499


def own_outcome(status: int) -> Outcome:
    """Return the outcome of a request that Tersely itself answered."""
    if status == CLIENT_GONE:
        return "client_gone"
    if status >= 500:
        return "failed"
    return "refused" if status >= 400 else "answered"


def host_outcome(status: int) -> Outcome:
    """Return the outcome of a request to which the client gets the model host's answer."""
    if status >= 500:
        return "upstream_error"
    if status == 429:
        return "upstream_limited"
    return "upstream_refused" if status >= 400 else "answered"


def settle_outcome(status: int, error: BaseException | None = None) -> Outcome:
    """Return the outcome of the request that is over, and add it to its log line if no part of the service has.

    ``status`` is that of Tersely's answer; ``error`` ended it.
    """
    if error is None:
        outcome = own_outcome(status)
    else:
        outcome = "client_gone" if isinstance(error, asyncio.CancelledError) else "interrupted"
    line = fields.get()
    return outcome if line is None else line.setdefault("outcome", outcome)
