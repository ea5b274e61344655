"""Golden contexts of `compact`: tiancaiamao/ai under ``every_request``, and its form under ``auto``."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, EpochInputs, HeadMessage, Summary
from tersely.domain.text.tool_output import DEFAULT_LIMITS
from tersely.domain.tokens import estimate_text
from tersely.strategies.composition import overflow_tries, summary_text
from tersely.strategies.epochs.policies import Auto, ContinueEpoch, EveryRequest, Policy, StartEpoch
from tersely.strategies.planning import decide, plan_epoch
from tersely.strategies.prefetch import after_cut
from tersely.strategies.presets import Compact, Trim
from tersely.strategies.reduction.archiving import archive_tiers
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, chat, load, place, shape, work

LITERAL = EveryRequest()
# 8,000 tokens are reached with 16 of its turns.
LONG = chat(18, size=2_000)


def made(purpose: str, first: int, last: int, text: str) -> Summary:
    return Summary(
        first_seq=first, last_seq=last, purpose=purpose, text=text, tokens=9, source="model", created_at=START
    )


def built(
    history: tuple[Entry, ...],
    strategy: Compact | None = None,
    *summaries: Summary,
    policy: Policy = LITERAL,
    **values: object,
) -> Context:
    return call_model(
        load(history, None, **values),
        strategy=strategy or Compact(),
        policy=policy,
        material=EpochInputs(summaries=summaries),
    )


def entries(context: Context) -> list[Entry]:
    return [message for message in context.messages if isinstance(message, Entry)]


def head(context: Context) -> list[HeadMessage]:
    return [message for message in context.messages if isinstance(message, HeadMessage)]


def results(context: Context) -> list[str]:
    return [part.text for entry in entries(context) for part in entry.message.results]


def test_core_configuration_defaults() -> None:
    compact = Compact()
    assert (compact.max_messages, compact.max_tokens) == (50, 8_000)
    assert (compact.keep_recent, compact.keep_recent_tokens) == (5, 20_000)
    assert (compact.reserve_tokens, compact.tool_call_cutoff) == (16_384, 10)
    assert (compact.tool_summary_strategy, compact.auto_compact) == ("llm", True)


def test_tool_output_defaults() -> None:
    compact = Compact()
    assert (compact.max_lines, compact.max_bytes) == (DEFAULT_LIMITS.max_lines, DEFAULT_LIMITS.max_bytes)
    assert (compact.max_chars, compact.large_output_threshold) == (
        DEFAULT_LIMITS.max_chars,
        DEFAULT_LIMITS.large_output_threshold,
    )
    assert compact.truncate_mode == DEFAULT_LIMITS.truncate_mode


def test_triggering_1_without_auto_compact_nothing_is_compacted() -> None:
    off = Compact(auto_compact=False)
    for policy in (LITERAL, Auto()):
        assert built(LONG, off, policy=policy).is_whole
    grown = load(LONG, built(LONG[:5], off, policy=Auto()).epoch)
    assert decide(grown, strategy=off, policy=Auto(), now=START) == ContinueEpoch()
    assert decide(replace(grown, window=4_000), strategy=off, policy=Auto(), now=START) == StartEpoch(reason="window")


def test_triggering_2_at_the_limit_and_not_before() -> None:
    tokens = sum(entry.tokens for entry in LONG)
    assert built(LONG, Compact(max_tokens=tokens + 1)).is_whole
    assert built(LONG, Compact(max_tokens=tokens)).epoch.cut > 1


def test_triggering_2_instructions_and_tools_count() -> None:
    tokens = sum(entry.tokens for entry in LONG)
    assert built(LONG, Compact(max_tokens=tokens + 100), fixed_tokens=100).epoch.cut > 1


def test_triggering_3_messages_count_only_where_there_is_no_token_limit() -> None:
    by_count = Compact(max_tokens=0, keep_recent_tokens=0)
    assert built(chat(25), by_count).is_whole  # 49 messages
    assert built(chat(26), by_count).epoch.cut == 47
    assert built(chat(26), Compact(keep_recent_tokens=0)).is_whole


def test_effective_limit_the_window_less_the_reserve_goes_before_max_tokens() -> None:
    assert built(LONG, model_window=128_000).is_whole
    assert built(LONG, model_window=16_384 + 8_000).epoch.cut > 1


def test_effective_limit_keep_recent_tokens_is_at_most_half_of_it() -> None:
    kept = sum(entry.tokens for entry in entries(built(LONG)))
    assert 3_000 < kept <= 4_000


def test_split_by_tokens_where_keep_recent_tokens_is_set() -> None:
    context = built(LONG, Compact(keep_recent_tokens=1_200))
    kept = sum(entry.tokens for entry in entries(context))
    before = LONG[-len(entries(context)) - 1]
    assert kept <= 1_200 < kept + before.tokens


def test_split_by_count_where_keep_recent_tokens_is_0() -> None:
    context = built(LONG, Compact(keep_recent_tokens=0))
    assert [entry.seq for entry in entries(context)] == [31, 32, 33, 34, 35]


def test_rebuild_one_user_message_with_the_prefix_then_the_recent_messages() -> None:
    checkpoint = made("checkpoint", 1, 30, "## Goals\n- ship")
    context = built(LONG, Compact(keep_recent_tokens=0), checkpoint)
    assert shape(context) == ["summary/user", "31 user", "32 assistant", "33 user", "34 assistant", "35 user"]
    assert head(context)[0].text == "[Previous conversation summary]\n\n## Goals\n- ship"


def test_rebuild_without_a_models_checkpoint_there_is_one_all_the_same() -> None:
    (message,) = head(built(LONG, Compact(keep_recent_tokens=0)))
    assert message.text.startswith("[Previous conversation summary]\n\n")
    assert "question 1" in message.text


@pytest.mark.parametrize("has_model", [False, True])
def test_rebuild_the_next_compaction_takes_up_the_last(has_model: bool) -> None:
    """``has_model``: the first checkpoint is a model's, and the second one is not there yet."""
    small = Compact(keep_recent_tokens=0)
    first = built(LONG, small, *[made("checkpoint", 1, 30, "## Goals\n- question 1")] * has_model)
    later = chat(60, size=2_000)
    second = call_model(load(later, first.epoch), strategy=small, policy=LITERAL)
    assert second.epoch.cut > first.epoch.cut
    (message,) = head(second)
    assert message.text.count("question 1\n") == 1, "of the first checkpoint"
    assert re.search(r"question (1[6-9]|[2-5]\d)\b", message.text), "what has been said since"


def test_rebuild_keeps_compacted_results_until_the_next_checkpoint() -> None:
    small = Compact(keep_recent_tokens=0)
    first = built(LONG, small)
    second = call_model(load(chat(19, size=2_000), first.epoch), strategy=small, policy=LITERAL)
    assert second.epoch.cut == first.epoch.cut
    assert head(second) == head(first)
    (wanted,) = after_cut(small, load(LONG, None), first.epoch)
    assert (wanted.purpose, wanted.first_seq, wanted.last_seq) == ("checkpoint", 1, 30)


def test_visibility_counts_archived_results_by_their_remaining_text() -> None:
    huge = place(user("go"), assistant(None, call("c1")), result("c1", "x" * 300_000), assistant("done"), user("next"))
    context = built(huge, Compact(max_tokens=30_000))
    assert context.epoch.cut == 1
    assert len(results(context)[0]) < 60_000


def test_output_is_within_the_limits_at_any_age() -> None:
    text = "\n".join(f"line {number}" for number in range(5_000))
    history = place(user("go"), assistant(None, call("c1")), result("c1", text))
    (shown,) = results(built(history, Compact(max_tokens=100_000)))
    assert "lines truncated] ..." in shown
    assert "[Output truncated: " in shown


def test_loop_results_beyond_the_cutoff_are_archived_oldest_first() -> None:
    ready = [made("tool_result", seq, seq, f"summary of {seq}") for seq in (3, 5)]
    context = built(work(12), Compact(max_tokens=100_000), *ready)
    shown = results(context)
    assert [text.startswith("[Tool result archived") for text in shown] == [True] * 2 + [False] * 10
    (digest,) = head(context)
    assert (digest.layer, digest.role) == ("tool_summary", "user")
    assert digest.text == "[Compaction tool digest]\n#3: summary of 3\n#5: summary of 5"


def test_loop_at_the_cutoff_nothing_is_archived() -> None:
    ready = made("tool_result", 3, 3, "summary of 3")
    assert built(work(10), Compact(max_tokens=100_000), ready).is_whole


def test_loop_llm_waits_for_its_summary_and_heuristic_does_not() -> None:
    assert built(work(12), Compact(max_tokens=100_000)).is_whole
    (digest,) = head(built(work(12), Compact(max_tokens=100_000, tool_summary_strategy="heuristic")))
    assert digest.text.splitlines()[1].startswith("#3: read ")


def test_loop_off_archives_nothing() -> None:
    ready = [made("tool_result", seq, seq, "s") for seq in (3, 5)]
    assert built(work(12), Compact(max_tokens=100_000, tool_summary_strategy="off"), *ready).is_whole


def test_recent_window_excess_results_go_into_one_digest_behind_the_checkpoint() -> None:
    small = Compact(max_tokens=3_000, tool_summary_strategy="heuristic", tool_call_cutoff=2)
    context = built(work(20, size=600), small)
    assert [message.layer for message in head(context)] == ["summary", "tool_summary"]
    archived = [text.startswith("[Tool result archived") for text in results(context)]
    assert archived.count(False) == 2
    assert archived == sorted(archived, reverse=True)
    assert archive_tiers(work(2), (), cutoff=2) == ()


@pytest.mark.parametrize("policy", [LITERAL, Auto()], ids=["every_request", "auto"])
def test_recovery_an_overflow_compacts_once_even_without_auto_compact(policy: Policy) -> None:
    off = Compact(auto_compact=False)
    context = call_model(load(LONG, None), strategy=off, policy=policy, overflow=True)
    assert context.epoch.cut > 1
    assert head(context)[0].text.startswith("[Previous conversation summary]")
    assert overflow_tries(off) == 1


def test_under_auto_a_compaction_is_followed_by_calls_that_only_add() -> None:
    first = built(LONG, policy=Auto())
    assert first.epoch.cut > 1
    second = call_model(load(chat(19, size=2_000), first.epoch), strategy=Compact(), policy=Auto())
    assert second.messages[: len(first.messages)] == first.messages


def test_under_auto_messages_are_a_limit_only_where_a_split_helps() -> None:
    by_count = Compact(max_tokens=0, keep_recent_tokens=0)
    first = built(chat(20), by_count, policy=Auto())
    for turns, reason in ((25, "ContinueEpoch"), (26, "messages")):
        decision = decide(load(chat(turns), first.epoch), strategy=by_count, policy=Auto(), now=START)
        assert getattr(decision, "reason", "ContinueEpoch") == reason
    whole = decide(load(chat(26), first.epoch), strategy=Compact(max_tokens=0), policy=Auto(), now=START)
    assert getattr(whole, "reason", "ContinueEpoch") == "config"


@pytest.mark.parametrize(("strategy", "purpose"), [(Compact(), "checkpoint"), (Trim(), "trim")])
def test_a_summary_that_was_asked_for_is_used_although_the_newest_turns_stay(
    strategy: Compact | Trim, purpose: str
) -> None:
    whole = made(purpose, 1, LONG[-2].seq - 1, "EVERYTHING SO FAR")
    epoch = plan_epoch(
        load(LONG, None),
        EpochInputs(summaries=(whole,)),
        strategy=strategy,
        policy=Auto(),
        epoch_start=StartEpoch(reason="compact"),
        now=START,
        encode=estimate_text,
    )
    assert 1 < epoch.cut <= whole.last_seq
    assert "EVERYTHING SO FAR" in summary_text(epoch)
