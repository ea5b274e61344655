"""Observe the rig once a second, for a report on rounds that took too long."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import psutil

from tests.faults.rig import Rig

# Seconds between two looks.
EVERY = 1.0
# Lines of a log that are shown, without repetitions.
MOST_LINES = 40
_NUMBERS = re.compile(r"\b(?=\w*\d)\w{3,}\b")
_MARKS = "SELECT id, created_at - now() AS left FROM replays WHERE id LIKE 'waiting:%' AND created_at > now()"


@dataclass(slots=True)
class Watch:
    """The looks of one round, each a line; and the logs from its beginning on."""

    rig: Rig
    began: float = field(default_factory=time.monotonic)
    lines: list[str] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Of clients, since the last look."""
    _sizes: dict[Path, int] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Add a line with the time since the round began."""
        self.lines.append(f"{time.monotonic() - self.began:6.2f} {text}")

    async def look(self) -> None:
        """Look at the rig until cancelled."""
        self._sizes = {path: path.stat().st_size for path in self.rig.home.glob("*.log")}
        processes = _times(self.rig)
        psutil.cpu_times_percent()
        while True:
            await asyncio.sleep(EVERY)
            idle = psutil.cpu_times_percent().idle
            now = _times(self.rig)
            ours = sum(seconds - processes.get(pid, 0.0) for pid, seconds in now.items())
            processes = now
            waiting = sum(path.stat().st_size > 16 for path in self.rig.spool.glob("*/*.spool") if path.exists())
            for failure, count in self.failures.items():
                self.note(f"{count} x {failure}")
            self.failures.clear()
            self.note(
                f"idle {idle:.0f} %, replicas {ours / EVERY:.2f} cores, load {psutil.getloadavg()[0]:.1f}, "
                f"spools {waiting}, starting {sorted(self.rig.starting)}, marks {await self._marks()}"
            )

    async def _marks(self) -> str:
        """The marks that say that a process has exchanges in its spool."""
        try:
            connection = await asyncpg.connect(self.rig.admin_dsn, timeout=1)
        except (asyncpg.PostgresError, OSError, TimeoutError) as error:
            return type(error).__name__
        try:
            rows = await connection.fetch(_MARKS, timeout=1)
            return ", ".join(f"{row['id'][-8:]} {row['left'].total_seconds():.0f} s" for row in rows) or "none"
        except (asyncpg.PostgresError, OSError, TimeoutError) as error:
            return type(error).__name__
        finally:
            connection.terminate()

    def report(self) -> list[str]:
        """The looks, and what the replicas and nginx logged meanwhile."""
        found = list(self.lines)
        for path in sorted(self.rig.home.glob("*.log")):
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                logged = file.read().decode("utf-8", "replace").splitlines()
                lines = Counter(_message(line) for line in logged)
                found += [f"{path.stem}: {count} x {line}" for line, count in lines.most_common(MOST_LINES)]
        return found


def _message(line: str) -> str:
    """Return a log line without ids and numbers, so that it can be counted."""
    with suppress(ValueError, TypeError, KeyError):
        line = json.loads(line)["message"]
    return _NUMBERS.sub("_", line)[:300]


def reason(body: str) -> str:
    """Why a call was refused, by the body of the answer."""
    with suppress(ValueError, TypeError, KeyError):
        body = json.loads(body)["error"]["message"]
    return " ".join(body.split())[:160]


def _times(rig: Rig) -> dict[int, float]:
    """The processor time of each process of the replicas."""
    found = {}
    for each in (process for program in rig.replicas for process in program.family()):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            found[each.pid] = times.user + times.system
    return found


@asynccontextmanager
async def watching(rig: Rig) -> AsyncIterator[Watch]:
    """Look at the rig for the length of the block."""
    watch = Watch(rig)
    task = asyncio.create_task(watch.look())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
