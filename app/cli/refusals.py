"""What ends a command before its work is done."""

from __future__ import annotations


class Refused(Exception):
    """What cannot be done, in words for whoever asked. ``status``: the service's, where it was the one to refuse."""

    def __init__(self, detail: str, *, status: int | None = None) -> None:
        super().__init__(detail)
        self.status = status
