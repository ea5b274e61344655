"""Golden contexts of `window`: std::slop under ``every_request``, and its form under ``auto``."""

from __future__ import annotations

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, EpochInputs, HeadMessage
from tersely.domain.messages import Message
from tersely.strategies import prompts
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.presets import Window
from tests.builders import assistant, call, result, user
from tests.strategies.histories import call_model, chat, load, place, shape, work

LITERAL = EveryRequest()
NOTES = EpochInputs(state="### STATE\nGoal: ship it", scratchpad="- [ ] test\n- [x] build")


def results_of(context: Context) -> dict[int, str]:
    return {m.seq: m.message.results[0].text for m in context.messages if isinstance(m, Entry) and m.message.results}


def steps(count: int, size: int) -> list[Message]:
    messages = []
    for number in range(count):
        messages += [assistant(None, call(f"c{number}")), result(f"c{number}", "r" * size)]
    return messages


def test_1_selection_the_last_n_groups() -> None:
    assert shape(call_model(load(chat(14), None), strategy=Window(), policy=LITERAL)) == [
        f"{seq} {'user' if seq % 2 else 'assistant'}" for seq in range(9, 28)
    ]


def test_1_a_context_size_of_0_is_the_full_history() -> None:
    context = call_model(load(chat(40), None), strategy=Window(context_size=0), policy=LITERAL)
    assert len(context.messages) == 79


def test_1_strict_chronological_order() -> None:
    context = call_model(load(chat(14), None), strategy=Window(), policy=LITERAL)
    seqs = [m.seq for m in context.messages if isinstance(m, Entry)]
    assert seqs == sorted(seqs)


def test_2_truncation_of_the_active_group_five_recent_at_5000_older_at_1000() -> None:
    history = place(user("go"), *steps(7, 9_000))
    found = results_of(call_model(load(history, None), strategy=Window(), policy=LITERAL))
    kept = [len(text.partition("... [TRUNCATED")[0]) for text in found.values()]
    assert kept == [1_000, 1_000, 5_000, 5_000, 5_000, 5_000, 5_000]


def test_2_truncation_of_inactive_groups_at_300() -> None:
    history = place(user("go"), *steps(2, 9_000), assistant("done"), user("next"))
    found = results_of(call_model(load(history, None), strategy=Window(), policy=LITERAL))
    assert [len(text.partition("... [TRUNCATED")[0]) for text in found.values()] == [300, 300]


def test_2_hint_is_the_documents_with_query_db_and_absent_without_tools() -> None:
    history = place(user("go"), *steps(1, 9_000), assistant("done"), user("next"))
    with_tool = results_of(call_model(load(history, None, read_back="query_db"), strategy=Window(), policy=LITERAL))
    hint = '... [TRUNCATED. Use query_db(sql="SELECT content FROM messages WHERE id=3") to see full output]'
    assert with_tool[3] == "r" * 300 + hint
    without = results_of(call_model(load(history, None), strategy=Window(), policy=LITERAL))
    assert without[3] == "r" * 300 + "... [TRUNCATED 9000 characters to 300]"


def test_3_layers_state_then_scratchpad_then_history() -> None:
    context = call_model(load(chat(12), None), strategy=Window(), policy=LITERAL, material=NOTES)
    assert shape(context)[:5] == ["state/user", "state/assistant", "scratchpad/user", "scratchpad/assistant", "5 user"]
    state, _, scratchpad, _ = context.messages[:4]
    assert isinstance(state, HeadMessage)
    assert isinstance(scratchpad, HeadMessage)
    assert state.text == f"{prompts.STATE_TITLE}\n{NOTES.state}"
    assert scratchpad.text == f"{prompts.SCRATCHPAD_TITLE}\n{NOTES.scratchpad}"


def test_3_empty_layers_are_omitted() -> None:
    context = call_model(load(chat(2), None), strategy=Window(), policy=LITERAL)
    assert shape(context) == ["1 user", "2 assistant", "3 user"]


def test_under_auto_a_short_conversation_is_sent_whole_and_untouched() -> None:
    history = place(user("go"), *steps(2, 9_000), assistant("done"), user("next"))
    context = call_model(load(history, None), strategy=Window(), policy=Auto())
    assert context.is_whole
    assert context.messages == history


def test_under_auto_results_keep_their_tier_for_the_whole_epoch() -> None:
    policy = Auto(high=8_000, low=7_000)
    history = work(9, size=4_000)
    first = call_model(load(history, None), strategy=Window(), policy=policy)
    assert any(entry.is_shortened for entry in first.messages if isinstance(entry, Entry))
    more = (*history, *place(*[e.message for e in history], assistant(None, call("n")), result("n", "x" * 900))[19:])
    second = call_model(load(more, first.epoch), strategy=Window(), policy=policy)
    assert second.epoch.number == first.epoch.number
    assert second.messages[: len(first.messages)] == first.messages


def test_names_of_shortened_messages_are_in_the_index_of_names() -> None:
    messages = [assistant(None, call("c1")), result("c1", "x" * 5_000 + " src/deep/module_seven.py")]
    history = place(user("go"), *messages, assistant("done"), user("next " + "y" * 6_000))
    context = call_model(load(history, None), strategy=Window(references=300), policy=Auto(high=2_500, low=1_800))
    index = next(m.text for m in context.messages if isinstance(m, HeadMessage) and m.layer == "references")
    assert "t1: src/deep/module_seven.py" in index
