"""Everything that can go wrong, without status codes: those belong to the edge.

TerselyError
 +- InvalidRequest           the caller sent something that cannot be read or is out of range
 |   +- TooLarge             ... or over a size limit
 +- NotFound                 not there, or not the caller's
 +- Conflict                 an id or idempotency key that is taken by something else
 +- Unauthorized             no key, or none that is known
 +- Forbidden                from a web page, or under a name that is not this machine's
 +- ContextTooLarge          no valid context fits the budget
 +- StoreUnavailable         the database is away or too slow
 |   +- StoreRefused         ... or there, and refuses a value for good
 +- Busy                     too much of that is going on at the moment
 +- LimitExceeded            a limit of the tenant or of its key is used up
 +- UpstreamUnavailable      the model host cannot be reached, or broke off
 |   +- ShuttingDown         ... or is not waited for any more, because this process ends
"""

from __future__ import annotations


class TerselyError(Exception):
    """Something went wrong."""

    def __init__(self, detail: str = "", *, field: str | None = None) -> None:
        """``detail`` is for people; ``field`` names the offending part of the input, if there is one."""
        super().__init__(detail or type(self).__doc__)
        self.detail = detail or (type(self).__doc__ or "")
        self.field = field


class InvalidRequest(TerselyError):
    """The request cannot be read, or a value in it is out of range."""


class TooLarge(InvalidRequest):
    """The request is over the size limit."""


class NotFound(TerselyError):
    """There is no such thing."""


class Conflict(TerselyError):
    """The id or idempotency key is already taken."""


class Unauthorized(TerselyError):
    """A Tersely key is needed, and this is none."""


class Forbidden(TerselyError):
    """The caller's origin may not make this request."""


class ContextTooLarge(TerselyError):
    """No valid context fits the budget."""

    def __init__(self, *, needed: int, budget: int) -> None:
        """``needed`` and ``budget`` in tokens."""
        super().__init__(f"the smallest valid context needs {needed} tokens, the budget is {budget}")
        self.needed = needed
        self.budget = budget


class StoreUnavailable(TerselyError):
    """The database is away."""


class StoreRefused(StoreUnavailable):
    """The database refuses a value that was to be stored."""


class Busy(TerselyError):
    """Too many requests of this kind are in progress."""


class LimitExceeded(TerselyError):
    """A limit of this tenant is used up."""

    def __init__(self, detail: str, *, limit: str, retry_after: int) -> None:
        """``limit`` is its name, ``retry_after`` the seconds after which there is room again."""
        super().__init__(detail)
        self.limit = limit
        self.retry_after = retry_after


class UpstreamUnavailable(TerselyError):
    """The model host cannot be reached."""

    kind = "upstream_error"
    code = "upstream_unavailable"


class ShuttingDown(UpstreamUnavailable):
    """Tersely is shutting down: send the request again."""

    kind = "server_error"
    code = "shutting_down"


class UpstreamRefused(TerselyError):
    """The model host refused the request and would refuse it again."""
