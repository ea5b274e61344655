"""The cursor of a list that is ordered by time and id."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime

from tersely.domain.errors import InvalidRequest


def write_cursor(at: datetime, item_id: str) -> str:
    """Return the cursor behind an item."""
    return urlsafe_b64encode(f"{at.isoformat()} {item_id}".encode()).decode().rstrip("=")


def read_cursor(cursor: str) -> tuple[datetime, str]:
    """Return the inverse of `write_cursor`. Raises `InvalidRequest`."""
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        at, _, item_id = text.partition(" ")
        moment = datetime.fromisoformat(at)
        if moment.tzinfo is None or "\x00" in item_id:
            raise ValueError
    except ValueError:
        raise InvalidRequest("after must be the `next` of an earlier page", field="after") from None
    return moment, item_id
