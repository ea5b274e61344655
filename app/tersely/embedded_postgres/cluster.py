"""The files of one embedded server: directories, their owners, and the first-time creation of the cluster."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tersely.embedded_postgres.account import SystemAccount, choose_account
from tersely.embedded_postgres.errors import EmbeddedPostgresError
from tersely.embedded_postgres.install import MAJOR, Install, find_install, reachable_install
from tersely.embedded_postgres.locks import FileLock

SUPERUSER = "tersely"
DATABASE = "tersely"
PORT = 5432  # names the socket file; nothing listens on the network

# Linux takes 107 bytes, macOS 103.
_SOCKET_PATH_LIMIT = 103

# Written to postgresql.conf once, so that an operator may change them there. The locale is the server's own, not the
# system's: text sorts and folds alike on every machine, and a system update cannot invalidate an index.
_INITIAL_SETTINGS = {
    "max_connections": "50",
    "shared_buffers": "128MB",
    "max_wal_size": "512MB",
    "min_wal_size": "64MB",
    "jit": "off",  # costs more than it saves on short queries
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The paths of the server's files, their owner, and the programs that serve them."""

    home: Path
    socket_dir: Path
    account: SystemAccount
    install: Install

    @property
    def cluster(self) -> Path:
        """Return the database files."""
        return self.home / f"cluster-{MAJOR}"

    @property
    def cluster_lock(self) -> Path:
        """Held by the processes of the server, by each one of them."""
        return self.home / f"cluster-{MAJOR}.lock"

    @property
    def service_lock(self) -> Path:
        """Held by the processes that use the server."""
        return self.home / "service.lock"

    @property
    def log(self) -> Path:
        """The file of the server's log."""
        return self.home / "server.log"

    @property
    def socket(self) -> Path:
        """Return the server's only entrance."""
        return self.socket_dir / f".s.PGSQL.{PORT}"


def make_home(data_dir: Path) -> Path:
    """Create the directory below ``data_dir`` that holds everything of the server's. Several processes may do so.

    Permissions of directories that existed are never changed. Raises EmbeddedPostgresError.
    """
    data_dir = data_dir.expanduser().absolute()
    home = data_dir / "postgres"
    root = os.geteuid() == 0
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        _make_directory(data_dir, mode=0o755 if root else 0o700)
        # The server's account passes through here to its own directories, and reads nothing else.
        _make_directory(home, mode=0o711 if root else 0o700)
    except OSError as error:
        raise EmbeddedPostgresError(
            f"cannot create {error.filename}: {error.strerror}; TERSELY_DATA_DIR names another data directory"
        ) from error
    return home


def choose_layout(home: Path, *, owner: Path | None = None) -> Layout:
    """Settle who runs the server of ``home`` and with which programs. Under the start lock.

    ``owner``: a cluster whose owner runs the server, if it is another one than that which is used. Raises
    EmbeddedPostgresError where no suitable account can get at the files.
    """
    account = choose_account(owner or home / f"cluster-{MAJOR}")
    if not account.can_use(directory=home, program=Path("/bin/sh")):
        raise EmbeddedPostgresError(
            f"Postgres, which cannot run as root, runs as user id {account.uid}, which may not enter {home}: "
            "set TERSELY_DATA_DIR to a directory outside of private ones, such as /var/lib/tersely"
        )
    install = reachable_install(find_install(), account=account, home=home)
    return Layout(home=home, socket_dir=_socket_dir(home, account), account=account, install=install)


def create_cluster(
    layout: Layout,
    *,
    durable: bool,
    has_checksums: bool = True,
    is_upgrade: bool = False,
    locks: Sequence[FileLock] = (),
) -> None:
    """Create the cluster with an empty database, if there is none yet: all of it or nothing.

    ``is_upgrade``: it stays under its unfinished name and without a database, which ``pg_upgrade`` brings. ``locks``
    are those of `run_program`.
    ``durable`` off skips the flush to disk. Takes about a second. Raises EmbeddedPostgresError.
    """
    if layout.cluster.exists():
        return
    other = [path.name for path in layout.home.glob("cluster-*") if path.name.removeprefix("cluster-").isdigit()]
    if other and not is_upgrade:
        raise EmbeddedPostgresError(
            f"{layout.home / other[0]} was made by another major version of Postgres than {MAJOR}, which is installed: "
            "upgrade it with `tersely migrate --old-postgres BIN`, see docs/backup.md, or move the directory away"
        )
    unfinished = layout.cluster.with_suffix(".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    layout.account.own(unfinished)
    settings = [f"--set={name}={value}" for name, value in _INITIAL_SETTINGS.items()]
    run_program(
        layout,
        "initdb",
        f"--pgdata={unfinished}",
        f"--username={SUPERUSER}",
        "--auth-local=trust",
        "--auth-host=reject",
        "--encoding=UTF8",
        "--locale=C",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        "--data-checksums" if has_checksums else "--no-data-checksums",
        "--no-instructions",
        *([] if durable else ["--no-sync"]),
        *settings,
        locks=locks,
    )
    if is_upgrade:
        return
    # Before the rename and without a server: a cluster under its final name always has its database.
    run_program(layout, "postgres", "--single", "-D", str(unfinished), "postgres", text=f"CREATE DATABASE {DATABASE}\n")
    unfinished.rename(layout.cluster)
    flush(layout.home)


def forget_dead_server(layout: Layout) -> None:
    """Remove the pid files of a server that is known to be dead.

    Postgres would ask whether a process with the noted id lives, and refuse to start when that id has meanwhile been
    given to any other process of the same user. Only to be called by a holder of the cluster's lock.
    """
    for name in (
        layout.cluster / "postmaster.pid",
        layout.socket,
        layout.socket.with_name(f"{layout.socket.name}.lock"),
    ):
        name.unlink(missing_ok=True)


def server_environment() -> Mapping[str, str]:
    """Return the environment of the server's processes: nothing of the service's keys and settings."""
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def _make_directory(path: Path, *, mode: int) -> None:
    try:
        path.mkdir(mode=mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    else:
        path.chmod(mode)  # the mode given to mkdir was narrowed by the umask


def _socket_dir(home: Path, account: SystemAccount) -> Path:
    """Return a private directory whose path is short enough for a socket and means nothing special in a DSN."""
    directory = home / "run"
    path = str(directory / f".s.PGSQL.{PORT}")
    if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT or set(path) & set(',"'):
        # Not the temporary directory of the environment: every process must come to the same answer.
        name = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16]
        directory = Path(f"/tmp/tersely-{account.uid}-{name}")  # noqa: S108 -- checked below
    try:
        directory.mkdir(mode=0o700)
        account.own(directory)
    except FileExistsError:
        pass
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != account.uid or found.st_mode & 0o077:
        raise EmbeddedPostgresError(
            f"{directory}, meant for the server's socket, is not a directory that only user id {account.uid} "
            "can enter: remove it"
        )
    return directory


def run_program(
    layout: Layout,
    program: str | Path,
    *arguments: str,
    text: str = "",
    cwd: Path = Path("/"),
    locks: Sequence[FileLock] = (),
) -> None:
    """Run a program of the installation, or at a path, as the server's account. Raises `EmbeddedPostgresError`.

    ``locks`` stay held until the program and all that it started have ended, also if this process is killed.
    """
    path = layout.install.program(program) if isinstance(program, str) else program
    done = subprocess.run(
        [str(path), *arguments],
        check=False,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        env=server_environment(),
        start_new_session=True,
        pass_fds=[lock.fd for lock in locks],
        **layout.account.popen_arguments(),
    )
    if done.returncode != 0:
        raise EmbeddedPostgresError(f"{path.name} failed with status {done.returncode}: {_reason_of(done.stdout)}")


def _reason_of(output: str) -> str:
    """Return the errors in a program's output; all of it where none is marked as one."""
    errors = [line.strip() for line in output.splitlines() if re.search(r"\b(FATAL|PANIC|error): ", line)]
    return "; ".join(errors) or output.strip()[-2000:]


def flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
