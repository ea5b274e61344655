"""The server's main process: whether it listens, whether it is ready, and how to signal it.

A process id from a file may belong to another process by now. So the id comes from the kernel, which knows who listens
on the socket, and the signal goes through a descriptor that always means the same process.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Literal

from tersely.embedded_postgres.cluster import PORT, SUPERUSER, Layout, server_environment
from tersely.embedded_postgres.errors import EmbeddedPostgresError

_PROBE_SECONDS = 5.0
_MACOS_SOL_LOCAL, _MACOS_LOCAL_PEERPID = 0, 2

Readiness = Literal["ready", "not yet", "silent"]


def is_listening(path: Path) -> bool:
    """Return whether a process listens on the socket at ``path``, be it ready, starting, stopping or stuck."""
    try:
        _connect(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except (BlockingIOError, TimeoutError):
        return True  # a full queue: a process listens, but does not accept
    return True


def readiness(layout: Layout) -> Readiness:
    """Return ``ready``, ``not yet`` (starting, recovering or stopping) or ``silent``."""
    probe = subprocess.run(
        [
            str(layout.install.program("pg_isready")),
            f"--host={layout.socket_dir}",
            f"--port={PORT}",
            f"--timeout={_PROBE_SECONDS:.0f}",
            "--dbname=postgres",
            f"--username={SUPERUSER}",
            "--quiet",
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        env=dict(server_environment()),
    )
    match probe.returncode:
        case 0:
            return "ready"
        case 1:
            return "not yet"
        case _:
            return "silent"


class Postmaster:
    """A running server that some other process started. To be closed."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        """``pidfd`` pins the process where the system has such descriptors."""
        self.pid = pid
        self._pidfd = pidfd

    def send(self, number: signal.Signals) -> None:
        """Signal the process; nothing happens if it has ended."""
        try:
            if self._pidfd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def close(self) -> None:
        """Give the descriptor back."""
        if self._pidfd is not None:
            os.close(self._pidfd)


def find_postmaster(layout: Layout, path: Path | None = None) -> Postmaster | None:
    """Return the process that listens on the server's socket, if any and if it is of this process's pid namespace.

    ``path``: another socket than the server's. Raises EmbeddedPostgresError if it belongs to another user than the
    server's account.
    """
    path = path or layout.socket
    pid = _listener(layout, path)
    if pid is None:
        return None
    if sys.platform != "linux":
        return Postmaster(pid, None)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    # It may have ended before it was pinned, and its id been reused: so check again.
    if _listener(layout, path) == pid:
        return Postmaster(pid, pidfd)
    os.close(pidfd)
    return None


def _connect(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        client.settimeout(_PROBE_SECONDS)
        client.connect(str(path))
    except OSError:
        client.close()
        raise
    return client


def _listener(layout: Layout, path: Path) -> int | None:
    try:
        client = _connect(path)
    except OSError:
        return None
    with client:
        if sys.platform != "linux":
            return client.getsockopt(_MACOS_SOL_LOCAL, _MACOS_LOCAL_PEERPID) or None
        pid, uid, _ = struct.unpack(
            "3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if uid != layout.account.uid:
            raise EmbeddedPostgresError(f"user id {uid} listens on {path}, which belongs to {layout.account.uid}")
        return pid or None
