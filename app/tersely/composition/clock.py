"""The clock and the ids of the service: the only place that reads the time."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime


def clock() -> datetime:
    """Return the time."""
    return datetime.now(UTC)


def new_id(kind: str = "s") -> str:
    """Return a new id: sortable by time, unguessable. Those of sessions begin with an ``s``."""
    return f"{kind}{int(time.time() * 1000):011x}{os.urandom(8).hex()}"
