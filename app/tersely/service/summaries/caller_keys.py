"""The provider keys that callers brought lately, by session, in memory alone.

A summary that another process left is written later than the call that asked for it: then the key of the session's
newest call pays for it.
"""

from __future__ import annotations

from collections import OrderedDict

Credentials = tuple[tuple[str, str], ...]


class CallerKeys:
    """Remembers the credentials of the newest call of each of the last ``limit`` sessions."""

    def __init__(self, limit: int = 8_192) -> None:
        self._limit = limit
        self._found: OrderedDict[tuple[str, str], Credentials] = OrderedDict()

    def remember(self, tenant: str, session_id: str, credentials: Credentials) -> None:
        """Remember the credentials of a call; without any, those before them stay."""
        if not credentials:
            return
        self._found[tenant, session_id] = credentials
        self._found.move_to_end((tenant, session_id))
        if len(self._found) > self._limit:
            self._found.popitem(last=False)

    def get(self, tenant: str, session_id: str) -> Credentials:
        """Return the credentials of the session's newest call; empty if none are known."""
        return self._found.get((tenant, session_id), ())
