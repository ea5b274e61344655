"""Placeholders point at messages that are there: over nasty histories, no number dangles."""

from __future__ import annotations

import re

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, HeadMessage
from tersely.domain.history.tiers import ReadBack
from tersely.domain.messages import Message
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy
from tersely.strategies.presets import Compact, Strategy
from tests.builders import assistant, call, result, user
from tests.strategies.test_endurance import (
    Player,
    Step,
    histories,
    play,
    policies,
    quick,
    several,
    strategies,
    working,
)

LINE = re.compile(r"\[Tool result archived; its summary is #(\d+)\.")
ITEM = re.compile(r"^#(\d+): ", re.MULTILINE)
QUERY = re.compile(r"query_db\(sql=\"SELECT content FROM messages WHERE id=(\d+)\"\)")
TURN = re.compile(r"context_search\(mode=\"turn\", turnId=\"t(\d+)\"\)")
ways = st.sampled_from(
    ["", "query_db", "context_search", "read_artifact", "read_artifact, query_db", "read_artifact, context_search"]
)


def archived(context: Context) -> list[int]:
    """The numbers that lines in place of results name, with the message that each stands in."""
    found = []
    for entry in (message for message in context.messages if isinstance(message, Entry)):
        for part in entry.message.results:
            for number in LINE.findall(part.text):
                assert int(number) == entry.seq
                found.append(entry.seq)
    return sorted(set(found))


def listed(context: Context) -> list[int]:
    """The numbers of the digest's items."""
    digests = [m.text for m in context.messages if isinstance(m, HeadMessage) and m.layer == "tool_summary"]
    assert len(digests) <= 1
    return [int(number) for text in digests for number in ITEM.findall(text)]


def dangling(step: Step, way: ReadBack) -> list[str]:
    """Return what a context names that is not there: numbers of the digest without lines, tools that the model has not,
    and numbers in calls to tools that are not stored.
    """
    text = "\n".join(
        m.text if isinstance(m, HeadMessage) else "\n".join(part.text for part in m.message.results) + m.message.text
        for m in step.context.messages
    )
    seqs, turns = ({getattr(entry, name) for entry in step.history} for name in ("seq", "turn"))
    return [
        *(["digest"] if archived(step.context) != listed(step.context) else []),
        *(tool for tool in ("query_db", "context_search", "read_artifact") if tool in text and tool not in way),
        *(f"message {number}" for number in QUERY.findall(text) if int(number) not in seqs),
        *(f"turn {number}" for number in TURN.findall(text) if int(number) not in turns),
    ]


@quick
@given(
    histories,
    strategies,
    policies,
    ways,
    st.sampled_from([5, 40, 400]),
    st.frozensets(st.integers(1, 30), max_size=4),
    st.frozensets(st.integers(1, 14), max_size=2),
    st.frozensets(st.integers(0, 14), max_size=2),
)
def test_no_number_dangles(
    batches: list[list[Message]],
    strategy: Strategy,
    policy: Policy,
    way: ReadBack,
    summary_words: int,
    pinned: frozenset[int],
    cut_back: frozenset[int],
    overflows: frozenset[int],
) -> None:
    player = Player(strategy, policy, way=way, summary_words=summary_words)
    for step in play(batches, player, pinned=pinned, cut_back=cut_back, overflows=overflows):
        assert dangling(step, way) == []


@st.composite
def exchange(draw: st.DrawFn) -> list[Message]:
    """A reply with calls and their results, a few of them missing, doubled, late or in one message."""
    ids = [f"{draw(st.integers(0, 99))}_{number}" for number in range(draw(st.integers(1, 3)))]
    outputs = st.builds(lambda word, times: f"{word} " * times, st.sampled_from(["ok", "row", "x" * 40]), lengths)
    messages: list[Message] = [assistant(None, *(call(each, "read", {"path": f"{each}.py"}) for each in ids))]
    match draw(st.integers(0, 5)):
        case 0:
            messages.append(several(*ids, text=draw(outputs)))
        case 1:
            messages += [result(each, draw(outputs)) for each in [*ids[1:], ids[-1]]]
        case _:
            messages += [result(each, draw(outputs)) for each in ids]
    if draw(st.integers(0, 3)) == 0:
        messages += [assistant("done"), user(draw(st.sampled_from(["go on", "and now?", ""])))]
    return messages


lengths = st.sampled_from([1, 20, 60, 200])


@settings(parent=quick, max_examples=150)
@given(
    st.lists(exchange(), min_size=4, max_size=25).map(lambda rest: [[user("the task")], *rest]),
    st.builds(
        Compact,
        max_tokens=st.sampled_from([0, 1_000, 3_000, 50_000]),
        tool_call_cutoff=st.integers(1, 4),
        tool_summary_strategy=st.sampled_from(["llm", "heuristic"]),
        keep_recent_tokens=st.sampled_from([300, 20_000]),
    ),
    st.sampled_from([EveryRequest(), Auto(high=2_000, low=800), Auto(high=1_000, low=100)]),
    ways,
    st.sampled_from([5, 40, 400]),
    st.frozensets(st.integers(1, 60), max_size=4),
    st.frozensets(st.integers(1, 25), max_size=2),
)
def test_no_number_of_a_digest_dangles(
    batches: list[list[Message]],
    strategy: Compact,
    policy: Policy,
    way: ReadBack,
    summary_words: int,
    pinned: frozenset[int],
    cut_back: frozenset[int],
) -> None:
    player = Player(strategy, policy, way=way, summary_words=summary_words)
    for step in play(batches, player, pinned=pinned, cut_back=cut_back):
        assert dangling(step, way) == []
        event("with a digest" if listed(step.context) else "without a digest")


def test_a_long_turn_of_thirty_results_has_a_digest_that_holds_some_of_them() -> None:
    """The digest has room for a part of the summaries: the others are described where the results stood."""
    heuristic = Compact(max_tokens=20_000, tool_summary_strategy="heuristic")
    steps = play([[user("go")], *(working(step) for step in range(30))], Player(heuristic, EveryRequest()))
    for step in steps:
        assert dangling(step, "") == []
    last = steps[-1].context
    texts = [part.text for m in last.messages if isinstance(m, Entry) for part in m.message.results]
    described = [text for text in texts if text.startswith("[Tool result archived: 700 characters in 1 line, begin")]
    assert 0 < len(listed(last)) < 20
    assert len(described) + len(listed(last)) == len(texts) - 10
