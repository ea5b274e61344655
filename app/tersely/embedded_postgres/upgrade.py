"""Takes a cluster of an older major version of Postgres over, by ``pg_upgrade``.

That needs the programs of both versions: the installed ones, and those that made the cluster. The old cluster is copied
and stays as it is, under another name, until somebody removes it.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tersely.embedded_postgres.cluster import (
    SUPERUSER,
    Layout,
    choose_layout,
    create_cluster,
    flush,
    make_home,
    run_program,
)
from tersely.embedded_postgres.errors import EmbeddedPostgresError
from tersely.embedded_postgres.install import MAJOR
from tersely.embedded_postgres.locks import FileLock, exclusive
from tersely.embedded_postgres.postmaster import find_postmaster

# How long a lock is awaited, in seconds.
_PATIENCE = 60.0
# Names the socket of the servers that ``pg_upgrade`` starts.
_PORT = 50432


def upgrade_cluster(data_dir: Path, old_programs: Path) -> int:
    """Return the major version of the cluster that was taken over. Nothing may use the database meanwhile.

    ``old_programs`` is the ``bin`` directory of the Postgres that made the cluster. Raises `EmbeddedPostgresError`, and
    leaves all as it was.
    """
    home = make_home(data_dir)
    with exclusive(home / "start.lock", deadline=time.monotonic() + _PATIENCE, abandoned=lambda: False):
        old, major = _old_cluster(home)
        layout = choose_layout(home, owner=old)
        _check_programs(layout, old_programs, major)
        locks = _take_locks(layout, old)
        try:
            _upgrade(layout, old, old_programs, locks)
        finally:
            _close(locks)
            _remove_unfinished(layout, old)
    return major


def _take_locks(layout: Layout, old: Path) -> Sequence[FileLock]:
    """Return all locks, held. An interrupted upgrade may have left servers that hold them: these are ended.

    The start lock is held, so no other upgrade is under way. Raises `EmbeddedPostgresError`.
    """
    locks = [FileLock(layout.service_lock), FileLock(old.with_suffix(".lock")), FileLock(layout.cluster_lock)]
    try:
        _take(locks, layout)
    except BaseException:
        _close(locks)
        raise
    return locks


def _take(locks: Sequence[FileLock], layout: Layout) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not all(lock.try_exclusive() for lock in locks):
        if not _work_directory(layout).exists():
            raise EmbeddedPostgresError("the database is in use: stop the service first")
        if time.monotonic() > deadline:
            raise EmbeddedPostgresError(
                "the database is in use: stop the service, or wait for the programs of an interrupted upgrade to end"
            )
        left = find_postmaster(layout, layout.socket.with_name(f".s.PGSQL.{_PORT}"))
        if left is not None:
            left.send(signal.SIGINT)
            left.close()
        time.sleep(0.1)


def _close(locks: Sequence[FileLock]) -> None:
    for lock in locks:
        lock.close()


def _remove_unfinished(layout: Layout, old: Path) -> None:
    """Remove the files of an upgrade that has ended, once the programs that it started have ended, too.

    An interruption kills ``pg_upgrade``, but not the server that it started: that one holds the locks. The work
    directory is removed last, because it tells the next upgrade of such servers. Raises `EmbeddedPostgresError`.
    """
    _close(_take_locks(layout, old))
    shutil.rmtree(_unfinished_cluster(layout), ignore_errors=True)
    shutil.rmtree(_work_directory(layout), ignore_errors=True)


def _work_directory(layout: Layout) -> Path:
    """Return the directory of ``pg_upgrade``'s own files. It exists while programs of an upgrade may be running."""
    return layout.home / "upgrade"


def _unfinished_cluster(layout: Layout) -> Path:
    return layout.cluster.with_suffix(".new")


def _old_cluster(home: Path) -> tuple[Path, int]:
    if (home / f"cluster-{MAJOR}").exists():
        raise EmbeddedPostgresError(f"the database in {home} is of version {MAJOR} already")
    names = {path: path.name.removeprefix("cluster-") for path in home.glob("cluster-*")}
    found = sorted((int(name), path) for path, name in names.items() if name.isdigit() and int(name) < MAJOR)
    if not found:
        raise EmbeddedPostgresError(f"there is no database of an older version in {home}")
    major, path = found[-1]
    return path, major


def _check_programs(layout: Layout, old_programs: Path, major: int) -> None:
    server = old_programs / "postgres"
    if not server.is_file() or not layout.account.can_use(directory=old_programs, program=server):
        raise EmbeddedPostgresError(f"user id {layout.account.uid}, which runs Postgres, cannot run {server}")
    output = subprocess.run([server, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    if f" {major}." not in output:
        raise EmbeddedPostgresError(f"the database was made by Postgres {major}, and {server} is: {output.strip()}")


def _upgrade(layout: Layout, old: Path, old_programs: Path, locks: Sequence[FileLock]) -> None:
    work = _work_directory(layout)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    layout.account.own(work)
    new = _unfinished_cluster(layout)
    _recover(layout, old, old_programs, locks)
    create_cluster(layout, durable=True, has_checksums=_has_checksums(layout, old), is_upgrade=True, locks=locks)
    run_program(
        layout,
        "pg_upgrade",
        f"--old-datadir={old}",
        f"--new-datadir={new}",
        f"--old-bindir={old_programs}",
        f"--new-bindir={layout.install.program('postgres').parent}",
        f"--username={SUPERUSER}",
        f"--socketdir={layout.socket_dir}",
        f"--old-port={_PORT}",
        f"--new-port={_PORT}",
        cwd=work,
        locks=locks,
    )
    # First the new one: whatever ends this process, one of both has its final name, and no empty one is created.
    new.rename(layout.cluster)
    flush(layout.home)
    old.rename(old.with_name(f"{old.name}.old"))


def _recover(layout: Layout, old: Path, old_programs: Path, locks: Sequence[FileLock]) -> None:
    """Bring the files of a server that was killed up to date: ``pg_upgrade`` takes only those of one that was stopped.

    Nobody holds the cluster's lock, so whoever wrote the pid file is dead.
    """
    pid_file = old / "postmaster.pid"
    if pid_file.exists():
        pid_file.unlink()
        run_program(layout, old_programs / "postgres", "--single", "-D", str(old), "template1", locks=locks)


def _has_checksums(layout: Layout, old: Path) -> bool:
    """Return whether the pages of a cluster have checksums: those of the new one must have them, too, or not."""
    output = subprocess.run(
        [str(layout.install.program("pg_controldata")), str(old)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
        env={"LC_ALL": "C"},
        **layout.account.popen_arguments(),
    ).stdout
    return "Data page checksum version:           0" not in output
