"""Golden contexts of `tiered` under ``every_request``: Fifth's "Context Manager", and its form under ``auto``."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from msgspec import structs

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, EpochInputs, HeadMessage, PastTurn, Summary
from tersely.domain.history.turns import group_turns
from tersely.domain.tokens import estimate_text
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.planning import build_context, decide
from tersely.strategies.presets import Tiered
from tersely.strategies.prompts import SESSION_MEMORY_TITLE
from tersely.strategies.reduction.levels import is_older, measure_levels
from tersely.strategies.reduction.tiering import LOW_SCORE, score_everything
from tests.builders import assistant, call, result, user
from tests.strategies.histories import START, call_model, chat, load, place, shape

LITERAL = EveryRequest()


def talk(turns: int, *, size: int = 0) -> tuple[Entry, ...]:
    """Turns about one thing, so that none of them is a new task."""
    messages = []
    for turn in range(1, turns + 1):
        messages += [user(f"parser question {turn}"), assistant(f"parser answer {turn}. " + "x" * size)]
    return place(*messages[:-1])


def at(history: tuple[Entry, ...], minutes: float = 0) -> datetime:
    return history[-1].created_at + timedelta(minutes=minutes)


def session_memory(context: Context) -> list[str]:
    text = next((m.text for m in context.messages if isinstance(m, HeadMessage) and m.layer == "session"), "")
    return text.splitlines()[1:]


def seqs(context: Context) -> list[int]:
    return [m.seq for m in context.messages if isinstance(m, Entry)]


# A room in which nothing but working memory has a place.
NARROW = Tiered(total_budget=4_000, session_budget=4_000)


def test_level_3_working_memory_holds_the_last_five_minutes() -> None:
    history = talk(6)
    context = call_model(load(history, None), strategy=NARROW, policy=LITERAL, now=at(history))
    assert seqs(context) == [5, 6, 7, 8, 9, 10, 11]
    assert shape(context)[:2] == ["session/user", "session/assistant"]


def test_level_3_has_a_budget_of_8000_tokens() -> None:
    history = tuple(structs.replace(entry, created_at=START) for entry in talk(6, size=12_000))
    context = call_model(load(history, None), strategy=Tiered(total_budget=4_000), policy=LITERAL, now=START)
    body = [entry for entry in context.messages if isinstance(entry, Entry)]
    assert body[0].seq == 7
    assert sum(entry.tokens for entry in body) <= 8_000


def test_level_2_session_memory_summarises_aged_turns() -> None:
    history = talk(6)
    context = call_model(load(history, None), strategy=NARROW, policy=LITERAL, now=at(history))
    assert session_memory(context) == ["[t1] parser answer 1.", "[t2] parser answer 2."]


def test_level_2_prefers_the_summary_of_a_finished_task() -> None:
    history = talk(6)
    made = Summary(
        first_seq=1, last_seq=2, purpose="task", text="Fixed the parser.", tokens=4, source="model", created_at=START
    )
    context = call_model(
        load(history, None), strategy=NARROW, policy=LITERAL, now=at(history), material=EpochInputs(summaries=(made,))
    )
    assert session_memory(context)[0] == "[t1] Fixed the parser."


def test_level_2_is_compressed_after_thirty_minutes_and_bounded() -> None:
    history = place(user("parser: go"), assistant("word " * 100), user("parser: on"))
    made = Summary(
        first_seq=1, last_seq=2, purpose="task", text="word " * 100, tokens=99, source="model", created_at=START
    )
    lengths = []
    for minutes in (20, 40):
        context = call_model(
            load(history, None),
            strategy=NARROW,
            policy=LITERAL,
            now=at(history, minutes),
            material=EpochInputs(summaries=(made,)),
        )
        lengths.append(len(session_memory(context)[0]))
    assert lengths[0] > 2 * lengths[1]
    many = talk(400)
    tight = replace(NARROW, session_budget=200)
    lines = session_memory(call_model(load(many, None), strategy=tight, policy=LITERAL, now=at(many)))
    assert lines[-1].endswith("more turns are not listed)")
    assert lines[0].startswith("[t3")  # the newest come first when room is short


def test_level_2_relevant_entries_come_first_when_room_is_short() -> None:
    messages = [user("why does lexer.py drop tokens"), assistant("an off by one in lexer.py")]
    for number in range(60):
        messages += [user(f"chat about the weather number {number}"), assistant("it rains " * 12)]
    history = place(*messages, user("what was it with lexer.py?"))
    tight = replace(NARROW, session_budget=300, total_budget=300)
    lines = session_memory(call_model(load(history, None), strategy=tight, policy=LITERAL, now=at(history, 60)))
    assert lines[0] == "[t1] an off by one in lexer.py"
    assert lines[1] > "[t4"  # then the newest


def test_level_4_old_turns_stay_whole_while_there_is_room() -> None:
    messages = [entry.message for entry in talk(6)[:-1]]
    question = user("does lexer.py drop parser tokens")
    history = place(user("why does lexer.py drop tokens"), assistant("an off by one"), *messages, question)
    context = call_model(load(history, None), strategy=Tiered(), policy=LITERAL, now=at(history))
    assert seqs(context)[:3] == [1, 2, 7]  # related; what is neither that nor recent does not fill the room
    assert [line[:4] for line in session_memory(context)] == ["[t2]", "[t3]"]
    full = call_model(load(history, None), strategy=NARROW, policy=LITERAL, now=at(history))
    assert seqs(full)[0] == 7


def test_a_turn_of_low_score_is_summarised_although_there_is_room() -> None:
    """Ages spread the scores on both sides of the limit; nothing else than the score decides, as the room is ample."""
    messages = []
    for turn in range(1, 12):
        topic = "parser" if turn % 2 else "weather"
        messages += [user(f"{topic} question {turn}"), assistant(f"{topic} answer {turn}.")]
    history = place(*messages, user("what about the parser?"))
    now = at(history)
    scores = score_everything(history, (), now)
    low = [number for number, score in scores.items() if score.total < LOW_SCORE]
    old = [turn.number for turn in group_turns(history) if is_older(turn, Tiered().working_age, now)]
    context = call_model(load(history, None), strategy=Tiered(), policy=LITERAL, now=now)
    shown = {entry.turn for entry in context.messages if isinstance(entry, Entry)}
    assert low
    assert set(old) - set(low)  # some that are old are kept for their score
    assert set(range(1, 13)) - shown == set(low) & set(old)
    assert [int(line[2 : line.index("]")]) for line in session_memory(context)] == sorted(set(low) & set(old))


def test_repeated_error_retrieves_the_turn_that_handled_it() -> None:
    failing = "Traceback (most recent call last)\nOSError: [Errno 98] address {} already in use"
    messages = [
        user("start the server"),
        assistant(None, call("c1")),
        result("c1", failing.format(8484)),
        assistant("A stale process held the port; I ended it by its pid file."),
    ]
    for number in range(12):
        messages += [user(f"chat about the weather number {number}"), assistant("it rains " * 12)]
    history = place(*messages, user("begin anew"), assistant(None, call("c2")), result("c2", failing.format(9090)))
    narrow = replace(NARROW, total_budget=5_000)
    context = call_model(load(history, None), strategy=narrow, policy=LITERAL, now=at(history, 60))
    assert seqs(context)[:4] == [1, 2, 3, 4]
    other = place(*messages, user("begin anew"), assistant(None, call("c2")), result("c2", "listening"))
    assert 1 not in seqs(call_model(load(other, None), strategy=narrow, policy=LITERAL, now=at(other, 60)))


def test_level_1_pinned_messages_are_permanent() -> None:
    history = talk(9)
    pinned = (history[0], structs.replace(history[1], pinned=True), *history[2:])
    context = call_model(load(pinned, None), strategy=NARROW, policy=LITERAL, now=at(history))
    assert seqs(context)[0] == 2


def test_levels_are_measured() -> None:
    history = talk(9)
    pinned = (history[0], structs.replace(history[1], pinned=True), *history[2:])
    context = call_model(load(pinned, None), strategy=NARROW, policy=LITERAL, now=at(history))
    levels = {level.name: level for level in measure_levels(context)}
    working = [seq for seq in seqs(context) if seq >= context.epoch.cut]
    assert {name: level.messages for name, level in levels.items()} == {
        "permanent": 1,
        "session": 2,
        "working": len(working),
        "volatile": 0,
    }
    assert sum(level.tokens for level in levels.values()) == context.report.tokens_after
    topic = place(
        user("palette?"), assistant("warm greens"), *[e.message for e in talk(9)[:-1]], user("which palette?")
    )
    back = call_model(load(topic, None), strategy=Tiered(), policy=LITERAL, now=at(topic))
    volatile = next(level for level in measure_levels(back) if level.name == "volatile")
    assert (volatile.messages, volatile.tokens) == (2, topic[0].tokens + topic[1].tokens)


def test_level_4_has_the_budget_that_permanent_memory_leaves() -> None:
    messages = [user("why does lexer.py drop tokens"), assistant("an off by one " + "x" * 10_000)]
    rules = [user("parser rules"), assistant("rule " * 2_500)]
    history = place(*messages, *rules, *[e.message for e in talk(6)[:-1]], user("does lexer.py drop parser tokens"))
    pinned = tuple(structs.replace(entry, pinned=entry.seq == 4) for entry in history)
    narrow = Tiered(total_budget=5_000, session_budget=500)
    shown = [
        seqs(call_model(load(each, None), strategy=narrow, policy=LITERAL, now=at(each)))[:2]
        for each in (history, pinned)
    ]
    assert shown == [[1, 2], [4, 9]]


def pressed(question: str, *, minutes: float = 0) -> tuple[Entry, ...]:
    """Turns of more than 80 % of the total budget, and a question after a pause."""
    history = (*talk(5, size=14_000)[:-1], *place(*[e.message for e in talk(5)[:-1]], user(question))[-1:])
    last = history[-1]
    return (*history[:-1], structs.replace(last, created_at=last.created_at + timedelta(minutes=minutes)))


def test_a_new_task_clears_volatile_memory_and_compresses_the_previous_task() -> None:
    history = pressed("New task: write a sonnet about autumn")
    context = call_model(load(history, None), strategy=Tiered(), policy=LITERAL, now=at(history))
    assert seqs(context) == [9]
    assert [line[:4] for line in session_memory(context)] == ["[t1]", "[t2]", "[t3]", "[t4]"]


def test_nothing_is_cleared_while_the_budget_is_not_under_pressure() -> None:
    history = (*talk(3)[:-1], *place(*[e.message for e in talk(3)[:-1]], user("New task: a sonnet"))[-1:])
    context = call_model(load(history, None), strategy=Tiered(), policy=LITERAL, now=at(history))
    assert seqs(context) == [1, 2, 3, 4, 5]


def test_a_follow_up_that_shares_no_word_keeps_working_memory() -> None:
    for question in ("continue", "yes", "go on", "Please fix that", "why?", "hmm, looks odd to me"):
        history = pressed(question)
        context = call_model(load(history, None), strategy=Tiered(), policy=LITERAL, now=at(history))
        assert seqs(context)[-3:] == [7, 8, 9]
        assert seqs(context) != [9]


def test_a_long_message_without_any_tie_is_a_new_task_after_a_pause_only() -> None:
    sonnet = (
        "Draft a marketing campaign for a bakery in Lisbon: three posters, radio spots during breakfast, a loyalty "
        "card, an opening festival with musicians, free pastries, balloons, and vouchers for neighbours."
    )
    cleared = {
        minutes: seqs(
            call_model(
                load(pressed(sonnet, minutes=minutes), None),
                strategy=replace(Tiered(), working_age=600),
                policy=LITERAL,
                now=at(pressed(sonnet, minutes=minutes)),
            )
        )
        == [9]
        for minutes in (1, 30)
    }
    assert cleared == {1: False, 30: True}


def test_a_past_topic_is_retrieved_whole_and_in_order() -> None:
    history = talk(9)
    epoch = call_model(load(history[:13], None), strategy=NARROW, policy=LITERAL, now=at(history[:13])).epoch
    assert epoch.cut > 3
    past = PastTurn(turn=1, entries=history[:2], relevance=0.9)
    context = call_model(
        load(history, epoch),
        strategy=Tiered(),
        policy=LITERAL,
        now=at(history),
        material=EpochInputs(past_turns=(past,)),
    )
    assert seqs(context)[:2] == [1, 2]
    assert context.epoch.retrieved[0] == 1
    # A later request of the epoch has the turn loaded as what the epoch keeps.
    again = build_context(load(history, context.epoch), context.epoch, strategy=Tiered(), encode=estimate_text)
    assert seqs(again) == seqs(context)


def test_an_unrelated_past_stays_away() -> None:
    history = talk(9)
    epoch = call_model(load(history[:13], None), strategy=NARROW, policy=LITERAL, now=at(history[:13])).epoch
    past = PastTurn(turn=1, entries=history[:2], relevance=0.2)
    context = call_model(
        load(history, epoch), strategy=NARROW, policy=LITERAL, now=at(history), material=EpochInputs(past_turns=(past,))
    )
    assert 1 not in seqs(context)


def test_under_auto_80_percent_of_the_total_is_the_limit() -> None:
    small = load(chat(13, size=4_000), None)
    context = call_model(small, strategy=Tiered(), policy=Auto())
    assert context.is_whole
    assert context.report.tokens_after <= 12_800
    grown = load(chat(14, size=4_000), context.epoch)
    decision = decide(grown, strategy=Tiered(), policy=Auto(), now=START)
    assert getattr(decision, "reason", "") == "high_watermark"
    compressed = call_model(grown, strategy=Tiered(), policy=Auto())
    left = [int(line[2 : line.index("]")]) for line in session_memory(compressed)]
    assert left[0] == 1
    assert left[-1] < 9  # the older ones, one line each
    assert set(range(9, 15)) <= {m.turn for m in compressed.messages if isinstance(m, Entry)}
    assert compressed.report.tokens_after < context.report.tokens_after


def test_title_precedes_the_memory() -> None:
    history = talk(6)
    context = call_model(load(history, None), strategy=NARROW, policy=LITERAL, now=at(history))
    head = context.messages[0]
    assert isinstance(head, HeadMessage)
    assert head.text.splitlines()[0] == SESSION_MEMORY_TITLE
