"""All errors, without status codes: these belong to the API.

TerselyError +- InvalidRequest the request cannot be parsed, or a value is out of range | +- TooLarge ... or exceeds a
size limit +- NotFound it does not exist, or belongs to another tenant +- Conflict an id or idempotency key is in use
for something else +- Unauthorized the key is missing or unknown +- Forbidden the request comes from a web page, or uses
a foreign host name +- ContextTooLarge no valid context fits into the budget +- StoreUnavailable the database is
unavailable or too slow | +- StoreRefused ... or refuses a value permanently +- Busy too many operations of this kind
are running +- LimitExceeded a limit of the tenant or of its key is used up +- UpstreamUnavailable the model host cannot
be reached, or the connection broke | +- ShuttingDown ... or the call was ended because this process stops
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
