"""The account that runs the server. Postgres refuses to be root, so a root service lends it an unprivileged account."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from tersely.embedded_postgres.errors import EmbeddedPostgresError

# The first existing account is used. If other services run as `nobody`, create an account for this purpose: `useradd
# --system tersely`.
_UNPRIVILEGED = ("tersely", "nobody")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemAccount:
    """The user that owns the database files; ``switched`` if it is not the service's own."""

    uid: int
    gid: int
    switched: bool

    def popen_arguments(self) -> dict[str, Any]:
        """The arguments of ``subprocess`` that start a program as this account."""
        # Postgres creates its files with the process's umask. Other users must not read them.
        arguments: dict[str, Any] = {"umask": 0o077}
        if self.switched:
            arguments |= {"user": self.uid, "group": self.gid, "extra_groups": []}
        return arguments

    def can_use(self, *, directory: Path, program: Path) -> bool:
        """Return whether this account can enter ``directory`` and run ``program``."""
        if not self.switched:
            return directory.is_dir() and os.access(directory, os.X_OK) and os.access(program, os.X_OK)
        # Only the kernel can combine modes, ACLs and mounts, so a child with that account tries.
        tried = subprocess.run(
            ["/bin/sh", "-c", 'cd "$1" && test -x "$2"', "sh", str(directory), str(program)],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            **self.popen_arguments(),
        )
        return tried.returncode == 0

    def own(self, path: Path) -> None:
        """Hand a file or directory of ours to this account."""
        if self.switched:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def choose_account(cluster: Path) -> SystemAccount:
    """Return the account for the cluster directory ``cluster``: its owner if it exists, else a suitable one."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        owner = cluster.stat()
    except FileNotFoundError:
        return _unprivileged() if uid == 0 else SystemAccount(uid=uid, gid=gid, switched=False)
    if uid == 0 and owner.st_uid != 0:
        return SystemAccount(uid=owner.st_uid, gid=owner.st_gid, switched=True)
    if uid == 0 or owner.st_uid != uid:
        raise EmbeddedPostgresError(
            f"the database files in {cluster} belong to user id {owner.st_uid}, and this process runs as {uid}: "
            "run Tersely as that user, or give it a data directory of its own with TERSELY_DATA_DIR"
        )
    return SystemAccount(uid=uid, gid=gid, switched=False)


def _unprivileged() -> SystemAccount:
    for name in _UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return SystemAccount(uid=entry.pw_uid, gid=entry.pw_gid, switched=True)
    raise EmbeddedPostgresError(
        "Postgres does not run as root, and this system has no account to run it: "
        "create one with `useradd --system tersely`, or run Tersely as an ordinary user"
    )


def default_data_dir() -> Path:
    """Return the directory of Tersely's data, unless the settings name another.

    Root's home is closed to the account that the server runs as, and its parents' permissions are not ours to
    loosen: root keeps its data where system services do.
    """
    if os.geteuid() == 0 and sys.platform == "linux":
        return Path("/var/lib/tersely")
    return platformdirs.user_data_path("tersely", appauthor=False)
