"""Simulate the cost and the losses of cuts: the strategies run over recorded conversations, without a server.

    python -m bench.simulate [--repeats] [FILE.jsonl ...]

One model call per assistant message. A request is ``[fixed part][head][kept][tail]``; tokens are characters / 4.
Prices are relative to sending the whole history with a perfect prefix cache: an unchanged prefix costs the read
price, all the rest the write price. **Lost references**: of the tool calls whose arguments repeat an identifier seen
earlier in the conversation, the share where at least one such identifier is in no part of the request. An upper
bound on harm: the model may not need it, or may search. **Pointed at**: the same, of values of at most 200 characters
only (a path to open, an id to look up), without the members and methods that occur in the source code of a file that
is written. **Edit readiness**: of the calls that replace a text, the share whose text stands in the request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from tersely.dialects.openai_chat.read import read_message
from tersely.domain.history.context import ContextMessage
from tersely.domain.history.context_use import edits_of, identifiers, judge_edits, readable_text, short_values
from tersely.domain.history.history import Entry, Epoch, EpochInputs, Snapshot, TerseEntry
from tersely.domain.history.turns import group_turns, number_turns
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate, estimate_text
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy, StartEpoch
from tersely.strategies.planning import build_context, decide, plan_epoch
from tersely.strategies.presets import Full, Slim, Strategy
from tersely.strategies.summaries.activity_log import derive_terse

TRANSCRIPTS = Path(__file__).resolve().parents[2] / "shared" / "data" / "transcripts"
# Instructions and tools, which the recordings leave out or only partly hold, in tokens.
FIXED = {"pi_sessions": 12_000, "claude_code_sessions": 15_000}
FIXED_DEFAULT = 2_000
PRICES = ((1.25, 0.1), (1.0, 0.5))
MEMORY = 300


@dataclass
class SimulationTotals:
    """Sums over the calls of one or more conversations under one strategy."""

    calls: int = 0
    tokens: int = 0
    full_tokens: int = 0
    price: list[float] = field(default_factory=lambda: [0.0] * len(PRICES))
    full_price: list[float] = field(default_factory=lambda: [0.0] * len(PRICES))
    referring: int = 0
    lost: int = 0
    pointing: int = 0
    lost_pointing: int = 0
    edits: int = 0
    ready: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0

    def add(self, other: SimulationTotals) -> None:
        for name in (
            "calls",
            "tokens",
            "full_tokens",
            "referring",
            "lost",
            "pointing",
            "lost_pointing",
            "edits",
            "ready",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.price = [a + b for a, b in zip(self.price, other.price, strict=True)]
        self.full_price = [a + b for a, b in zip(self.full_price, other.full_price, strict=True)]
        for reason, count in other.epochs.items():
            self.epochs[reason] = self.epochs.get(reason, 0) + count
        self.slowest = max(self.slowest, other.slowest)


@dataclass(frozen=True)
class RecordedHistory:
    """A recording as the store would hold it."""

    name: str
    entries: tuple[Entry, ...]
    instructions: str
    fixed: int


def load(path: Path) -> Iterator[RecordedHistory]:
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        yield _as_conversation(record["id"], record["messages"], FIXED.get(path.stem, FIXED_DEFAULT))


def _as_conversation(name: str, wire: Sequence[dict[str, Any]], fixed: int) -> RecordedHistory:
    messages = []
    at = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)
    times = []
    for given in wire:
        at = _time_of(given, at)
        times.append(at)
        bare = {key: value for key, value in given.items() if not key.startswith("x_")}
        messages.append(read_message(json.dumps(bare, ensure_ascii=False).encode()))
    turns = number_turns(messages)
    entries = [
        Entry(seq=seq, turn=turn, message=message, tokens=estimate(len(message.raw)), created_at=when)
        for seq, (message, turn, when) in enumerate(zip(messages, turns, times, strict=True), start=1)
    ]
    instructions = "\n".join(message.text for message in messages if message.is_instruction)
    return RecordedHistory(
        name=name,
        entries=tuple(entry for entry in entries if not entry.message.is_instruction),
        instructions=instructions,
        fixed=fixed + estimate(len(instructions)),
    )


def _time_of(given: dict[str, Any], last: datetime) -> datetime:
    """The recorded time; without one, ten seconds after the message before."""
    stamp = given.get("x_ts")
    if isinstance(stamp, str):
        return max(last, datetime.fromisoformat(stamp))
    return last + timedelta(seconds=10)


def simulate(
    conversation: RecordedHistory, strategy: Strategy, policy: Policy, *, warm: bool = True, repeats: bool = False
) -> SimulationTotals:
    """Play the conversation. ``warm`` leaves the clock still, so that no cache ever goes cold; ``repeats`` replaces
    repeated text by references.
    """
    tally = SimulationTotals()
    epoch: Epoch | None = None
    last_call: datetime | None = None
    sent: list[tuple[bytes, int]] = []
    full_before = 0
    terse = _terse_log(conversation.entries)
    older = dict(zip((e.seq for e in conversation.entries), _running(conversation.entries), strict=True))
    for place, entry in enumerate(conversation.entries):
        if entry.message.role != "assistant" or place == 0:
            continue
        history = conversation.entries[:place]
        now = history[0].created_at if warm else history[-1].created_at
        snapshot = _snapshot(history, epoch, conversation.fixed, tally.calls, last_call, older)
        snapshot = replace(snapshot, folds_repeats=repeats)
        started = perf_counter()
        decision = decide(snapshot, strategy=strategy, policy=policy, now=now)
        if isinstance(decision, StartEpoch) or epoch is None:
            assert isinstance(decision, StartEpoch)
            material = EpochInputs(terse=tuple(t for t in terse if t.seq < entry.seq and t.turn < entry.turn)[-MEMORY:])
            epoch = plan_epoch(
                snapshot,
                material,
                strategy=strategy,
                policy=policy,
                epoch_start=decision,
                now=now,
                encode=estimate_text,
            )
            tally.epochs[decision.reason] = tally.epochs.get(decision.reason, 0) + 1
        context = build_context(snapshot, epoch, strategy=strategy, encode=estimate_text)
        tally.slowest = max(tally.slowest, perf_counter() - started)
        rendered = [_render(message) for message in context.messages]
        full = conversation.fixed + sum(e.tokens for e in history)
        _charge(tally, rendered, sent, conversation.fixed, full, full_before)
        _count_lost(tally, entry.message, history, rendered, conversation.instructions)
        _count_edits(tally, entry.message, context.messages)
        sent, full_before, last_call = rendered, full, now
    return tally


def _snapshot(
    history: tuple[Entry, ...],
    epoch: Epoch | None,
    fixed: int,
    calls: int,
    last_call: datetime | None,
    older: dict[int, int],
) -> Snapshot:
    cut = epoch.cut if epoch else 1
    entries = tuple(e for e in history if e.seq >= cut)
    return Snapshot(
        entries=entries,
        kept=tuple(e for e in history if e.seq in epoch.kept) if epoch else (),
        epoch=epoch,
        fixed_tokens=fixed,
        calls=calls,
        last_call_at=last_call,
        older_tokens=older[entries[0].seq] if entries else 0,
    )


def _running(entries: Iterable[Entry]) -> Iterator[int]:
    total = 0
    for entry in entries:
        yield total
        total += entry.tokens


def _terse_log(entries: Sequence[Entry]) -> list[TerseEntry]:
    """Return the terse log that the service would have stored at the end of each turn, if no reply has a tag."""
    return [derive_terse(turn.entries) for turn in group_turns(entries)]


def _render(message: ContextMessage) -> tuple[bytes, int]:
    if isinstance(message, Entry):
        raw = b"" if message.is_shortened else message.message.raw
        return raw or readable_text(message.message).encode("utf-8", "replace"), message.tokens
    return message.text.encode(), message.tokens


def _charge(
    tally: SimulationTotals,
    rendered: list[tuple[bytes, int]],
    before: list[tuple[bytes, int]],
    fixed: int,
    full: int,
    full_before: int,
) -> None:
    same = 0
    for now, then in zip(rendered, before, strict=False):
        if now != then:
            break
        same += now[1]
    total = fixed + sum(tokens for _, tokens in rendered)
    cached = fixed + same if tally.calls else 0
    for index, (write, read) in enumerate(PRICES):
        tally.price[index] += read * cached + write * (total - cached)
        tally.full_price[index] += read * full_before + write * (full - full_before)
    tally.calls += 1
    tally.tokens += total
    tally.full_tokens += full


def _count_lost(
    tally: SimulationTotals,
    reply: Message,
    history: Sequence[Entry],
    rendered: Sequence[tuple[bytes, int]],
    instructions: str,
) -> None:
    if not reply.calls:
        return
    visible = "\n".join([instructions, *(raw.decode("utf-8", "replace") for raw, _ in rendered)])
    past = "\n".join(e.message.raw.decode("utf-8", "replace") for e in history)
    for call in reply.calls:
        known = [name for name in identifiers(call.arguments) if name in past]
        tally.referring += bool(known)
        tally.lost += any(name not in visible for name in known)
        pointed = [name for name in known if name in short_values(call.arguments)]
        tally.pointing += bool(pointed)
        tally.lost_pointing += any(name not in visible for name in pointed)


def _count_edits(tally: SimulationTotals, reply: Message, context: Sequence[ContextMessage]) -> None:
    if not (wanted := edits_of(reply)):
        return
    texts = [readable_text(each.message) if isinstance(each, Entry) else each.text for each in context]
    edits = judge_edits(wanted, texts)
    tally.edits += edits.calls
    tally.ready += edits.ready


VARIANTS: tuple[tuple[str, Strategy, Policy], ...] = (
    ("full", Full(), Auto()),
    ("slim auto", Slim(), Auto()),
    ("slim auto, no index", Slim(references=0), Auto()),
    ("slim every_request", Slim(), EveryRequest()),
)


COLUMNS = (
    "file",
    "strategy",
    "calls",
    "price 1.25/0.1",
    "worst conversation",
    "price 1/0.5",
    "tokens sent",
    "lost references",
    "lost, pointed at",
    "edit readiness",
    "epochs",
)


def write_table(
    paths: Sequence[Path], variants: Sequence[tuple[str, Strategy, Policy]] = VARIANTS, *, repeats: bool = False
) -> str:
    rows = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for path in paths:
        conversations = list(load(path))
        for name, strategy, policy in variants:
            total = SimulationTotals()
            worst = 0.0
            for conversation in conversations:
                tally = simulate(conversation, strategy, policy, repeats=repeats)
                total.add(tally)
                worst = max(worst, tally.price[0] / tally.full_price[0] if tally.full_price[0] else 0.0)
            rows.append(_row(path.stem, name, total, worst))
    return "\n".join(rows)


def _row(stem: str, name: str, tally: SimulationTotals, worst: float) -> str:
    first, second = (a / b if b else 1.0 for a, b in zip(tally.price, tally.full_price, strict=True))
    share = tally.tokens / tally.full_tokens if tally.full_tokens else 1.0
    lost = _share(tally.lost, tally.referring)
    pointed = _share(tally.lost_pointing, tally.pointing)
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.epochs.items()))
    cells = [
        stem,
        name,
        f"{tally.calls}",
        f"{first:.3f}",
        f"{worst:.3f}",
        f"{second:.3f}",
        f"{share:.2f}",
        lost,
        pointed,
        f"{tally.ready / tally.edits:.3f} of {tally.edits}" if tally.edits else "none",
        reasons,
    ]
    return f"| {' | '.join(cells)} |"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} % of {whole}" if whole else "none"


def main(arguments: Sequence[str]) -> int:
    repeats = "--repeats" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--repeats"] or sorted(TRANSCRIPTS.glob("*.jsonl"))
    if not paths:
        print(f"skipped: no transcripts in {TRANSCRIPTS}")
        return 0
    print(write_table(paths, repeats=repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
