"""Rounds: clients talk, something fails, everything heals, and the store is compared with the clients' records."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import asyncpg

from tests.faults.faults import RARE, Fault, faults_of
from tests.faults.rig import Rig
from tests.faults.watching import Watch, reason, watching
from tests.support.conversations import KINDS, Compared, Conversation, compare

# Seconds. The service takes and stores calls this soon after a fault has ended.
HEALTHY = 5.0
# Rounds with a longer outage of a client are reported in detail.
LONG = 10.0
# What is waited for it at most: on a busy machine the start of a process alone may take longer than that.
PATIENCE = 60.0
# The store is right this soon after the spool is empty.
SETTLED = 8.0
CONVERSATIONS = 10
_STORED = """
SELECT session_id, seq, place, turn, role, status,
    (regexp_match(convert_from(raw, 'UTF8'), 'Q:[0-9a-f]+:(\\d+)'))[1], created_at
FROM messages WHERE convert_from(raw, 'UTF8') LIKE ANY ($1) ORDER BY session_id, place, seq
"""
# Rounds in which a conversation takes part.
ROUNDS_OF_ONE = 5


@dataclass(slots=True)
class Talker:
    """A client that talks until it is told to stop, and what it went through."""

    conversation: Conversation
    rounds_left: int
    statuses: Counter[str] = field(default_factory=Counter)
    outage: float = 0.0
    since: float | None = None
    failures: Counter[str] = field(default_factory=Counter)

    async def talk(self, rng: random.Random, stopping: asyncio.Event) -> None:
        """Ask until the rounds' end, then until one more question is answered."""
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not stopping.is_set():
                await self._ask(http)
                await asyncio.sleep(rng.uniform(0.1, 0.5))
            async with asyncio.timeout(PATIENCE):
                while not await self._ask(http):
                    await asyncio.sleep(0.2)

    async def _ask(self, http: aiohttp.ClientSession) -> bool:
        began = time.monotonic()
        got = await self.conversation.ask(http)
        self.since = self.since or began
        if got.has_ended:
            self.outage = max(self.outage, time.monotonic() - self.since)
            self.since = None
        self.statuses["ok " + got.context if got.has_ended else str(got.status) if got.status else got.error] += 1
        if not got.has_ended:
            self.failures[f"{self.conversation.kind}: {got.status} {reason(got.error)}"] += 1
        return got.has_ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of a round. ``healthy`` and ``spool``: after how many seconds that was. ``out``: the kind of the
    client with the longest outage. ``report``: of a round that took too long, what happened in it.
    """

    number: int
    faults: tuple[str, ...]
    requests: int
    acknowledged: int
    outage: float
    out: str
    healthy: float
    spool: float
    seconds: float
    statuses: Counter[str]
    errors: tuple[str, ...]
    report: tuple[str, ...] = ()

    def line(self) -> str:
        result = "; ".join(self.errors) if self.errors else "ok"
        if self.outage > HEALTHY:
            failed = {name: count for name, count in self.statuses.items() if not name.startswith("ok ")}
            result = f"{self.out} {failed} {result}"
        return (
            f"{self.number:5} {' + '.join(self.faults):45} asked {self.requests:4} acknowledged {self.acknowledged:4} "
            f"outage {self.outage:5.2f} healthy {self.healthy:5.2f} spool {self.spool:4.2f} took {self.seconds:5.1f} s "
            f"{result}"
        )


class Driver:
    """Runs rounds on a rig."""

    def __init__(self, rig: Rig, seed: int, only: Sequence[str] = ()) -> None:
        self._rig = rig
        self._seed = seed
        self._faults = {name: fault for name, fault in faults_of(rig).items() if not only or name in only}
        self._talkers: list[Talker] = []
        self.all: list[Conversation] = []
        self.unsettled = 0

    @property
    def names(self) -> list[str]:
        return list(self._faults)

    async def run(self, number: int) -> Round:
        """One round."""
        rng = random.Random(f"{self._seed}:{number}")
        names = sorted(self._faults)
        weights = [RARE.get(name, 1.0) for name in names]
        chosen = list(dict.fromkeys(rng.choices(names, weights, k=rng.choices((1, 2), (3, 1))[0])))
        began, since = time.monotonic(), datetime.now(UTC) - timedelta(seconds=30)
        self._fill(rng)
        before = {id(each): (each.conversation.requests, len(each.conversation.acknowledged)) for each in self._talkers}
        for each in self._talkers:
            each.outage, each.statuses = 0.0, Counter()
        async with watching(self._rig) as watch:
            for each in self._talkers:
                each.failures = watch.failures
            healthy, spool, errors = await self._play([self._faults[name] for name in chosen], rng, watch, since)
        errors += [f"refused {name}" for name in self._rig.refused()]
        statuses = sum((each.statuses for each in self._talkers), Counter[str]())
        if invalid := [name for name in statuses if name.startswith("4")]:
            errors.append(f"status {', '.join(invalid)}")
        longest = max(self._talkers, key=lambda each: each.outage)
        done = Round(
            number=number,
            faults=tuple(chosen),
            requests=sum(each.conversation.requests - before[id(each)][0] for each in self._talkers),
            acknowledged=sum(len(each.conversation.acknowledged) - before[id(each)][1] for each in self._talkers),
            outage=longest.outage,
            out=longest.conversation.kind,
            healthy=healthy,
            spool=spool,
            seconds=time.monotonic() - began,
            statuses=statuses,
            errors=tuple(errors),
            report=tuple(watch.report()) if errors or healthy > HEALTHY or longest.outage > LONG else (),
        )
        if errors:
            self._talkers.clear()  # the next round is to find its own faults
        return done

    async def _play(
        self, faults: Sequence[Fault], rng: random.Random, watch: Watch, since: datetime
    ) -> tuple[float, float, list[str]]:
        """Let clients talk while the faults strike, and compare. Return after how many seconds the service was healthy
        and its spool empty, and what is wrong.
        """
        stopping = asyncio.Event()
        errors: list[str] = []
        healthy = spool = PATIENCE
        talking = [asyncio.create_task(each.talk(rng, stopping)) for each in self._talkers]
        try:
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            await self._break(faults, rng)
            watch.note("the faults have ended")
            healthy = await self._rig.wait_healthy(PATIENCE, watch.note)
            stopping.set()
            ended = await asyncio.gather(*talking, return_exceptions=True)
            errors += [f"a client: {each!r}"[:300] for each in ended if isinstance(each, BaseException)]
            spool = await self._rig.wait_for_spool(PATIENCE)
            compared = await self._compare_settled(since)
            errors += _faults_in(compared)
            if not compared.is_right:
                errors.append(await stored_of(self._rig.admin_dsn, self._talking(), compared))
        except Exception as error:
            errors.append(f"{type(error).__name__} {error}"[:300])
        finally:
            for task in talking:
                task.cancel()
            await asyncio.gather(*talking, return_exceptions=True)
        return healthy, spool, errors

    async def _compare_settled(self, since: datetime) -> Compared:
        """Compare; what two replicas stored at the same moment is put in order within seconds."""
        end = time.monotonic() + SETTLED
        while True:
            compared = await compare(self._rig.admin_dsn, self._talking(), since=since)
            if compared.is_right or time.monotonic() > end:
                return compared
            self.unsettled += 1
            await asyncio.sleep(1)

    def _talking(self) -> list[Conversation]:
        return [each.conversation for each in self._talkers]

    def _fill(self, rng: random.Random) -> None:
        """Replace the conversations that have had their rounds."""
        for each in self._talkers:
            each.rounds_left -= 1
        self._talkers = [each for each in self._talkers if each.rounds_left > 0]
        while len(self._talkers) < CONVERSATIONS:
            kind = rng.choice(KINDS)
            conversation = Conversation(self._rig.url_for(kind), kind)
            self.all.append(conversation)
            self._talkers.append(Talker(conversation, rng.randint(1, ROUNDS_OF_ONE)))

    async def _break(self, faults: Sequence[Fault], rng: random.Random) -> None:
        async def one(fault: Fault, own: random.Random) -> None:
            await asyncio.sleep(own.uniform(0, 0.5))
            await fault(self._rig, own)

        await asyncio.gather(*(one(each, random.Random(rng.random())) for each in faults))


async def stored_of(admin_dsn: str, conversations: Sequence[Conversation], compared: Compared) -> str:
    """Return the stored rows of the conversations that are not right: session, number, place, role, status, text."""
    found = [*compared.lost, *compared.doubled, *compared.misplaced, *compared.split, *compared.mixed]
    wrong = [each for each in conversations if any(each.name in line for line in found)]
    connection = await asyncpg.connect(admin_dsn)
    try:
        rows = await connection.fetch(_STORED, [f"%Q:{each.name}:%" for each in wrong])
    finally:
        await connection.close()
    stored = [f"{r[0]} #{r[1]} @{r[2]:g} t{r[3]} {r[4]} {r[5]} {r[6]} {r[7]}" for r in rows]
    return "\n      ".join(["stored:", *stored, *(f"{each.kind} {each.name}: {each.log}" for each in wrong)])


def _faults_in(compared: Compared) -> list[str]:
    return [
        f"{name} {len(listed)}: {', '.join(listed[:4])}"[:600]
        for name in ("lost", "doubled", "misplaced", "split", "mixed")
        if (listed := getattr(compared, name))
    ]


@dataclass(slots=True)
class Summary:
    """Figures of all rounds."""

    rounds: list[Round] = field(default_factory=list)
    start_times: list[float] = field(default_factory=list)
    unsettled: int = 0

    def table(self) -> str:
        done = self.rounds
        by_fault: dict[str, list[Round]] = {}
        for each in done:
            for name in each.faults:
                by_fault.setdefault(name, []).append(each)
        lines = [
            f"rounds {len(done)}, asked {sum(r.requests for r in done)}, "
            f"acknowledged {sum(r.acknowledged for r in done)}",
            f"rounds with a finding {sum(bool(r.errors) for r in done)}",
            f"longest outage of a client {max(r.outage for r in done):.1f} s",
            f"not healthy within {HEALTHY:.0f} s: {sum(r.healthy > HEALTHY for r in done)}",
            f"replicas started again {len(self.start_times)}, seconds: {_spread(self.start_times)}",
            f"seconds in which the store was not in order yet after the spool was empty: {self.unsettled}",
            f"answers {dict(sum((r.statuses for r in done), Counter[str]()).most_common())}",
            f"{'fault':28}{'rounds':>7}{'outage p50':>11}{'most':>7}{'healthy p50':>12}{'most':>7}{'findings':>9}",
        ]
        for name, rounds in sorted(by_fault.items()):
            outages, healthy = (sorted(get(r) for r in rounds) for get in (_outage, _healthy))
            lines.append(
                f"{name:28}{len(rounds):7}{outages[len(outages) // 2]:11.2f}{outages[-1]:7.2f}"
                f"{healthy[len(healthy) // 2]:12.2f}{healthy[-1]:7.2f}{sum(bool(r.errors) for r in rounds):9}"
            )
        return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    ordered = sorted(values)
    return f"{ordered[len(ordered) // 2]:.1f} at the median, {ordered[-1]:.1f} at most" if ordered else "-"


def _outage(done: Round) -> float:
    return done.outage


def _healthy(done: Round) -> float:
    return done.healthy


async def run_rounds(
    rig: Rig,
    *,
    rounds: int,
    seed: int,
    first: int = 1,
    only: Sequence[str] = (),
    tell: Callable[[str], None] = print,
    keep: Path | None = None,
    stopping: asyncio.Event | None = None,
) -> tuple[Summary, Compared]:
    """Run rounds, at most until ``stopping``, then compare the whole store with the records of all clients.

    ``keep``: a folder for what happened in rounds that took too long.
    """
    driver, summary = Driver(rig, seed, only), Summary(start_times=rig.start_times)
    for number in range(first, first + rounds):
        if stopping is not None and stopping.is_set():
            break
        done = await driver.run(number)
        summary.rounds.append(done)
        tell(done.line())
        if keep is not None and done.report:
            text = "\n".join([done.line(), *done.report, ""])
            await asyncio.to_thread((keep / f"round-{seed}-{number}.txt").write_text, text)
    summary.unsettled = driver.unsettled
    await rig.wait_started()
    await rig.wait_for_spool(PATIENCE)
    return summary, await compare(rig.admin_dsn, driver.all)
