"""The faults, each from its beginning to its end. All times are seconds, drawn from the round's own random numbers."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import asyncpg
import psutil

from tests.faults.rig import OWNER, Program, Rig, wait_for_port
from tests.faults.ways import MODES, Mode, Way

TABLES = ("messages", "sessions", "calls", "epochs", "terse")
# The server or the way to it is gone, perhaps by another fault of the round.
GONE = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)
Fault = Callable[[Rig, random.Random], Awaitable[None]]
_TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1 AND pid <> pg_backend_pid()"
_BACKEND = "SELECT pid FROM pg_stat_activity WHERE usename = $1"


async def _pause(rng: random.Random, most: float = 2.0) -> None:
    await asyncio.sleep(rng.uniform(0.2, most))


@asynccontextmanager
async def _admin(rig: Rig) -> AsyncIterator[asyncpg.Connection]:
    """A superuser's connection; another fault may have taken the server away."""
    connection = await asyncpg.connect(rig.admin_dsn, timeout=10)
    try:
        yield connection
    finally:
        connection.terminate()


async def kill_replica(rig: Rig, rng: random.Random, *, number: int) -> None:
    """Kill -9 a service and start it again. The next rounds do not wait until it has started."""
    del rng
    replica = rig.replicas[number]
    await replica.restart()
    rig.note_start(replica)


async def kill_worker(rig: Rig, rng: random.Random) -> None:
    """Kill -9 one of two workers; their parent replaces it."""
    workers = rig.replicas[0].family()[1:]
    if workers:
        rng.choice(workers).kill()


async def stop_worker(rig: Rig, rng: random.Random) -> None:
    workers = rig.replicas[0].family()[1:]
    if workers:
        await _stop([rng.choice(workers)], rng)


async def stop_program(rig: Rig, rng: random.Random, *, of: Callable[[Rig], Program]) -> None:
    await _stop(of(rig).family(), rng)


async def _stop(processes: list[psutil.Process], rng: random.Random) -> None:
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        if number == signal.SIGSTOP:
            await _pause(rng)


async def restart_program(rig: Rig, rng: random.Random, *, of: Callable[[Rig], Program]) -> None:
    del rng
    program = of(rig)
    for each in program.family():  # the parent first, which would replace its children
        with suppress(psutil.NoSuchProcess):
            each.kill()
    await program.restart()
    await wait_for_port(program.port)


async def kill_postmaster(rig: Rig, rng: random.Random) -> None:
    """Kill -9 the postmaster; the embedded server is started again by its watcher."""
    del rng
    with suppress(psutil.NoSuchProcess, ValueError, OSError):
        rig.postmaster().kill()


async def kill_backend(rig: Rig, rng: random.Random) -> None:
    """Kill -9 a backend, upon which Postgres ends all others and recovers."""
    with suppress(*GONE, psutil.NoSuchProcess, IndexError):
        async with _admin(rig) as connection:
            pids = [row["pid"] for row in await connection.fetch(_BACKEND, OWNER)]
        psutil.Process(rng.choice(pids)).kill()


async def terminate_backends(rig: Rig, rng: random.Random) -> None:
    """End all connections, several times."""
    for _ in range(rng.randint(1, 4)):
        with suppress(*GONE):
            async with _admin(rig) as connection:
                await connection.execute(_TERMINATE, OWNER)
        await asyncio.sleep(rng.uniform(0.05, 0.4))


async def stop_postgres(rig: Rig, rng: random.Random) -> None:
    await _stop(await asyncio.to_thread(rig.postgres), rng)


async def stop_backend(rig: Rig, rng: random.Random) -> None:
    pids = []
    with suppress(*GONE):
        async with _admin(rig) as connection:
            pids = [row["pid"] for row in await connection.fetch(_BACKEND, OWNER)]
    with suppress(psutil.NoSuchProcess):
        await _stop([psutil.Process(pid) for pid in rng.sample(pids, min(len(pids), 3))], rng)


async def lock_table(rig: Rig, rng: random.Random) -> None:
    """Nobody can read or write a table, sometimes for longer than the database timeout."""
    with suppress(*GONE):
        async with _admin(rig) as connection, connection.transaction():
            mode = rng.choice(("ACCESS EXCLUSIVE", "SHARE"))
            await connection.execute(f"SET LOCAL lock_timeout = '2s'; LOCK TABLE {rng.choice(TABLES)} IN {mode} MODE")
            await _pause(rng, 3.5)


async def exhaust_connections(rig: Rig, rng: random.Random) -> None:
    """Others take all connections of the server; those of the service are ended."""
    loop = asyncio.get_running_loop()
    end = loop.time() + rng.uniform(0.5, 2.5)
    dsn = rig.admin_dsn.replace("postgresql://postgres@", f"postgresql://{OWNER}:faults@")
    taken: list[asyncpg.Connection] = []
    try:
        with suppress(*GONE):
            async with _admin(rig) as connection:
                await connection.execute(_TERMINATE, OWNER)
        while loop.time() < end:
            try:
                taken.append(await asyncpg.connect(dsn, timeout=2))
            except GONE:
                await asyncio.sleep(0.05)
    finally:
        for each in taken:
            each.terminate()


@asynccontextmanager
async def _full_disk(rig: Rig) -> AsyncIterator[None]:
    assert rig.disk is not None
    filler = rig.disk / "filler"
    try:
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1024 * 1024))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))
        yield
    finally:
        filler.unlink(missing_ok=True)


async def fill_disk(rig: Rig, rng: random.Random) -> None:
    """Nothing more can be written where the spool is."""
    async with _full_disk(rig):
        await _pause(rng)


async def fill_disk_without_database(rig: Rig, rng: random.Random) -> None:
    """Neither the database nor the spool takes anything."""
    async with _full_disk(rig):
        await rng.choice((stop_postgres, kill_postmaster, lock_table))(rig, rng)
        await asyncio.sleep(rng.uniform(0.2, 1))


async def misbehave(rig: Rig, rng: random.Random, *, mode: Mode, of: Callable[[Rig], Way]) -> None:
    of(rig).become(mode)
    await _pause(rng)
    of(rig).become("open")


# How often a fault is chosen, compared with the others: the start of a process takes many times what the rest does.
RARE = {"kill service with workers": 0.2, "kill replica": 0.5, "kill pooled replica": 0.5}


def faults_of(rig: Rig) -> dict[str, Fault]:
    """Every fault that this machine permits, by name."""
    found: dict[str, Fault] = {
        "kill service with workers": partial(kill_replica, number=0),
        "kill replica": partial(kill_replica, number=1),
        "kill pooled replica": partial(kill_replica, number=2),
        "stop service with workers": partial(stop_program, of=lambda rig: rig.replicas[0]),
        "stop replica": partial(stop_program, of=lambda rig: rig.replicas[1]),
        "kill worker": kill_worker,
        "stop worker": stop_worker,
        "kill postmaster": kill_postmaster,
        "kill backend": kill_backend,
        "terminate backends": terminate_backends,
        "stop postgres": stop_postgres,
        "stop backends": stop_backend,
        "lock table": lock_table,
        "exhaust connections": exhaust_connections,
        "kill nginx": partial(restart_program, of=lambda rig: rig.nginx),
        "stop nginx": partial(stop_program, of=lambda rig: rig.nginx),
    }
    for mode in MODES:
        found[f"model {mode}"] = partial(misbehave, mode=mode, of=lambda rig: rig.model_way)
        found[f"summarizer {mode}"] = partial(misbehave, mode=mode, of=lambda rig: rig.summarizer_way)
    if rig.pgbouncer is not None:
        bouncer = rig.pgbouncer
        found["kill pgbouncer"] = partial(restart_program, of=lambda _: bouncer)
        found["stop pgbouncer"] = partial(stop_program, of=lambda _: bouncer)
    if rig.disk is not None:
        found["fill disk"] = fill_disk
        found["fill disk, no database"] = fill_disk_without_database
    return found
