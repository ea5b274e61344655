"""No later context tells of messages that left a history, in whatever form an epoch took them over; pinned ones stay.

Each message has a name of its own, which summaries, logs and indexes quote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import example, given
from hypothesis import strategies as st

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, HeadMessage, Snapshot, Summary
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy, StartEpoch, Stride
from tersely.strategies.planning import build_context, decide, first_seq_needed, plan_epoch
from tersely.strategies.prefetch import after_cut, upcoming_summaries
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.summaries.activity_log import derive_missing
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, place

NAME = re.compile(r"mark_\d+_x")
strategies = st.sampled_from(
    [
        Full(),
        Slim(recent_turns=1),
        Window(context_size=1),
        Trim(max_context_turns=2),
        Trim(max_context_tokens=1_000),
        Compact(max_tokens=1_000, keep_recent_tokens=300, tool_call_cutoff=1),
        Compact(max_tokens=0, max_messages=6, keep_recent_tokens=0, keep_recent=2, tool_summary_strategy="heuristic"),
        Tiered(total_budget=1_000, working_budget=500, working_age=0),
    ]
)
policies: st.SearchStrategy[Policy] = st.sampled_from([Auto(high=1_000, low=500), EveryRequest(), Stride(stride=1)])
acts = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["say", "work", "undo", "again", "return", "compact", "clear"]), st.just(0)),
        st.tuples(st.sampled_from(["drop", "back", "pin", "compact", "clear"]), st.integers(1, 9)),
    ),
    max_size=14,
)


@dataclass
class Session:
    """A session as it is stored and sent; summaries count while what they were made of is what is live."""

    strategy: Strategy
    policy: Policy
    messages: list[Message] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    left: list[set[int]] = field(default_factory=list)
    epoch: Epoch | None = None
    edited: bool = False
    summaries: list[tuple[Summary, frozenset[int]]] = field(default_factory=list)

    @property
    def live(self) -> tuple[Entry, ...]:
        entries = place(*self.messages, pinned=frozenset(self.pinned))
        return tuple(entry for entry in entries if entry.seq not in self.gone)

    def name(self) -> str:
        return f"mark_{len(self.messages) + 1}_x"

    def say(self, *, works: bool) -> None:
        """A question; with a call and its result behind it."""
        self.messages.append(user(f"please see to {self.name()} " + "q" * 100))
        if works:
            self.messages.append(assistant(f"looks at {self.name()}", call(f"c{len(self.messages)}", "read")))
            self.messages.append(result(self.messages[-1].calls[0].id, f"{self.name()} " + "y" * 300))

    def reply(self) -> None:
        self.messages.append(assistant(f"Decided for {self.name()}. " + "w" * 200))

    def change(self, seqs: Iterable[int], *, edits: bool = True) -> None:
        """These messages leave the history, or come back to it."""
        changed = set(seqs)
        self.gone ^= changed
        left, back = changed & self.gone, changed - self.gone
        self.epoch = self.epoch.without_messages(left, back, back & self.pinned) if self.epoch else None
        self.edited |= edits

    def act(self, act: str, number: int) -> None:
        """The session always ends with a reply before it, and with a question behind it."""
        live = self.live
        turns = sorted({entry.turn for entry in live})
        match act:
            case "drop" if number in turns[:-1]:
                self.change(entry.seq for entry in live if entry.turn == number)
            case "undo" if len(turns) > 1:
                self.change(entry.seq for entry in live if entry.turn == turns[-1])
            case "again":
                self.change([live[-1].seq], edits=False)
                return
            case "back" if number in turns[:-1]:
                left = {entry.seq for entry in live if entry.turn > number}
                self.left.append(left)
                self.change(left)
            case "return" if self.left:
                back = self.left.pop()
                newer = {entry.seq for entry in live if entry.seq > max(back)}
                self.change(newer | (back & self.gone))
            case "pin":
                seqs = [entry.seq for entry in live if entry.message.role == "user"][-number:]
                if seqs and (self.epoch is None or seqs[0] >= self.epoch.cut):
                    self.pinned.add(seqs[0])
                    self.edited = True
            case "compact" | "clear":
                self.call(StartEpoch(reason=act))
                if number:
                    self.act("again", 0)
                    return
            case _:
                pass
        self.say(works=act == "work")

    def call(self, requested: StartEpoch | None = None) -> Context:
        live = self.live
        reach = first_seq_needed(self.epoch, strategy=self.strategy, policy=self.policy)
        kept = set(self.epoch.kept) if self.epoch else set()
        snapshot = Snapshot(
            entries=tuple(entry for entry in live if entry.seq >= reach),
            kept=tuple(entry for entry in live if entry.seq in kept and entry.seq < reach),
            epoch=self.epoch,
            older_tokens=sum(entry.tokens for entry in live if entry.seq < reach),
            edited=self.edited or bool(self.epoch and self.epoch.is_stale),
        )
        decision = requested or decide(snapshot, strategy=self.strategy, policy=self.policy, now=START)
        made = tuple(summary for summary, basis in self.summaries if basis == self.basis(summary))
        # The state came with the newest reply.
        reply = next((entry for entry in reversed(live) if entry.message.role == "assistant"), None)
        material = EpochInputs(
            terse=derive_missing([entry for entry in live if entry.turn < live[-1].turn], ()),
            summaries=made,
            state=" ".join(NAME.findall(reply.message.text)) if reply else "",
            state_seq=reply.seq if reply else 0,
        )
        before = self.epoch
        if isinstance(decision, StartEpoch):
            self.epoch = plan_epoch(
                snapshot,
                material,
                strategy=self.strategy,
                policy=self.policy,
                epoch_start=decision,
                now=START,
                encode=estimate_text,
            )
            self.edited = False
        assert self.epoch is not None
        context = build_context(snapshot, self.epoch, strategy=self.strategy, encode=estimate_text)
        is_new = self.epoch is not before
        asked_for = (
            after_cut(self.strategy, snapshot, self.epoch, made)
            if is_new
            else upcoming_summaries(self.strategy, snapshot)
        )
        for each in asked_for:
            names = [name for e in live if each.first_seq <= e.seq <= each.last_seq for name in names_in(e.message)]
            text = f"S{each.first_seq} {' '.join(names)}"
            summary = Summary(
                first_seq=each.first_seq,
                last_seq=each.last_seq,
                purpose=each.purpose,
                text=text,
                tokens=estimate_text(text),
                source="model",
                created_at=START,
            )
            self.summaries.append((summary, self.basis(summary)))
        return context

    def basis(self, summary: Summary) -> frozenset[int]:
        return frozenset(seq for seq in self.gone if summary.first_seq <= seq <= summary.last_seq)


def names_in(message: Message) -> list[str]:
    return NAME.findall("\n".join([message.text, *(result.text for result in message.results)]))


def sent(context: Context) -> set[str]:
    names: set[str] = set()
    for message in context.messages:
        if isinstance(message, HeadMessage):
            names.update(NAME.findall(message.text))
        else:
            names.update([*names_in(message.message), *NAME.findall(message.prefix)])
    return names


@given(acts, strategies, policies)
@example([("compact", 1)], Window(context_size=1), Auto(high=1_000, low=500))
@example([("pin", 1), ("clear", 0), ("say", 0)], Full(), Auto(high=1_000, low=500))
def test_messages_that_left_the_history_are_mentioned_no_more(
    steps: list[tuple[str, int]], strategy: Strategy, policy: Policy
) -> None:
    session = Session(strategy, policy, messages=[user("the task mark_1_x")])
    session.call()
    session.reply()
    for number, (act, what) in enumerate([*[("say", 0), ("work", 0)] * 3, *steps]):
        session.act(act, what)
        context = session.call()
        live = {name for entry in session.live for name in names_in(entry.message)}
        assert sent(context) <= live, (number, act)
        shown = {entry.seq for entry in context.messages if isinstance(entry, Entry)}
        assert session.pinned - session.gone <= shown, (number, act)
        session.reply()
