"""Histories for the tests of strategies: placing messages in a session, loading snapshots, reading contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, HeadMessage, Snapshot, TerseEntry
from tersely.domain.history.turns import number_turns
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate, estimate_text
from tersely.strategies.epochs.policies import Policy, StartEpoch
from tersely.strategies.planning import build_context, decide, plan_epoch, with_retrieved_turns
from tersely.strategies.presets import Strategy
from tersely.strategies.summaries.activity_log import derive_missing
from tests.builders import assistant, call, result, user

START = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)


def place(*messages: Message, pinned: frozenset[int] = frozenset()) -> tuple[Entry, ...]:
    """Messages at their places in a session, a minute apart, counted by their characters."""
    turns = number_turns(messages)
    return tuple(
        Entry(
            seq=seq,
            turn=turn,
            message=message,
            tokens=estimate(len(message.raw)),
            created_at=START + timedelta(minutes=seq - 1),
            pinned=seq in pinned,
        )
        for seq, (turn, message) in enumerate(zip(turns, messages, strict=True), start=1)
    )


def chat(turns: int, *, size: int = 0) -> tuple[Entry, ...]:
    """``turns`` questions with their answers but for the last, each answer padded by ``size`` characters."""
    messages: list[Message] = []
    for turn in range(1, turns + 1):
        messages += [user(f"question {turn}"), assistant(f"answer {turn}. " + "x" * size)]
    return place(*messages[:-1])


def work(steps: int, *, size: int = 400, turn: str = "fix src/app.py") -> tuple[Entry, ...]:
    """One turn of ``steps`` tool calls, the last result being the last message."""
    messages: list[Message] = [user(turn)]
    for step in range(1, steps + 1):
        messages += [assistant(f"Step {step}.", call(f"c{step}", "read", {"path": f"src/file_{step}.py"}))]
        messages += [result(f"c{step}", f"content_{step} " + "y" * size)]
    return place(*messages)


def terse(*texts: str, first: int = 1) -> tuple[TerseEntry, ...]:
    """One entry per turn, two minutes apart, at the end of two-message turns."""
    return tuple(
        TerseEntry(
            turn=turn,
            seq=2 * turn,
            role="assistant",
            text=text,
            source="model",
            created_at=START + timedelta(minutes=2 * (turn - 1)),
        )
        for turn, text in enumerate(texts, start=first)
    )


def load(history: Sequence[Entry], epoch: Epoch | None, **values: Any) -> Snapshot:
    """The snapshot that a store would give: from the epoch's cut on, and what the epoch keeps."""
    cut = epoch.cut if epoch else 1
    kept = frozenset(epoch.kept) if epoch else frozenset()
    snapshot = Snapshot(
        entries=tuple(entry for entry in history if entry.seq >= cut),
        kept=tuple(entry for entry in history if entry.seq in kept),
        epoch=epoch,
        older_tokens=sum(entry.tokens for entry in history if entry.seq < cut),
    )
    return replace(snapshot, **values)


def call_model(
    snapshot: Snapshot,
    *,
    strategy: Strategy,
    policy: Policy,
    material: EpochInputs | None = None,
    now: datetime = START,
    overflow: bool = False,
    overflows: int = 1,
) -> Context:
    """Decide, plan if need be, and build: what the service does for one request."""
    decision = decide(snapshot, strategy=strategy, policy=policy, now=now, overflow=overflow)
    epoch = snapshot.epoch
    if isinstance(decision, StartEpoch):
        epoch = plan_epoch(
            snapshot,
            material or EpochInputs(),
            strategy=strategy,
            policy=policy,
            epoch_start=decision,
            now=now,
            encode=estimate_text,
            overflows=overflows,
        )
    assert epoch is not None
    whole = with_retrieved_turns(snapshot, material or EpochInputs(), epoch)
    return build_context(whole, epoch, strategy=strategy, encode=estimate_text)


def play_calls(
    batches: Sequence[list[Message]],
    strategy: Strategy,
    policy: Policy,
    snapshot_of: Callable[[tuple[Entry, ...], Epoch | None, int], Snapshot],
    *,
    has_log: bool = True,
) -> list[tuple[tuple[Entry, ...], Context]]:
    """A call after each batch: the history, and the context. ``snapshot_of`` is given the history, the epoch in force
    and the number of the call. ``has_log``: the turns before the running one have terse entries.
    """
    calls: list[tuple[tuple[Entry, ...], Context]] = []
    messages: list[Message] = []
    epoch: Epoch | None = None
    for number, batch in enumerate(batches):
        messages += batch
        history = place(*messages)
        past = [entry for entry in history if entry.turn < history[-1].turn]
        material = EpochInputs(terse=derive_missing(past, ())) if has_log else EpochInputs()
        snapshot = snapshot_of(history, epoch, number)
        context = call_model(snapshot, strategy=strategy, policy=policy, material=material)
        epoch = context.epoch
        calls.append((history, context))
    return calls


def clear(history: tuple[Entry, ...], before: Epoch, strategy: Strategy, policy: Policy) -> Epoch:
    """The epoch that a clearing starts behind the epoch ``before``."""
    return plan_epoch(
        load(history, before),
        EpochInputs(),
        strategy=strategy,
        policy=policy,
        epoch_start=StartEpoch(reason="clear"),
        now=START,
        encode=estimate_text,
    )


def shape(context: Context) -> list[str]:
    """One line per message of a context: head messages by layer, others by number and role."""
    return [
        f"{m.layer}/{m.role}" if isinstance(m, HeadMessage) else f"{m.seq} {m.message.role}" for m in context.messages
    ]


def rendered(context: Context) -> list[tuple[str, str, bytes]]:
    """The messages as they would go out, comparable byte for byte."""
    return [
        (m.role, m.text, b"") if isinstance(m, HeadMessage) else (m.message.role, repr(m.message.parts), m.message.raw)
        for m in context.messages
    ]


sizes = st.integers(0, 1_500)
words = st.builds(lambda n, w: f"{w} src/{w}_{n}.py " + "z" * n, sizes, st.sampled_from(["alpha", "beta", "gamma"]))


@st.composite
def exchanges(draw: st.DrawFn) -> list[Message]:
    """Return the messages between two model calls: the model's reply, then its results or the next user message."""
    calls = [
        call(f"{draw(st.integers(0, 9))}_{n}", "read", {"path": draw(words)[:40]})
        for n in range(draw(st.integers(0, 3)))
    ]
    reply = assistant(draw(words) if not calls or draw(st.booleans()) else None, *calls)
    answered = [result(c.id, draw(words)) for c in calls if draw(st.integers(0, 9))]
    question = [user(draw(words))] if not answered or draw(st.integers(0, 3)) == 0 else []
    return [reply, *answered, *question]


conversations = st.lists(exchanges(), min_size=1, max_size=14).map(lambda rest: [[user("the task")], *rest])
