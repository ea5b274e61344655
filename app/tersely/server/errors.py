"""The error that ends a command."""

from __future__ import annotations


class CommandError(Exception):
    """A command's failure, in words for its user. ``status``: the service's, where the service refused."""

    def __init__(self, detail: str, *, status: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
