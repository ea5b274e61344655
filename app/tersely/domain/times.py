"""The range of message times that can be stored and written in every time zone."""

from __future__ import annotations

from datetime import UTC, datetime

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(9999, 1, 1, tzinfo=UTC)


def to_stored_time(at: datetime) -> datetime:
    """Return ``at`` in UTC; a time without a zone is in UTC.

    Raises `ValueError` or `OverflowError` for times before `EARLIEST` and from `LATEST` on.
    """
    at = at.astimezone(UTC) if at.tzinfo else at.replace(tzinfo=UTC)
    if not EARLIEST <= at < LATEST:
        raise ValueError(f"{at.isoformat()} is out of range")
    return at
