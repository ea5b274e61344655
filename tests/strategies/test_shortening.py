"""Shortened texts, rule by rule of the documents, and what holds for all of them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.dialects.openai_chat.dialect import OPENAI_CHAT
from tersely.domain.history.history import Entry, Epoch, Snapshot
from tersely.domain.history.tiers import ReadBack, Tier
from tersely.domain.messages import Message
from tersely.domain.text.tool_output import ToolOutputLimits
from tersely.domain.tokens import estimate_text
from tersely.service.context.rendering import render
from tersely.strategies.pipeline import Draft, seal
from tersely.strategies.reduction.shortening import (
    TruncationSettings,
    apply_tiers,
    output_tiers,
    overflow_tiers,
    past_result_tiers,
    shorten_results,
    window_tiers,
)
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, conversations, place


def steps(turn: str, *texts: str) -> list[Message]:
    messages = [user(f"task {turn}")]
    for step, text in enumerate(texts):
        messages += [assistant(None, call(f"{turn}{step}")), result(f"{turn}{step}", text)]
    return messages


def results(entries: tuple[Entry, ...]) -> list[str]:
    return [r.text for entry in entries for r in entry.message.results]


LONG = "x" * 30_000


# 002, "Dynamic Tool Truncation".


def test_std_slop_the_5_most_recent_results_of_the_active_group_keep_5000_characters_older_ones_1000() -> None:
    history = place(*steps("a", *[LONG] * 7))
    short = results(apply_tiers(history, window_tiers(history), encode=estimate_text))
    notice = "... [TRUNCATED 30000 characters to {}]"
    assert short == ["x" * 1000 + notice.format(1000)] * 2 + ["x" * 5000 + notice.format(5000)] * 5


def test_std_slop_results_of_inactive_groups_keep_300_characters() -> None:
    history = place(*steps("a", LONG, LONG), assistant("done"), *steps("b", LONG))
    short = results(apply_tiers(history, window_tiers(history), encode=estimate_text))
    assert [len(text.partition("...")[0]) for text in short] == [300, 300, 5000]


def test_std_slop_the_hint_names_the_query_for_the_message() -> None:
    history = place(*steps("a", LONG))
    (text,) = results(apply_tiers(history, window_tiers(history, read_back="query_db"), encode=estimate_text))
    assert text == (
        "x" * 5000 + '... [TRUNCATED. Use query_db(sql="SELECT content FROM messages WHERE id=3") to see full output]'
    )


def test_std_slop_limits_are_configurable() -> None:
    history = place(*steps("a", LONG), *steps("b", LONG, LONG))
    given = TruncationSettings(recent=1, recent_chars=50, older_chars=40, inactive_chars=30)
    short = results(apply_tiers(history, window_tiers(history, settings=given), encode=estimate_text))
    assert [text.index(".") for text in short] == [30, 40, 50]


def test_a_hint_names_the_tool_that_the_model_has_or_none() -> None:
    history = place(*steps("a", "y"), *steps("b", LONG))
    (_, searched) = results(
        apply_tiers(history, window_tiers(history, read_back="context_search"), encode=estimate_text)
    )
    assert searched.endswith('... [TRUNCATED. Use context_search(mode="turn", turnId="t2") to see full output]')
    (_, alone) = results(apply_tiers(history, window_tiers(history), encode=estimate_text))
    assert alone.endswith("x... [TRUNCATED 30000 characters to 5000]")


def test_tiers_of_an_epoch_apply_to_later_messages() -> None:
    history = place(*steps("a", LONG), *steps("b", LONG, LONG))
    before = apply_tiers(history[:5], window_tiers(history[:5]), encode=estimate_text)
    after = apply_tiers(history, window_tiers(history[:5]), encode=estimate_text)
    assert after[:5] == before
    assert len(results(after)[-1].partition("...")[0]) == 5000


# 001, "Compression Strategy".


def test_cowagent_results_of_past_turns_over_20000_characters_keep_beginning_and_end() -> None:
    text = "A" * 15_000 + "Z" * 15_000
    history = place(*steps("a", text, "x" * 20_000), assistant("done"), *steps("b", text))
    past, whole, current = results(apply_tiers(history, past_result_tiers(history), encode=estimate_text))
    assert len(past) == 20_000
    assert past.startswith("A" * 9_900)
    assert past.endswith("Z" * 9_900)
    assert "\n... [TRUNCATED 30000 characters to 20000] ...\n" in past
    assert (whole, current) == ("x" * 20_000, text)


def test_cowagent_on_overflow_results_and_user_text_keep_10k() -> None:
    history = place(user("q" * 12_000), assistant("a" * 12_000, call("c")), result("c", LONG))
    question, reply, got = apply_tiers(history, overflow_tiers(), encode=estimate_text)
    assert (len(question.message.text), len(reply.message.text)) == (10_000, 12_000)
    assert [len(text) for text in results((got,))] == [10_000]
    assert json.loads(render(question, OPENAI_CHAT)[0])["content"] == question.message.text


def test_shortened_user_text_keeps_its_media() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    parts = [{"type": "text", "text": "a" * 9_000}, image, {"type": "text", "text": "b" * 9_000}]
    message = OPENAI_CHAT.read_message(json.dumps({"role": "user", "content": parts, "name": "n"}).encode())
    (entry,) = apply_tiers(place(message), overflow_tiers(), encode=estimate_text)
    wire = json.loads(render(entry, OPENAI_CHAT)[0])
    assert (wire["name"], wire["content"][1:]) == ("n", [image])
    assert len(wire["content"][0]["text"]) == 10_000
    assert OPENAI_CHAT.read_message(render(entry, OPENAI_CHAT)[0]).parts == entry.message.parts


# 003, "Tool Output Processing".


def test_ai_output_limits_hold_for_results_of_any_age() -> None:
    lines = "\n".join(["line"] * 3_000)
    history = place(*steps("a", lines), *steps("b", lines, "short"))
    old, new, short = results(apply_tiers(history, output_tiers(), encode=estimate_text))
    assert old == new
    assert "of 3001 lines" not in old
    assert "[1001 lines truncated]" in old
    assert short == "short"


def test_ai_a_spilled_output_is_a_notice_where_there_is_a_way_to_the_whole() -> None:
    history = place(*steps("a", "x" * 300_000))
    tiers = (*output_tiers(read_back="query_db"), *window_tiers(history, read_back="query_db"))
    (notice,) = results(apply_tiers(history, tiers, encode=estimate_text))
    assert notice.startswith("[Large tool output: 300000 characters, 300000 bytes, 1 lines. ")
    assert notice.endswith('Use query_db(sql="SELECT content FROM messages WHERE id=3") to see full output]')


# What holds for every tier.

TIERS = st.lists(
    st.builds(
        Tier,
        subject=st.sampled_from(["output", "results", "user_text", "archive"]),
        until=st.none() | st.integers(0, 30),
        chars=st.integers(1, 2_000),
        style=st.sampled_from(["head", "ends"]),
        read_back=st.sampled_from(get_args(ReadBack)),
        limits=st.none()
        | st.builds(
            ToolOutputLimits,
            max_lines=st.integers(1, 50),
            max_bytes=st.integers(10, 2_000),
            max_chars=st.integers(10, 2_000),
            large_output_threshold=st.integers(10, 2_000),
            truncate_mode=st.sampled_from(["head", "head_tail"]),
        ),
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(conversations, TIERS)
def test_shortening_never_lengthens_is_stable_and_touches_nothing_else(
    batches: list[list[Message]], tiers: list[Tier]
) -> None:
    history = place(*[message for batch in batches for message in batch])
    short = apply_tiers(history, tiers, encode=estimate_text)
    assert apply_tiers(history, tiers, encode=estimate_text) == short
    for before, after in zip(history, short, strict=True):
        if after is before:
            continue
        assert after.is_shortened
        assert replace(after, message=before.message, tokens=before.tokens, is_shortened=False) == before
        assert sum(len(r.text) for r in after.message.results) <= sum(len(r.text) for r in before.message.results)
        assert len(after.message.text) <= len(before.message.text)
        assert OPENAI_CHAT.read_message(render(after, OPENAI_CHAT)[0]).parts == after.message.parts
    assert msgspec.json.decode(msgspec.json.encode(tiers), type=list[Tier]) == tiers


@settings(max_examples=30, deadline=None)
@given(conversations)
def test_limits_grow_with_recency(batches: list[list[Message]]) -> None:
    history = place(*[message for batch in batches for message in batch])
    tiers = window_tiers(history)
    limits = [next(t.chars for t in tiers if t.covers(entry.seq)) for entry in history]
    assert all(old <= new for old, new in pairwise(limits))


def test_entries_that_need_nothing_are_the_same_objects() -> None:
    history = place(*steps("a", "x" * 300, "y"))
    tiers = (*output_tiers(), *window_tiers(history), *overflow_tiers())
    assert all(new is old for old, new in zip(history, apply_tiers(history, tiers, encode=estimate_text), strict=True))


def test_text_is_unchanged_if_the_notice_would_lengthen_it() -> None:
    history = place(*steps("a", "x" * 310), *steps("b", "y"))
    assert apply_tiers(history, window_tiers(history, read_back="query_db"), encode=estimate_text) == history


def test_a_prefix_counts_after_shortening_as_before() -> None:
    (entry,) = place(user("q" * 12_000))
    (plain,) = apply_tiers([entry], overflow_tiers(), encode=estimate_text)
    (prefixed,) = apply_tiers([replace(entry, prefix="m" * 40)], overflow_tiers(), encode=estimate_text)
    assert prefixed.tokens == plain.tokens + 10


@pytest.mark.parametrize("change", ["shortened", "prefix"])
def test_the_stage_reports_turns_and_the_context_is_no_longer_whole(change: str) -> None:
    history = place(*steps("a", LONG), *steps("b", "y"))
    draft = Draft(tail=history)
    if change == "shortened":
        draft = shorten_results(window_tiers(history), encode=estimate_text)(draft)
    else:
        draft = replace(draft, tail=(replace(history[0], prefix="memo"), *history[1:]))
    epoch = Epoch(
        number=1, cut=1, head=(), kept=(), reason="first", fingerprint="", references=(), created_at=START
    )  # fmt: skip
    context = seal(draft, snapshot=Snapshot(entries=history), epoch=epoch, budget=None)
    assert not context.is_whole
    if change == "shortened":
        assert [(t.turn, t.kept) for t in context.report.turns] == [(1, "truncated"), (2, "full")]
        assert context.report.tokens_after < context.report.tokens_before
    else:
        assert json.loads(render(draft.tail[0], OPENAI_CHAT)[0])["content"] == "memo\n\ntask a"
