"""The spool: files of records that wait for the database, one per process, in one directory per database.

A file is append-only and flushed to disk before `append` returns. Its process holds a lock on it that the kernel lets
go of when the process dies, however it dies; then another process may adopt the file. A record is its length, its
digest and its payload: one that was not written to its end was not acknowledged, and is dropped.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

HEADER = b"tersely spool 1\n"
SUFFIX = ".spool"
# Records that the database refused, kept for the operator.
REFUSED = ".refused"
_NEW = ".new"
_LENGTH = struct.Struct(">Q")
_DIGEST_BYTES = 16
_OVERHEAD = _LENGTH.size + _DIGEST_BYTES


def spool_directory(data_dir: Path, database_url: str) -> Path:
    """Return the spool directory of a database. Exchanges for one database must not go to another."""
    parts = urlsplit(database_url)
    query = parse_qs(parts.query)
    host = (query.get("host") or [parts.hostname or ""])[0]
    port = (query.get("port") or [str(parts.port or 5432)])[0]
    place = f"{host}:{port}/{parts.path.lstrip('/')}"
    return data_dir / "spool" / blake2b(place.encode(), digest_size=8).hexdigest()


class SpoolFull(OSError):
    """The spool has reached its limit."""


class SpoolFile:
    """One locked spool file. ``is_damaged``: a record that was once complete cannot be read."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self.is_damaged = False

    @classmethod
    def create(cls, directory: Path, name: str) -> SpoolFile:
        """Return a new, empty file of this process, readable by its owner alone. Raises `OSError`."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Lock it before it gets the name under which other processes may adopt it.
        new = directory / f"{name}{_NEW}"
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(fd, HEADER, 0)
            os.fsync(fd)
            path = directory / f"{name}{SUFFIX}"
            new.rename(path)
            _sync_directory(directory)
        except BaseException:
            new.unlink(missing_ok=True)
            os.close(fd)
            raise
        return cls(path, fd)

    @classmethod
    def adopt(cls, path: Path) -> SpoolFile | None:
        """Return the file of a process that has ended; None while its process lives, or when it is gone."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino != path.stat().st_ino or os.pread(fd, len(HEADER), 0) != HEADER:
                raise FileNotFoundError  # removed by another process, or no spool of this version
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Add records and flush them to disk. Return the offset of each. Raises `OSError`; then none was added."""
        places, block, end = [], bytearray(), self._size
        for payload in payloads:
            places.append(end + len(block))
            block += _LENGTH.pack(len(payload)) + _digest(payload) + payload
        try:
            _write_all(self._fd, bytes(block), end)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._size = end + len(block)
        return places

    def read(self, place: int) -> bytes:
        """Return the payload of the record that begins there."""
        (length,) = _LENGTH.unpack(_read_all(self._fd, _LENGTH.size, place))
        return _read_all(self._fd, length, place + _OVERHEAD)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yield each complete record's offset and payload. Cut off a torn record at the end, skip a damaged one."""
        place = len(HEADER)
        while place + _OVERHEAD <= self._size:
            head = _read_all(self._fd, _OVERHEAD, place)
            (length,) = _LENGTH.unpack(head[: _LENGTH.size])
            if place + _OVERHEAD + length > self._size:
                break
            payload = _read_all(self._fd, length, place + _OVERHEAD)
            if _digest(payload) == head[_LENGTH.size :]:
                yield place, payload
            elif place + _OVERHEAD + length == self._size:
                break
            else:
                self.is_damaged = True
            place += _OVERHEAD + length
        if place < self._size:
            os.ftruncate(self._fd, place)
            self._size = place

    def clear(self) -> None:
        """Delete all records: they are in the database."""
        os.ftruncate(self._fd, len(HEADER))
        os.fsync(self._fd)
        self._size = len(HEADER)

    def remove(self) -> None:
        """Delete the file: its records are in the database."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def set_aside(self) -> None:
        """Leave the file to the operator: not all of it could be read."""
        self.path.rename(self.path.with_suffix(REFUSED))
        os.close(self._fd)

    def close(self) -> None:
        """Leave the file to whoever adopts it."""
        os.close(self._fd)


def orphans(directory: Path) -> list[Path]:
    """Return the files in ``directory`` in the order of their names, which begin with the time they were made."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == SUFFIX)
    except FileNotFoundError:
        return []


def total_size(directory: Path) -> int:
    """Bytes of all files in ``directory``."""
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return 0


def has_records(directory: Path) -> bool:
    """Return whether any process's file in ``directory`` holds records that wait for the database."""
    return any(path.stat().st_size > len(HEADER) for path in directory.glob(f"*{SUFFIX}"))


def has_others(directory: Path, own: frozenset[str]) -> bool:
    """Return whether a file of another process has records that wait. ``own`` are the names of ours."""
    try:
        with os.scandir(directory) as entries:
            return any(
                entry.name.endswith(SUFFIX) and entry.name not in own and entry.stat().st_size > len(HEADER)
                for entry in entries
            )
    except FileNotFoundError:
        return False


def keep_refused(directory: Path, name: str, payload: bytes) -> Path:
    """Keep a record that the database refused in a file of its own. Raises `OSError`."""
    path = directory / f"{name}{REFUSED}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _write_all(fd, payload, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()


def _write_all(fd: int, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, place)
        view, place = view[written:], place + written


def _read_all(fd: int, length: int, place: int) -> bytes:
    pieces = []
    while length:
        piece = os.pread(fd, length, place)
        if not piece:
            raise OSError("the spool ends in the middle of a record")
        pieces.append(piece)
        length, place = length - len(piece), place + len(piece)
    return b"".join(pieces)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
