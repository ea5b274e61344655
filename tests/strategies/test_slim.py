"""Golden contexts of `slim` and `full`.

Under ``every_request`` they are those of flo.monster's "Context Management", under ``auto`` DESIGN.md's "Epochs".
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

from tersely.domain.errors import ContextTooLarge
from tersely.domain.history.context import Context, TurnReport
from tersely.domain.history.history import Entry, EpochInputs, HeadMessage
from tersely.strategies.epochs.policies import Auto, EveryRequest, Stride
from tersely.strategies.planning import first_seq_needed, report_cut_turns
from tersely.strategies.presets import Full, Slim, Window
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, chat, load, place, rendered, shape, terse, work

LITERAL = EveryRequest()
SMALL = Auto(high=2_000, low=800)


def head_texts(context: Context) -> list[str]:
    return [m.text for m in context.messages if isinstance(m, HeadMessage)]


# "The Activity Log", to the letter.
LOG = """\
[Context -- Activity Log]
[t1 2024-01-15T10:30] assistant: created dashboard with shopping, todo, schedule sections
[t2 2024-01-15T10:32] assistant: added 3 items to shopping list"""

DOCUMENT_TERSE = terse(
    "created dashboard with shopping, todo, schedule sections",
    "added 3 items to shopping list",
    "marked 2 todos as complete",
    "reorganised dashboard layout, moved schedule to top",
)


FIFTY = terse(*(f"did thing number {number}" for number in range(1, 51)))


def test_context_builder_step_5_log_acknowledgement_recent_turns() -> None:
    context = call_model(
        load(chat(5), None), strategy=Slim(), policy=LITERAL, material=EpochInputs(terse=DOCUMENT_TERSE)
    )
    assert shape(context) == [
        "activity_log/user",
        "activity_log/assistant",
        *["5 user", "6 assistant", "7 user", "8 assistant", "9 user"],
    ]
    assert head_texts(context)[0] == LOG


def test_a_hundred_turns_are_fifty_entries_and_the_last_three_turns() -> None:
    """flo.monster, "The Result": a model that tags every second reply of 100 turns, with a tool call in each."""
    messages = [
        message
        for turn in range(1, 101)
        for message in (user(f"question {turn}"), assistant(None, call(f"c{turn}")), result(f"c{turn}", "r" * 900))
    ]
    tagged = tuple(replace(entry, turn=2 * entry.turn - 1, seq=3 * (2 * entry.turn - 1)) for entry in FIFTY)
    context = call_model(
        load(place(*messages), None),
        strategy=Slim(derive_terse=False),
        policy=LITERAL,
        material=EpochInputs(terse=tagged),
    )
    log = head_texts(context)[0].splitlines()
    assert log[0] == "[Context -- Activity Log]"
    assert [line.partition(" ")[0] for line in log[1:]] == [f"[t{turn}" for turn in range(1, 98, 2)]
    assert len(log[1:]) == 49  # turn 99 is shown whole
    assert shape(context)[2:] == [
        f"{seq} {role}" for seq, role in zip(range(292, 301), ["user", "assistant", "tool"] * 3, strict=True)
    ]


def test_context_builder_step_3_no_entry_of_a_recent_turn_is_in_the_log() -> None:
    context = call_model(
        load(chat(5), None), strategy=Slim(recent_turns=4), policy=LITERAL, material=EpochInputs(terse=DOCUMENT_TERSE)
    )
    assert head_texts(context)[0] == "\n".join(LOG.splitlines()[:2])


def test_up_to_k_turns_there_is_no_log() -> None:
    context = call_model(
        load(chat(3), None), strategy=Slim(), policy=LITERAL, material=EpochInputs(terse=DOCUMENT_TERSE[:2])
    )
    assert context.messages == chat(3)
    assert context.is_whole


def test_literal_context_has_an_index_only_on_request() -> None:
    history = place(user("open src/app.py"), assistant("done"), user("next"))
    plain = call_model(load(history, None), strategy=Slim(recent_turns=1), policy=LITERAL)
    context = call_model(load(history, None), strategy=Slim(recent_turns=1, references=500), policy=LITERAL)
    assert shape(plain) == ["activity_log/user", "activity_log/assistant", "3 user"]
    assert shape(context)[2:] == ["references/user", "references/assistant", "3 user"]
    assert head_texts(context)[2].splitlines()[1:] == ["t1: src/app.py"]


def test_a_turn_without_an_entry_is_not_missing_from_the_log_unless_so_configured() -> None:
    log = "[Context -- Activity Log]\n[t1 2024-01-15T10:31] assistant: answer 1."
    assert head_texts(call_model(load(chat(2), None), strategy=Slim(recent_turns=1), policy=LITERAL))[0] == log
    silent = call_model(load(chat(2), None), strategy=Slim(recent_turns=1, derive_terse=False), policy=LITERAL)
    assert shape(silent) == ["3 user"]


def test_full_mode_returns_all_messages() -> None:
    for policy in (LITERAL, Auto(), Stride(stride=1)):
        context = call_model(load(chat(30), None), strategy=Full(), policy=policy)
        assert context.messages == chat(30)
        assert context.is_whole


# DESIGN.md, "Epochs".


def test_under_auto_a_short_conversation_is_sent_whole() -> None:
    context = call_model(
        load(chat(20), None), strategy=Slim(), policy=Auto(), material=EpochInputs(terse=DOCUMENT_TERSE)
    )
    assert (context.messages, context.is_whole, context.epoch.cut, context.epoch.reason) == (chat(20), True, 1, "first")


def test_above_the_high_watermark_whole_turns_are_cut_down_to_the_low_one() -> None:
    history = chat(30, size=400)
    first = call_model(load(history[:1], None), strategy=Slim(), policy=SMALL)
    context = call_model(
        load(history, first.epoch, calls=29), strategy=Slim(references=0), policy=Auto(high=2_000, low=800)
    )
    assert context.epoch.number == 2
    assert 480 <= context.report.tokens_after <= 800
    kinds = shape(context)
    assert kinds[:2] == ["activity_log/user", "activity_log/assistant"]
    assert kinds[2].endswith("user")
    assert kinds[-1] == "59 user"


def test_the_first_epoch_of_a_long_history_is_cut_as_well() -> None:
    context = call_model(load(chat(60, size=400), None), strategy=Slim(), policy=SMALL)
    assert (context.epoch.reason, context.report.tokens_after <= 800) == ("first", True)


def test_a_long_turn_is_cut_by_steps_and_keeps_its_task() -> None:
    history = work(40)
    context = call_model(load(history, None), strategy=Slim(files=0), policy=SMALL)
    kinds = shape(context)
    assert kinds[:5] == [
        "activity_log/user",
        "activity_log/assistant",
        "references/user",
        "references/assistant",
        "1 user",
    ]
    assert kinds[5].endswith("assistant")
    assert kinds[-1] == "81 tool"
    assert context.repairs == ()
    assert context.report.turns == (
        TurnReport(turn=1, kept="truncated", tokens=context.report.turns[0].tokens, reason="cut inside the turn"),
    )


def test_log_of_a_running_turn_describes_its_cut_steps_over_epochs() -> None:
    history = work(120, size=100)
    epoch = None
    for end in range(1, len(history) + 1, 2):
        context = call_model(load(history[:end], epoch), strategy=Slim(), policy=Auto(high=4_000, low=2_400))
        epoch = context.epoch
    assert epoch is not None
    assert epoch.number > 2
    log = epoch.head[0].text.splitlines()
    assert log[0] == "[Context -- Activity Log]"
    assert "Step 1." in log[1]
    assert log[-1].endswith(f"assistant: Step {(epoch.cut - 2) // 2}.")


def test_promised_turns_that_do_not_fit_keep_their_user_messages() -> None:
    steps = work(12, turn="third").__len__()
    messages = [
        user("first"),
        assistant("a"),
        user("second"),
        assistant("b"),
        *(e.message for e in work(12, turn="third")),
    ]
    context = call_model(load(place(*messages), None), strategy=Slim(references=0), policy=Auto(high=1_200, low=700))
    assert steps == 25
    kept = [kind for kind in shape(context) if kind.endswith(" user")]
    assert kept == ["1 user", "3 user", "5 user"]


def test_pinned_messages_stay_with_their_calls_and_results() -> None:
    messages = [user("task"), assistant(None, call("a", "read")), result("a", "the rules"), assistant("ok")]
    messages += [m for n in range(20) for m in (user(f"q{n}"), assistant("x" * 400))]
    history = place(*messages, user("last"), pinned=frozenset({3}))
    context = call_model(load(history, None), strategy=Slim(), policy=SMALL)
    assert [k for k in shape(context) if k in {"1 user", "2 assistant", "3 tool", "4 assistant"}] == [
        "2 assistant",
        "3 tool",
    ]
    assert context.repairs == ()


def test_a_single_huge_message_is_sent_alone_or_refused_with_numbers() -> None:
    messages = [m for n in range(20) for m in (user(f"q{n}"), assistant("x" * 400))]
    history = place(*messages, user("y" * 20_000))
    context = call_model(load(history, None), strategy=Slim(), policy=SMALL)
    assert shape(context)[-1] == "41 user"
    with pytest.raises(ContextTooLarge) as refused:
        call_model(load(history, None, window=3_000, fixed_tokens=100), strategy=Slim(), policy=SMALL)
    assert refused.value.budget == 3_000
    assert refused.value.needed > 5_000


def test_a_huge_message_does_not_start_an_epoch_at_every_call() -> None:
    history = place(user("y" * 20_000), *(m for e in work(30, size=50)[1:] for m in (e.message,)))
    epochs = set()
    epoch = None
    for end in range(1, len(history) + 1, 2):
        epoch = call_model(load(history[:end], epoch), strategy=Slim(), policy=SMALL).epoch
        epochs.add(epoch.number)
    assert len(epochs) <= 4


def test_an_overflow_halves_even_full_and_retries_get_smaller() -> None:
    history = work(60)
    whole = call_model(load(history, None), strategy=Full(), policy=Auto())
    reduced = call_model(load(history, whole.epoch), strategy=Full(), policy=Auto(), overflow=True)
    again = call_model(load(history, reduced.epoch), strategy=Full(), policy=Auto(), overflow=True)
    assert whole.is_whole
    assert reduced.epoch.reason == "overflow"
    assert reduced.report.tokens_after <= whole.report.tokens_after // 2
    assert again.report.tokens_after <= reduced.report.tokens_after // 2
    kept = call_model(load(history, again.epoch), strategy=Full(), policy=Auto())
    assert kept.epoch == again.epoch


def test_an_edit_plans_again_but_keeps_a_cut_that_still_fits() -> None:
    history = chat(40, size=400)
    old = call_model(load(history, None), strategy=Slim(), policy=SMALL).epoch
    edited = call_model(load(history[:-2], old, edited=True), strategy=Slim(), policy=SMALL)
    assert (edited.epoch.number, edited.epoch.cut, edited.epoch.reason) == (2, old.cut, "edit")
    short = call_model(load(history[:3], None), strategy=Slim(), policy=SMALL).epoch
    assert call_model(load(history[:3], short, edited=True), strategy=Slim(), policy=SMALL).is_whole


def test_a_history_rewritten_from_before_the_cut_starts_over() -> None:
    old = call_model(load(chat(40, size=400), None), strategy=Slim(), policy=SMALL).epoch
    history = chat(3)
    context = call_model(replace(load(history, None, edited=True), epoch=old), strategy=Slim(), policy=SMALL)
    assert (context.messages, context.epoch.number, context.epoch.cut) == (history, 2, 1)


def test_another_configuration_is_another_epoch() -> None:
    history = chat(40, size=400)
    old = call_model(load(history, None), strategy=Slim(), policy=SMALL).epoch
    wider = Slim(recent_turns=5)
    assert call_model(load(history, old), strategy=wider, policy=SMALL).epoch.reason == "config"
    assert first_seq_needed(old, strategy=Slim(), policy=SMALL) == old.cut
    for strategy, policy in ((wider, SMALL), (Full(), SMALL), (Slim(), LITERAL), (Window(), SMALL)):
        assert first_seq_needed(old, strategy=strategy, policy=policy) == 1
    back = call_model(replace(load(history, None), epoch=old), strategy=Full(), policy=SMALL)
    assert back.messages == history


def test_a_wider_window_brings_back_turns_that_were_cut() -> None:
    history = chat(20)
    old = call_model(load(history, None), strategy=Slim(recent_turns=2), policy=LITERAL).epoch
    wider = Slim(recent_turns=6)
    snapshot = replace(load(history, None), epoch=old)
    assert (old.cut, first_seq_needed(old, strategy=wider, policy=LITERAL)) == (37, 1)
    assert shape(call_model(snapshot, strategy=wider, policy=LITERAL))[2] == "29 user"


def test_a_stride_moves_the_window_every_n_turns() -> None:
    history = chat(20)
    epoch = None
    cuts = []
    for end in range(1, len(history) + 1, 2):
        epoch = call_model(load(history[:end], epoch), strategy=Slim(), policy=Stride(stride=4)).epoch
        cuts.append(epoch.cut)
    assert cuts == [1] * 6 + [9] * 4 + [17] * 4 + [25] * 4 + [33] * 2


def test_a_cold_cache_is_a_free_occasion_to_cut() -> None:
    history = chat(40, size=100)
    epoch = call_model(load(history[:3], None), strategy=Slim(), policy=SMALL).epoch
    warm = load(history, epoch, last_call_at=START)
    assert 1_200 < sum(e.tokens for e in warm.entries) < 2_000
    at_once = call_model(warm, strategy=Slim(), policy=SMALL, now=START + timedelta(seconds=299))
    later = call_model(warm, strategy=Slim(), policy=SMALL, now=START + timedelta(seconds=301))
    assert (at_once.epoch.number, later.epoch.reason) == (1, "cold_cache")


def test_references_are_carried_from_epoch_to_epoch() -> None:
    messages = [m for n in range(60) for m in (user(f"see docs/page_{n}.md"), assistant("x" * 300))]
    history = place(*messages, user("end"))
    epoch = None
    for end in range(1, len(history) + 1, 2):
        epoch = call_model(load(history[:end], epoch), strategy=Slim(), policy=Auto(high=3_000, low=2_000)).epoch
    assert epoch is not None
    assert epoch.number >= 3
    names = {reference.text for reference in epoch.references}
    assert {f"docs/page_{n}.md" for n in range(epoch.cut // 2)} == names


def test_within_an_epoch_the_head_stays_and_the_tail_grows() -> None:
    history = chat(40, size=400)
    epoch = call_model(load(history[:-4], None), strategy=Slim(), policy=SMALL)
    longer = call_model(load(history[:-2], epoch.epoch), strategy=Slim(), policy=SMALL)
    assert rendered(longer)[: len(epoch.messages)] == rendered(epoch)
    assert len(longer.messages) == len(epoch.messages) + 2


def test_report_names_layers_and_the_fate_of_each_turn() -> None:
    context = call_model(
        load(chat(5), None, fixed_tokens=50),
        strategy=Slim(),
        policy=LITERAL,
        material=EpochInputs(terse=DOCUMENT_TERSE),
    )
    assert [layer.name for layer in context.report.layers] == ["instructions", "tools", "activity_log", "tail"]
    assert [(t.turn, t.kept, t.reason) for t in context.report.turns] == [
        (1, "terse", "in the activity log"),
        (2, "terse", "in the activity log"),
        (3, "full", "recent"),
        (4, "full", "recent"),
        (5, "full", "recent"),
    ]
    assert [t.kept for t in report_cut_turns(context.epoch, (1, 2))] == ["terse", "terse"]


def test_an_empty_session_gives_an_empty_context() -> None:
    context = call_model(load((), None), strategy=Slim(), policy=Auto())
    assert (context.messages, context.is_whole) == ((), True)


def test_the_entries_of_a_context_are_the_stores_own() -> None:
    history = work(40)
    context = call_model(load(history, None), strategy=Slim(), policy=SMALL)
    assert all(m in history for m in context.messages if isinstance(m, Entry))
