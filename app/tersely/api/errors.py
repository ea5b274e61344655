"""Map errors to statuses and bodies: problem documents for REST, the dialect's own format on proxy routes."""

from __future__ import annotations

import json
from typing import Any

from tersely.dialects.dialect import Dialect, ErrorDescription
from tersely.dialects.headers import Headers
from tersely.domain.errors import (
    Busy,
    Conflict,
    ContextTooLarge,
    Forbidden,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    ShuttingDown,
    StoreUnavailable,
    TerselyError,
    TooLarge,
    Unauthorized,
    UpstreamUnavailable,
)

PROBLEM = "application/problem+json"
RETRY_AFTER = "2"
# Providers' SDKs retry a refused call by themselves. For longer waits than this, in seconds, they are told not to.
WORTH_WAITING = 60

# On proxy routes a request that cannot be read is 400, as providers answer; under REST a bad value is 422.
STATUSES: dict[type[TerselyError], tuple[int, str]] = {
    TooLarge: (413, "Too large"),
    InvalidRequest: (422, "Invalid request"),
    NotFound: (404, "Not found"),
    Conflict: (409, "Conflict"),
    Unauthorized: (401, "Unauthorized"),
    Forbidden: (403, "Forbidden"),
    ContextTooLarge: (422, "Context too large"),
    StoreUnavailable: (503, "Database away"),
    Busy: (503, "Busy"),
    LimitExceeded: (429, "Limit exceeded"),
    ShuttingDown: (503, "Shutting down"),
    UpstreamUnavailable: (502, "Upstream unavailable"),
    TerselyError: (500, "Internal error"),
}
_PROXY_TYPES = {
    401: ("invalid_request_error", "invalid_api_key"),
    403: ("invalid_request_error", "forbidden"),
    404: ("invalid_request_error", "not_found"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    502: ("upstream_error", "upstream_unavailable"),
    503: ("server_error", "database_unavailable"),
}


def status_of(error: TerselyError) -> tuple[int, str]:
    """Status and title: those of the nearest listed class."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


def extra_headers(status: int) -> Headers:
    """Headers that go with a status."""
    if status == 503:
        return [("retry-after", RETRY_AFTER)]
    if status == 401:
        return [("www-authenticate", "Bearer")]
    return []


def _headers_of(error: TerselyError, status: int) -> Headers:
    """Return the headers that go with an error."""
    if not isinstance(error, LimitExceeded):
        return extra_headers(status)
    headers = [("retry-after", str(error.retry_after))]
    if error.retry_after > WORTH_WAITING:
        headers.append(("x-should-retry", "false"))
    return headers


def problem(error: TerselyError) -> tuple[int, Headers, bytes]:
    """Return a problem document (RFC 9457): status, headers, body."""
    status, title = status_of(error)
    document: dict[str, Any] = {"type": "about:blank", "title": title, "status": status, "detail": error.detail}
    if error.field is not None:
        document["field"] = error.field
    if isinstance(error, ContextTooLarge):
        document |= {"needed": error.needed, "budget": error.budget}
    if isinstance(error, LimitExceeded):
        document |= {"limit": error.limit, "retry_after": error.retry_after}
    return status, [("content-type", PROBLEM), *_headers_of(error, status)], json.dumps(document).encode()


def in_dialect(error: TerselyError, dialect: Dialect) -> tuple[int, Headers, bytes]:
    """Return an error in a dialect's own shape: status, headers, body."""
    status, _ = status_of(error)
    if status == 422:
        status = 400
    kind, code = _PROXY_TYPES.get(status, ("invalid_request_error" if status < 500 else "server_error", None))
    if isinstance(error, Busy):
        code = "overloaded"
    if isinstance(error, ShuttingDown):
        kind, code = error.kind, error.code
    retry_after = error.retry_after if isinstance(error, LimitExceeded) else None
    body = dialect.error_body(
        ErrorDescription(message=error.detail, type=kind, code=code, param=error.field, retry_after=retry_after)
    )
    return status, [("content-type", "application/json"), *_headers_of(error, status)], body
