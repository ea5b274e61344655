"""Attempts to break the strategies: nasty histories, tiny windows, refusals in a row, epochs without end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.errors import ContextTooLarge
from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, HeadMessage, Summary
from tersely.domain.history.pairing import prove_pairing
from tersely.domain.history.tiers import ReadBack
from tersely.domain.messages import Message, ToolResult
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy, Stride, content_tokens
from tersely.strategies.planning import with_tiers_applied
from tersely.strategies.prefetch import after_cut, upcoming_summaries
from tersely.strategies.presets import Compact, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.summaries.activity_log import derive_missing
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, load, place, rendered

SMALL = Auto(high=2_000, low=800)
# Reasons that are a strategy's own choice: nothing but the history's size asks for them.
CHOSEN = {"high_watermark", "turns", "messages", "stride", "break_even", "cold_cache"}
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
texts = st.one_of(
    st.sampled_from(["", " ", "ok", "continue", "Error: no such file src/a.py", "\ud800 lone", "e\u0301" * 9]),
    st.builds(lambda n: f"src/long_{n}.py " + "z" * n, st.sampled_from([30, 400, 1_500, 9_000])),
)
numbers = st.sampled_from(["0", "1", "2"])


def several(*ids: str, text: str) -> Message:
    """Results of several calls in one message, as some dialects have them."""
    return Message(role="user", parts=tuple(ToolResult(call_id=each, text=text) for each in ids), raw=b"x" * len(text))


@st.composite
def nasty(draw: st.DrawFn) -> list[Message]:
    """One batch: calls and results, late, doubled, missing or of no call; questions in a row; empty texts."""
    messages: list[Message] = []
    for _ in range(draw(st.integers(0, 3))):
        ids = draw(st.lists(numbers, max_size=3))
        match draw(st.integers(0, 4)):
            case 0:
                messages.append(assistant(draw(texts) or None, *(call(each, "read", {"path": "a.py"}) for each in ids)))
            case 1:
                messages += [result(each, draw(texts)) for each in ids]
            case 2:
                messages.append(several(*ids, text=draw(texts)) if ids else assistant(None))
            case 3:
                messages.append(assistant(draw(texts)))
            case _:
                messages.append(user(draw(texts)))
    return [*messages, user(draw(texts))] if draw(st.booleans()) else messages


histories = st.lists(nasty(), min_size=1, max_size=14).map(lambda rest: [[user("the task")], *rest])
policies = st.sampled_from([SMALL, Auto(high=1_000, low=500), Stride(stride=1), EveryRequest()])
strategies = st.one_of(
    st.builds(Slim, recent_turns=st.integers(1, 4)),
    st.builds(Window, context_size=st.integers(0, 3), recent_results=st.integers(0, 2), older_chars=st.just(100)),
    st.builds(
        Trim,
        max_context_tokens=st.sampled_from([1_000, 3_000]),
        max_context_turns=st.integers(1, 6),
        max_result_chars=st.just(100),
        max_steps=st.integers(1, 3),
    ),
    st.builds(
        Compact,
        max_tokens=st.sampled_from([0, 1_000, 3_000]),
        max_messages=st.integers(2, 12),
        keep_recent=st.integers(1, 6),
        keep_recent_tokens=st.sampled_from([0, 300, 20_000]),
        tool_call_cutoff=st.integers(1, 4),
        tool_summary_strategy=st.sampled_from(["llm", "heuristic", "off"]),
        max_lines=st.just(3),
    ),
    st.builds(
        Tiered,
        working_budget=st.sampled_from([500, 8_000]),
        total_budget=st.sampled_from([1_000, 3_000]),
        session_budget=st.integers(0, 400),
        working_age=st.integers(0, 600),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call of a session that is played: the history, what its epoch so far would have sent, and the context."""

    history: tuple[Entry, ...]
    before: int
    messages_before: int
    context: Context

    @property
    def size(self) -> int:
        """Tokens of head, kept and tail, without what only this one call is told."""
        return sum(m.tokens for m in self.context.messages if not _is_closing(m))


def _is_closing(message: object) -> bool:
    return isinstance(message, HeadMessage) and message.layer == "max_steps"


@dataclass
class Player:
    """A session as the service plays it: an epoch that is kept, summaries that are made behind each call."""

    strategy: Strategy
    policy: Policy
    window: int | None = None
    fixed_tokens: int = 0
    epoch: Epoch | None = None
    summaries: tuple[Summary, ...] = ()
    calls: int = 0
    summary_words: int = 20
    way: ReadBack = ""

    def call(self, history: tuple[Entry, ...], *, edited: bool = False, overflows: int = 0) -> Step:
        circumstances = {"window": self.window, "fixed_tokens": self.fixed_tokens, "calls": self.calls}
        snapshot = load(history, self.epoch, edited=edited, read_back=self.way, **circumstances)
        before = content_tokens(with_tiers_applied(snapshot))
        last = history[-1]
        terse = derive_missing([e for e in history if e.turn < last.turn], ())
        material = EpochInputs(terse=terse, summaries=self.summaries[-16:])
        contexts = [
            call_model(
                snapshot,
                strategy=self.strategy,
                policy=self.policy,
                material=material,
                now=last.created_at,
                overflow=refusals > 0,
                overflows=refusals,
            )
            for refusals in range(overflows + 1)
        ]
        context = contexts[-1]
        is_new = self.epoch is None or context.epoch.number != self.epoch.number
        needs = (
            after_cut(self.strategy, snapshot, context.epoch) if is_new else upcoming_summaries(self.strategy, snapshot)
        )
        known = {(s.purpose, s.first_seq, s.last_seq) for s in self.summaries}
        self.summaries += tuple(
            Summary(
                first_seq=each.first_seq,
                last_seq=each.last_seq,
                purpose=each.purpose,
                text=f"S{each.first_seq}-{each.last_seq} " + "word " * self.summary_words,
                tokens=self.summary_words + 5,
                source="model",
                created_at=last.created_at,
            )
            for each in needs
            if (each.purpose, each.first_seq, each.last_seq) not in known
        )
        self.epoch = context.epoch
        self.calls += 1
        messages = len({e.seq for e in (*snapshot.kept, *snapshot.entries)})
        return Step(history=history, before=before, messages_before=messages, context=context)


def play(
    batches: Sequence[list[Message]],
    player: Player,
    *,
    pinned: frozenset[int] = frozenset(),
    cut_back: frozenset[int] = frozenset(),
    overflows: frozenset[int] = frozenset(),
) -> list[Step]:
    """A call after each batch; at ``cut_back`` the client goes on from the middle, ``overflows`` are refused twice."""
    messages: list[Message] = []
    live: list[int] = []
    steps = []
    for number, batch in enumerate(batches):
        is_edit = number in cut_back and len(live) > 1
        more = [user("rather this"), *batch] if is_edit else batch
        live = [*(live[: len(live) // 2] if is_edit else live), *range(len(messages), len(messages) + len(more))]
        messages += more
        everything = place(*messages, pinned=pinned)
        history = tuple(everything[index] for index in live)
        steps.append(player.call(history, edited=is_edit, overflows=2 if number in overflows else 0))
    return steps


def body(context: Context) -> list[Entry]:
    return [m for m in context.messages if isinstance(m, Entry)]


@quick
@given(
    histories,
    strategies,
    policies,
    st.frozensets(st.integers(1, 30), max_size=4),
    st.frozensets(st.integers(1, 14), max_size=2),
    st.frozensets(st.integers(0, 14), max_size=2),
)
def test_contexts_of_nasty_histories_are_valid_and_keep_the_task(
    batches: list[list[Message]],
    strategy: Strategy,
    policy: Policy,
    pinned: frozenset[int],
    cut_back: frozenset[int],
    overflows: frozenset[int],
) -> None:
    player = Player(strategy, policy)
    for step in play(batches, player, pinned=pinned, cut_back=cut_back, overflows=overflows):
        prove_pairing([entry.message for entry in body(step.context)])
        task = next(e.seq for e in reversed(step.history) if e.message.starts_turn)
        assert task in [entry.seq for entry in body(step.context)]


@quick
@given(histories, strategies, policies, st.frozensets(st.integers(1, 30), max_size=4))
def test_within_an_epoch_nothing_that_was_sent_changes(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, pinned: frozenset[int]
) -> None:
    for first, second in pairwise(play(batches, Player(strategy, policy), pinned=pinned)):
        if first.context.epoch.number == second.context.epoch.number and not first.context.repairs:
            both = zip(rendered(first.context), first.context.messages, strict=True)
            sent = [wire for wire, message in both if not _is_closing(message)]
            assert rendered(second.context)[: len(sent)] == sent


@quick
@given(histories, strategies, policies, st.frozensets(st.integers(1, 30), max_size=4), st.integers(100, 4_000))
def test_no_context_exceeds_a_tiny_window(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, pinned: frozenset[int], window: int
) -> None:
    player = Player(strategy, policy, window=window)
    try:
        steps = play(batches, player, pinned=pinned)
    except ContextTooLarge as refused:
        assert refused.budget == window < refused.needed  # noqa: PT017 -- either outcome is right
        return
    assert all(step.context.report.tokens_after <= window for step in steps)


@quick
@given(
    histories,
    strategies,
    policies.filter(lambda each: isinstance(each, Auto)),
    st.frozensets(st.integers(1, 30), max_size=4),
)
def test_an_epoch_that_is_chosen_makes_the_context_smaller(
    batches: list[list[Message]], strategy: Strategy, policy: Policy, pinned: frozenset[int]
) -> None:
    epoch = 0
    for step in play(batches, Player(strategy, policy), pinned=pinned):
        started = step.context.epoch
        if started.number != epoch and started.reason in CHOSEN and not step.context.repairs:
            if started.reason in {"turns", "messages"}:
                assert len(body(step.context)) < step.messages_before
            else:
                assert step.size < step.before, started.reason
        epoch = started.number


def chatting(turn: int) -> list[Message]:
    return [
        assistant(f"reply {turn} in src/mod_{turn}.py " + "w" * 300),
        user(f"next: lib/part_{turn}.py " + "q" * 100),
    ]


def working(step: int) -> list[Message]:
    return [assistant(None, call(f"c{step}", "read", {"path": f"src/f_{step}.py"})), result(f"c{step}", "r" * 700)]


def parallel(step: int) -> list[Message]:
    ids = [f"c{step}_{n}" for n in range(6)]
    return [assistant(None, *(call(each, "read") for each in ids)), *(result(each, "r" * 60) for each in ids)]


ALL = [
    Slim(),
    Window(),
    Window(context_size=0),
    Trim(max_context_tokens=3_000),
    Trim(max_context_turns=6),
    Trim(max_context_tokens=3_000, max_context_turns=8, max_steps=2),
    Compact(max_tokens=3_000),
    Compact(max_tokens=3_000, tool_summary_strategy="heuristic", tool_call_cutoff=1),
    Compact(max_tokens=0),
    Compact(max_tokens=0, max_messages=4, keep_recent_tokens=0),
    Compact(max_tokens=0, max_messages=20, keep_recent_tokens=0),
    Compact(auto_compact=False),
    Tiered(total_budget=4_000, session_budget=1_000),
    Tiered(total_budget=2_000, session_budget=4_000, working_age=0),
]


@pytest.mark.parametrize("more", [chatting, working, parallel])
@pytest.mark.parametrize("policy", [Auto(high=3_000, low=1_200), Stride(stride=4)])
@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_long_session_has_few_epochs_and_nothing_grows(
    strategy: Strategy, policy: Policy, more: Callable[[int], list[Message]]
) -> None:
    player = Player(strategy, policy, summary_words=60)
    steps = play([[user("the task")], *(more(number) for number in range(60))], player)
    numbers = [step.context.epoch.number for step in steps]
    starts = sum(one != other for one, other in pairwise(numbers))
    heads = [step.context.epoch.head_tokens for step in steps]
    # Each layer has a quarter of the low watermark, at most 2,000 tokens; session memory has a budget of its own.
    memory = strategy.session_budget if isinstance(strategy, Tiered) else 0
    low = policy.low if isinstance(policy, Auto) else 8_000
    assert starts <= len(steps) / 2
    assert max(heads) <= memory + 3 * low / 4
    if isinstance(strategy, Tiered):  # volatile memory fills what room there is, and no more
        assert max(step.size for step in steps) <= max(strategy.total_budget, low)
    else:
        assert max(len(step.context.epoch.kept) for step in steps) <= 3


def test_one_turn_at_most_is_the_running_one() -> None:
    player = Player(Trim(max_context_turns=1), SMALL)
    steps = play([[user("the task")], *(chatting(number) for number in range(4))], player)
    assert [len(body(step.context)) for step in steps] == [1, 1, 1, 1, 1]


def test_pinned_turns_do_not_ask_for_an_epoch_at_every_call() -> None:
    batches = [[user("the task")], *(chatting(n) for n in range(12)), *(working(n) for n in range(4))]
    steps = play(batches, Player(Trim(max_context_turns=3), Auto()), pinned=frozenset(range(1, 13)))
    assert len({step.context.epoch.number for step in steps[-5:]}) == 1


def test_a_split_that_would_take_nothing_is_no_reason_for_an_epoch() -> None:
    batches = [[user("the task")], *(chatting(number) for number in range(40))]
    steps = play(batches, Player(Compact(max_tokens=0), Auto()))
    assert {step.context.epoch.number for step in steps} == {1}


def test_summaries_are_never_repeated_over_epochs() -> None:
    player = Player(Trim(max_context_turns=4), EveryRequest(), summary_words=3)
    for step in play([[user("the task")], *(chatting(number) for number in range(80))], player):
        (text,) = [prefix.text for prefix in step.context.epoch.prefixes] or [""]
        lines = [line for line in text.splitlines() if line.startswith("S")]
        assert len(lines) == len(set(lines))
    assert len(player.summaries) > 16


def test_turns_without_a_summary_are_listed_until_there_is_one() -> None:
    """A summary made ahead covers less than what is cut; what it leaves out must not go with the next plan."""
    strategy = Compact(max_tokens=1_000, keep_recent_tokens=0)
    history = place(
        *(m for n in range(20) for m in (user(f"ask {n}"), assistant(f"decided: use lib_{n} " + "w" * 300)))
    )
    ahead = Summary(
        first_seq=1, last_seq=20, purpose="checkpoint", text="AHEAD", tokens=5, source="model", created_at=START
    )
    material = EpochInputs(summaries=(ahead,))
    first = call_model(load(history[:-1], None), strategy=strategy, policy=EveryRequest(), material=material)
    second = call_model(load(history, first.epoch), strategy=strategy, policy=EveryRequest(), material=material)
    for context in (first, second):
        head = context.epoch.head[0].text
        assert head.count("AHEAD") == 1
        assert "lib_13" in head
    # Once a summary covers it, the extract of it goes: it is told by that alone.
    cut = second.epoch.cut
    whole = replace(ahead, last_seq=cut - 1, text="ALL OF IT")
    third = call_model(
        load(history, second.epoch), strategy=strategy, policy=EveryRequest(), material=EpochInputs(summaries=(whole,))
    )
    assert third.epoch.cut == cut
    assert third.epoch.head[0].text == "[Previous conversation summary]\n\nALL OF IT"


@pytest.mark.parametrize("strategy", [Compact(), Trim(max_context_tokens=8_000)], ids=["compact", "trim"])
def test_instructions_over_the_limit_do_not_ask_for_an_epoch_at_every_call(strategy: Strategy) -> None:
    player = Player(strategy, Auto(), fixed_tokens=15_000)
    steps = play([[user("the task")], *(working(number) for number in range(60))], player)
    assert len({step.context.epoch.number for step in steps}) <= 15
