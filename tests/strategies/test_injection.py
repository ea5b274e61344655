"""Injected blocks in generated histories: each newest version stands in every context once, and nothing quotes one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tersely.domain.history.chain import split_injected
from tersely.domain.history.context import Context
from tersely.domain.history.history import (
    AFTER_ALL_MESSAGES,
    Entry,
    Epoch,
    HeadMessage,
    InjectedBlock,
    Snapshot,
)
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.epochs.policies import Policy
from tersely.strategies.head.injection import ADDITIVE_BLOCKS, ADDITIVE_TOKENS, LAYER, must_restate, newest_versions
from tersely.strategies.presets import Slim, Strategy
from tests.builders import user
from tests.strategies.histories import call_model, chat, conversations, load, play_calls, rendered
from tests.strategies.test_properties import SMALL, policies, quick, strategies

MARK = re.compile(r"inj\d+x")
OPENINGS = (
    "<environment_context>\n{}</environment_context>",
    "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n{}</system-reminder>",
    "<system-reminder>\nThe following deferred tools are now available:\n{}</system-reminder>",
    "<system-reminder>\nNote: /src/{}.py was modified.</system-reminder>",
)


@st.composite
def injecting(draw: st.DrawFn) -> list[list[Message]]:
    """A conversation whose client puts blocks into its messages, each version with a mark of its own."""
    batches = draw(conversations)
    number = 0
    marked: list[list[Message]] = []
    for batch in batches:
        messages: list[Message] = []
        for message in batch:
            blocks: list[str] = []
            for opening in OPENINGS if message.starts_turn else ():
                if draw(st.integers(0, 2)) == 0:
                    blocks.append(opening.format(f"inj{number}x" + " rule" * draw(st.integers(0, 40))))
                    number += 1
            at = draw(st.integers(0, len(blocks)))
            words = "\n".join([*blocks[:at], message.text, *blocks[at:]])
            messages.append(user(words) if blocks else message)
        marked.append(messages)
    return marked


def blocks_of(history: Sequence[Entry]) -> tuple[InjectedBlock, ...]:
    return newest_versions(
        InjectedBlock(key=block.key, text=block.text, tokens=estimate_text(block.text), seq=entry.seq)
        for entry in history
        for block in entry.message.injected
    )


def play(batches: Sequence[list[Message]], strategy: Strategy, policy: Policy) -> list[tuple[list[str], Context]]:
    """A call after each batch: the newest blocks, and the context."""

    def snapshot_of(history: tuple[Entry, ...], epoch: Epoch | None, number: int) -> Snapshot:
        newest = blocks_of(history)
        fixed = sum(block.tokens for block in newest)
        return load(history, epoch, calls=number, injected=newest, fixed_tokens=fixed)

    calls = play_calls(batches, strategy, policy, snapshot_of)
    return [([block.text for block in blocks_of(history)], context) for history, context in calls]


def stated(context: Context) -> str:
    """All that a context says: heads as they are, entries with their blocks."""
    texts = [
        message.text
        if isinstance(message, HeadMessage)
        else "\n".join([message.message.text, *(block.text for block in message.message.injected)])
        for message in context.messages
    ]
    return "\n".join(texts)


@quick
@given(injecting(), strategies, policies)
def test_each_newest_block_stands_in_the_context_once(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    for newest, context in play(batches, strategy, policy):
        shown = stated(context)
        assert [shown.count(text) for text in newest] == [1] * len(newest)


@quick
@given(injecting(), strategies, policies)
def test_only_the_layer_of_blocks_holds_their_text(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    for _, context in play(batches, strategy, policy):
        epoch = context.epoch
        assert not any(MARK.search(message.text) for message in epoch.head)
        assert not any(MARK.search(prefix.text) for prefix in epoch.prefixes)
        assert not any(MARK.search(reference.text) for reference in epoch.references)
        heads = [message for message in context.messages if isinstance(message, HeadMessage)]
        assert not any(MARK.search(message.text) for message in heads if message.layer != LAYER)


@quick
@given(injecting(), strategies, policies)
def test_contexts_with_blocks_extend_each_other_within_an_epoch(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    for (_, first), (_, second) in pairwise(play(batches, strategy, policy)):
        if first.epoch.number == second.epoch.number:
            before = rendered(first)
            assert rendered(second)[: len(before)] == before


@quick
@given(injecting(), strategies, policies)
def test_reports_with_blocks_add_up(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    for _, context in play(batches, strategy, policy):
        report = context.report
        assert report.tokens_after == sum(layer.tokens for layer in report.layers)
        assert all(layer.tokens >= 0 for layer in report.layers)


def history_with_rules(turns: int, version: str = "v1") -> tuple[Entry, ...]:
    """A chat whose first message brings rules."""
    first, *rest = chat(turns, size=1_500)
    return (
        structs.replace(first, message=user(f"<environment_context>{version}</environment_context>\nquestion 1")),
        *rest,
    )


def call_again(history: Sequence[Entry], epoch: Epoch | None, injected: Sequence[InjectedBlock]) -> Context:
    return call_model(load(history, epoch, injected=tuple(injected)), strategy=Slim(), policy=SMALL)


def test_a_rewritten_block_starts_an_epoch() -> None:
    history = history_with_rules(8)
    first = call_again(history, None, blocks_of(history))
    assert first.epoch.cut > 1
    assert [block.text for block in first.epoch.injected] == ["<environment_context>v1</environment_context>"]
    same = call_again(history, first.epoch, blocks_of(history))
    assert same.epoch == first.epoch
    rewritten = history_with_rules(8, "v2")
    second = call_again(rewritten, first.epoch, blocks_of(rewritten))
    assert second.epoch.reason == "edit"
    assert "v1" not in stated(second)
    gone = call_again(history, first.epoch, ())
    assert gone.epoch.reason == "edit"
    assert gone.epoch.injected == ()


@pytest.mark.parametrize(("seq", "is_shown"), [(0, False), (3, False), (AFTER_ALL_MESSAGES, True)])
def test_a_block_that_is_a_message_of_its_own_is_cut_with_the_message_behind_it(seq: int, is_shown: bool) -> None:
    history = chat(8, size=1_500)
    block = InjectedBlock(
        key="k", text="<environment_context>x</environment_context>", tokens=9, seq=seq, is_alone=True
    )
    context = call_again(history, None, [block])
    assert context.epoch.cut > 3
    assert (context.epoch.injected == ()) is is_shown
    last = structs.replace(block, seq=history[-1].seq)
    assert call_again(history, None, [last]).epoch.injected == ()


@given(st.text(alphabet="<>/systemreminder- \n", max_size=200))
def test_text_consists_of_words_and_blocks(text: str) -> None:
    words, blocks = split_injected(text)
    assert len(words) + sum(len(block.text) for block in blocks) == len(text)
    assert not split_injected(words)[1] or "<system-reminder>" in "".join(block.text for block in blocks)


def test_unclosed_blocks_are_text_and_parse_quickly() -> None:
    text = "<system-reminder>" * 60_000
    assert split_injected(text) == (text, ())
    assert split_injected(text)[0] is text


@pytest.mark.parametrize(
    ("one", "other", "are_versions"),
    [
        ("Note: /a was modified", "Note: /b was modified", True),
        ("Contents of /a/CLAUDE.md:\n1", "Contents of /b/CLAUDE.md:\n1", False),
        ("Contents of /a/CLAUDE.md:\n1", "Contents of /a/CLAUDE.md:\n2", True),
        (
            "The following deferred tools are now available:\nA",
            "The following deferred tools are now available:\nB",
            False,
        ),
        ("Token usage: 12/99", "Token usage: 5000/99", True),
        ("Plan mode is active.", "Your todo list is empty.", False),
    ],
)
def test_versions_of_a_block_share_a_key(one: str, other: str, are_versions: bool) -> None:
    mark = "<system-reminder>\n{}\n</system-reminder>"
    (first,), (second,) = split_injected(mark.format(one))[1], split_injected(mark.format(other))[1]
    assert (first.key == second.key) is are_versions


def tools_block(number: int, tokens: int = 10) -> InjectedBlock:
    text = f"<system-reminder>\nThe following deferred tools are now available:\ntool{number}\n</system-reminder>"
    return InjectedBlock(key=split_injected(text)[1][0].key, text=text, tokens=tokens, seq=number)


RULES = InjectedBlock(key="<environment_context>", text="rules", tokens=10 * ADDITIVE_TOKENS, seq=1)


def test_blocks_that_no_version_replaces_are_bounded() -> None:
    many = [RULES, *(tools_block(number) for number in range(2, 2 * ADDITIVE_BLOCKS))]
    assert newest_versions(many) == (RULES, *many[-ADDITIVE_BLOCKS:])
    large = [RULES, *(tools_block(number, ADDITIVE_TOKENS // 4) for number in range(2, 100))]
    assert newest_versions(large) == (RULES, *large[-4:])
    assert newest_versions([tools_block(2), tools_block(3, ADDITIVE_TOKENS + 1)]) == ()


def test_keys_of_blocks_are_short() -> None:
    keys = [split_injected(tools_block(number).text + "x" * 5)[1][0].key for number in (1, 2)]
    assert keys[0] != keys[1]
    long = "<system-reminder>SessionStart\n" + "x" * 10_000 + "</system-reminder>"
    assert all(len(each) < 200 for each in (*keys, split_injected(long)[1][0].key))


def test_a_block_beyond_the_bounds_starts_no_epoch() -> None:
    history = chat(3)
    blocks = [tools_block(number, ADDITIVE_TOKENS // 4) for number in range(1, 7)]
    epoch = structs.replace(
        call_model(load(history, None), strategy=Slim(), policy=SMALL).epoch, cut=2, injected=tuple(blocks[:4])
    )
    shown = [structs.replace(block, seq=AFTER_ALL_MESSAGES, is_alone=True) for block in blocks[4:]]
    for number in range(3):
        newest = newest_versions((*blocks[:4], *shown[:number]))
        assert len(newest) == 4
        assert not must_restate(load(history, epoch, injected=newest))
    assert must_restate(load(history, epoch, injected=tuple(blocks[1:4]))), "the client took a block back"
