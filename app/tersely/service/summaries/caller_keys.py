"""The provider keys that callers brought lately, by session, in memory alone.

A summary that another process left is written later than the call that asked for it: then the key of the session's
newest call pays for it, if that call went to the same model host.
"""

from __future__ import annotations

from collections import OrderedDict

Credentials = tuple[tuple[str, str], ...]
# Dialects that one default host speaks.
_ACCOUNTS = {"openai_responses": "openai_chat"}


class CallerKeys:
    """Remembers the credentials of the newest call of each of the last ``limit`` sessions."""

    def __init__(self, limit: int = 8_192) -> None:
        self._limit = limit
        self._found: OrderedDict[tuple[str, str], tuple[tuple[str, str], Credentials]] = OrderedDict()

    def remember(self, tenant: str, session_id: str, credentials: Credentials, *, host: str, dialect: str) -> None:
        """Remember the credentials of a call to a host; without any, those before them stay."""
        if not credentials:
            return
        self._found[tenant, session_id] = _account(host, dialect), credentials
        self._found.move_to_end((tenant, session_id))
        if len(self._found) > self._limit:
            self._found.popitem(last=False)

    def get(self, tenant: str, session_id: str, *, host: str, dialect: str) -> Credentials:
        """Return the credentials of the session's newest call; empty if none are known, or if they are for another
        host.
        """
        account, credentials = self._found.get((tenant, session_id), (("", ""), ()))
        return credentials if account == _account(host, dialect) else ()


def _account(host: str, dialect: str) -> tuple[str, str]:
    """Return what a key is for: a named host, or the default host of a dialect."""
    return host, "" if host else _ACCOUNTS.get(dialect, dialect)
