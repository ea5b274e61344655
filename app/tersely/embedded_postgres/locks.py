"""File locks that the kernel releases when their last holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tersely.embedded_postgres.errors import EmbeddedPostgresError


class FileLock:
    """One open lock file. The lock belongs to the open file, and so to every process that inherits its descriptor."""

    def __init__(self, path: Path) -> None:
        """Open (or create) the file at ``path``, without locking it. Raises EmbeddedPostgresError if not allowed."""
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EmbeddedPostgresError(f"cannot open {path}: {error.strerror}") from error

    def try_exclusive(self) -> bool:
        """Take the lock exclusively, if nobody else holds it. On failure a lock that was held is lost."""
        return self._try(fcntl.LOCK_EX)

    def try_shared(self) -> bool:
        """Take the lock together with others, unless somebody holds it exclusively."""
        return self._try(fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock (a process that inherited the descriptor keeps it)."""
        os.close(self.fd)

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def exclusive(path: Path, *, deadline: float, abandoned: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock at ``path`` alone; wait for it until ``deadline`` (``time.monotonic()``) or until abandoned."""
    lock = FileLock(path)
    try:
        while not lock.try_exclusive():
            if abandoned():
                raise EmbeddedPostgresError("the start of Postgres was cancelled")
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"another process has held {path} for too long while starting or stopping Postgres: try again later"
                )
            time.sleep(0.02)
        yield
    finally:
        lock.close()


def is_held(path: Path) -> bool:
    """Return whether any process holds the lock at ``path``."""
    lock = FileLock(path)
    try:
        return not lock.try_exclusive()
    finally:
        lock.close()
