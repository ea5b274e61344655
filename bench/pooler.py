"""Measure PgBouncer: processor time of Postgres and the pooler per call, direct and pooled, side by side.

`python -m bench.pooler [--pgbouncer PATH] [--cell grow4k:no:16] [--reps 3]`: three services on one embedded Postgres:
one directly, one through PgBouncer in transaction mode, and one through it with prepared statements kept
(`TERSELY_DATABASE_POOLER=prepared`; PgBouncer 1.21 or newer). They take turns. As in `bench.growth`, a figure is that
of later calls of a conversation.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import psutil

from bench import servers
from bench.growth import LONG, SHORT
from bench.run import play
from bench.servers import Server, free_port
from tersely.embedded_postgres import EmbeddedPostgres, open_embedded_postgres

WAYS: Final = {"direct": "off", "pooled": "on", "pooled, prepared": "prepared"}


def start_pooler(program: str, postgres: EmbeddedPostgres, scratch: Path, port: int) -> subprocess.Popen[bytes]:
    """Start PgBouncer in front of a server, under the server's account, which owns the socket."""
    query = parse_qs(urlsplit(postgres.admin_dsn).query)
    account = Path(query["host"][0]).stat()
    user = urlsplit(postgres.admin_dsn).username or "postgres"
    (scratch / "users").write_text(f'"{user}" ""\n')
    (scratch / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={query['host'][0]} port={query['port'][0]} user={user}\n[pgbouncer]\n"
        f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"auth_file = {scratch / 'users'}\npool_mode = transaction\ndefault_pool_size = 20\n"
        "max_prepared_statements = 500\n"
    )
    owner: dict[str, Any] = {"user": account.st_uid, "group": account.st_gid, "extra_groups": []}
    command = [program, "-q", str(scratch / "pgbouncer.ini")]
    return subprocess.Popen(command, **(owner if os.geteuid() == 0 else {}))


def cpu_s(roots: list[psutil.Process]) -> float:
    """Processor seconds of these processes and all below them."""
    below = {each.pid for root in roots for each in (root, *root.children(recursive=True))}
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in below if psutil.pid_exists(pid))


def marginal(server: Server, roots: list[psutil.Process], cell: str, seed: str) -> float:
    """Microseconds of Postgres and pooler per later call."""
    shape, stream, connections = cell.split(":")
    used = []
    for turns in (SHORT, LONG):
        count = int(connections) * turns
        before = cpu_s(roots)
        more = ["--stream", stream, "--requests", str(count)]
        figures = play(server, f"{shape}-{turns}", connections=int(connections), seed=f"{turns}{seed}", more=more)
        used.append(cpu_s(roots) - before)
        if figures["errors"]:
            raise RuntimeError(f"{server.name}: {figures['examples'][:2]}")
    return (used[1] - used[0]) / (int(connections) * (LONG - SHORT)) * 1e6


def run(program: str, scratch: Path, cell: str, reps: int) -> None:
    """Measure and print."""
    print(subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0])
    with ExitStack() as stack:
        postgres = stack.enter_context(open_embedded_postgres(scratch / "postgres"))
        started = stack.enter_context(servers.running([]))
        port = free_port()
        pooler = start_pooler(program, postgres, scratch, port)
        stack.callback(pooler.wait)
        stack.callback(pooler.terminate)
        host = servers.upstream(scratch)
        started.append(host)
        parts = urlsplit(postgres.admin_dsn)
        pooled = f"postgresql://{parts.username}@127.0.0.1:{port}{parts.path}"
        chosen: dict[str, Server] = {}
        for name, kind in WAYS.items():
            own = scratch / kind
            own.mkdir()
            env = {"DATABASE_URL": postgres.admin_dsn if kind == "off" else pooled, "TERSELY_DATABASE_POOLER": kind}
            chosen[name] = servers.tersely(host, own, env)
            started.append(chosen[name])
        postmaster = int(next((scratch / "postgres").rglob("postmaster.pid")).read_text().split()[0])
        roots = [psutil.Process(postmaster), psutil.Process(pooler.pid)]
        found: dict[str, list[float]] = defaultdict(list)
        for name, server in chosen.items():
            marginal(server, roots, cell, f"warm{name}")
        for rep in range(reps):
            for name, server in chosen.items():
                found[name].append(marginal(server, roots, cell, str(rep)))
        base = statistics.median(found["direct"])
        for name, samples in found.items():
            own_us = statistics.median(samples)
            print(f"{name:18} {own_us:6.0f} us a call {own_us / base:5.2f}  {[round(each) for each in samples]}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pgbouncer", default=shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin"))
    parser.add_argument("--cell", default="grow4k:no:16")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    with servers.scratch_dir() as scratch:
        run(args.pgbouncer, scratch, args.cell, args.reps)


if __name__ == "__main__":
    main()
