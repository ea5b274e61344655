"""The checks of Tersely's store after a program has run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tersely.dialects.registry import DIALECTS, dialect_named
from tersely.domain.history.chain import canonical
from tests.clients.program import Program
from tests.clients.relay import Seen


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of one run of a program. ``faults`` is empty when all is well."""

    program: str
    version: str
    variant: str
    calls: int = 0
    streamed: int = 0
    turns: int = 0
    sessions: int = 0
    children: int = 0
    sides: int = 0
    refusals: int = 0
    cuts: int = 0
    faults: list[str] = field(default_factory=list)


async def look(
    outcome: Outcome, program: Program, url: str, seen: Sequence[Seen], log: Path, *, is_small: bool
) -> None:
    """Compare what the program sent with what Tersely answered and stores."""
    calls = [each for each in seen if each.dialect]
    main = [each for each in calls if each.session]
    _check_wire(outcome, program, seen)
    async with aiohttp.ClientSession(url) as http:
        sessions = await _all(http, "/api/sessions")
        stats = {each["id"]: await _get(http, f"/api/sessions/{each['id']}/stats") for each in sessions}
        for session in sessions:
            name = session["id"]
            made = [each for each in main if each.session == name]
            path = f"/api/sessions/{name}/messages"
            _check_nothing_twice(outcome, program, name, made, await _all(http, path, view="all"))
            if made and not program.loose:
                _check_history(outcome, name, made[-1], await _all(http, path, view="client"))
    outcome.streamed = sum("event-stream" in each.headers.get("content-type", "") for each in calls)
    outcome.calls, outcome.sides = len(calls), len(calls) - len(main)
    roots = sorted(each["turns"] for each in sessions if not each["parent"])
    children = sorted(each["turns"] for each in sessions if each["parent"])
    outcome.sessions, outcome.children, outcome.turns = len(roots), len(children), sum(roots)
    if tuple(roots) != tuple(sorted(program.turns)):
        outcome.faults.append(f"turns of the sessions: {roots} instead of {sorted(program.turns)}")
    if tuple(children) != tuple(sorted(program.children)):
        outcome.faults.append(f"turns of the subagents' sessions: {children} instead of {sorted(program.children)}")
    outcome.cuts = sum(each.is_shortened for each in main)
    failed = sum(each["failed_calls"] for each in stats.values())
    if failed:
        outcome.faults.append(f"{failed} failed calls in the statistics")
    if is_small and program.has_cuts and not outcome.cuts:
        outcome.faults.append("nothing was cut")
    _check_log(outcome, log)


def _check_wire(outcome: Outcome, program: Program, seen: Sequence[Seen]) -> None:
    for each in seen:
        if each.status == 400:
            outcome.refusals += 1
        if each.status != 200 and (each.target.partition("?")[0], each.status) not in program.asides:
            outcome.faults.append(f"step {each.step}: {each.method} {each.target}: {each.status} {each.reply[:300]!r}")
        if each.session and each.context != "built":
            outcome.faults.append(f"step {each.step}: {each.target}: context {each.context}")
        if b"<terse>" in each.reply:
            outcome.faults.append(f"step {each.step}: {each.target}: a tag was shown")


def _check_nothing_twice(
    outcome: Outcome, program: Program, name: str, calls: Sequence[Seen], stored: Sequence[Mapping[str, Any]]
) -> None:
    """Nothing is there more often than one history of the program had it, however often it was resent."""
    most: Counter[bytes] = Counter()
    for call in calls:
        most |= Counter(sent(call))
    shown = [each for each in stored if each["turn"] and each["client_visible"]]
    # The newest replies have not been sent again yet.
    most |= Counter({view(each): 1 for each in shown if each["role"] == "assistant"})
    again = Counter(view(each) for each in shown) - most
    again.pop(b"", None)
    if again.total() > program.moved:
        outcome.faults.append(f"{name}: {again.total()} messages stored twice: {list(again)[:2]}"[:600])


def _check_history(outcome: Outcome, name: str, last: Seen, stored: Sequence[Mapping[str, Any]]) -> None:
    """Check that the live messages are the last request and its reply."""
    live = [each for each in stored if each["turn"] and view(each)]
    expected, got = sent(last), [view(each) for each in live]
    if got[: len(expected)] == expected and all(each["role"] == "assistant" for each in live[len(expected) :]):
        return
    pairs = zip(got, expected, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
    outcome.faults.append(
        f"{name}: what is stored ({len(got)}) is not what was sent last ({len(expected)}); first at {place}: "
        f"{[each[:200] for each in (*got[place : place + 1], *expected[place : place + 1])]}"
    )


def sent(call: Seen) -> list[bytes]:
    """The history of a request as identities; instructions and injected context are no part of it."""
    messages = dialect_named(call.dialect).read_request(call.body).messages
    return [identity for message in messages if (identity := canonical(message))]


def view(stored: Mapping[str, Any]) -> bytes:
    """The identity of a stored message."""
    raw = json.dumps(stored["raw"]).encode()
    return canonical(DIALECTS[stored["dialect"]].read_message(raw))


def _check_log(outcome: Outcome, log: Path) -> None:
    for line in log.read_text(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") not in ("info", "debug"):
            outcome.faults.append(f"in the log: {line[:400]}")


async def _get(http: aiohttp.ClientSession, path: str, **query: str) -> Any:
    async with http.get(path, params=query) as response:
        response.raise_for_status()
        return await response.json()


async def _all(http: aiohttp.ClientSession, path: str, **query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    page = await _get(http, path, limit="100", **query)
    found += page["items"]
    while page["next"]:
        page = await _get(http, path, limit="100", after=str(page["next"]), **query)
        found += page["items"]
    return found
