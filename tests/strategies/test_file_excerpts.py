"""Excerpts of files: what an agent may change next stands in the head to the letter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.history import Entry, EpochInputs
from tersely.domain.messages import Message
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.head.file_excerpts import LAYER, follow, open_items
from tersely.strategies.presets import Slim, parse_strategy, strategy_text
from tests.builders import assistant, call, result, user
from tests.strategies.histories import call_model, clear, load, place
from tests.strategies.test_properties import quick

PLAN = "# Plan\n- [x] Write the parser\n- [ ] Write the printer\n- [ ] Test both\n\nNotes.\n* [ ] Publish"


def read(number: int, path: str, text: str) -> list[Message]:
    return [assistant(None, call(f"r{number}", "read", {"path": path})), result(f"r{number}", text)]


def edit(number: int, path: str, old: str, new: str) -> list[Message]:
    arguments = {"file_path": path, "old_string": old, "new_string": new}
    return [assistant(None, call(f"e{number}", "edit", arguments)), result(f"e{number}", "done")]


def write(number: int, path: str, text: str) -> list[Message]:
    return [assistant(None, call(f"w{number}", "write", {"path": path, "content": text})), result(f"w{number}", "done")]


def head_after_a_cut(*work: Message, files: int | None = 2_000, last: str = "y") -> str:
    history = place(user("Begin."), *work, *[assistant("x" * 12_000), user("Go on."), assistant(last), user("Next?")])
    context = call_model(
        load(history, None), strategy=Slim(files=files), policy=Auto(high=3_000, low=2_400), material=EpochInputs()
    )
    assert context.epoch.cut > len(work)
    return "".join(message.text for message in context.epoch.head if message.layer == LAYER and message.role == "user")


def test_small_reads_and_the_newest_edits_stand_in_the_head() -> None:
    head = head_after_a_cut(
        *read(1, "a.py", "     1\tdef one():\n     2\t    pass"), *edit(2, "b.py", "old", "new = 2")
    )

    assert "--- a.py (t1)\ndef one():\n    pass" in head
    assert "--- b.py (t1)\nnew = 2" in head


def test_edits_change_what_was_read_before() -> None:
    (excerpt, edited) = follow((), place(*read(1, "a.py", "one\ntwo\nthree"), *edit(2, "a.py", "two", "2")))

    assert (excerpt.text, excerpt.seqs) == ("one\n2\nthree", (2, 3))
    assert edited.text == "2"


def test_a_file_that_is_written_anew_replaces_what_was_known() -> None:
    assert [each.text for each in follow((), place(*read(1, "a.py", "old text"), *write(2, "a.py", "new")))] == ["new"]


def test_of_a_long_plan_the_open_items_stand_in_the_head() -> None:
    head = head_after_a_cut(*write(1, "plan.md", PLAN + "\n" + "A long chapter. " * 600))

    assert "- [ ] Write the printer\n- [ ] Test both\n...\n* [ ] Publish" in head
    assert "Write the parser" not in head
    assert "long chapter" not in head
    assert open_items("no list") == ""


def test_excerpts_are_carried_over_and_leave_with_their_messages() -> None:
    history = place(user("Begin."), *read(1, "a.py", "kept"), assistant("x" * 12_000), user("Go on."))
    strategy, policy = Slim(files=2_000), Auto(high=3_000, low=2_400)
    first = call_model(load(history, None), strategy=strategy, policy=policy, material=EpochInputs()).epoch
    longer = place(*(e.message for e in history), assistant("y" * 12_000), user("Next?"))
    second = call_model(load(longer, first), strategy=strategy, policy=policy, material=EpochInputs()).epoch

    assert second.number == 2
    assert [each.text for each in first.excerpts] == [each.text for each in second.excerpts] == ["kept"]
    assert second.without_messages([3]).excerpts == ()


def test_a_cleared_context_has_no_excerpts() -> None:
    history = place(user("Begin."), *read(1, "a.py", "secret"), assistant("x" * 12_000), user("Go on."))
    strategy, policy = Slim(files=2_000), Auto(high=3_000, low=2_400)
    before = call_model(load(history, None), strategy=strategy, policy=policy, material=EpochInputs()).epoch
    assert before.excerpts
    after = clear(history, before, strategy, policy)
    assert after.excerpts == ()
    assert after.head == ()


def test_excerpts_are_on_by_default_and_off_in_literal_contexts() -> None:
    assert "--- a.py (t1)\ntext" in head_after_a_cut(*read(1, "a.py", "text"), files=None)
    history = place(user("Begin."), *read(1, "a.py", "text"), *[user(f"Next {n}?") for n in range(9)])
    literal = call_model(load(history, None), strategy=Slim(), policy=EveryRequest(), material=EpochInputs())
    assert literal.epoch.cut > 3
    assert all(message.layer != LAYER for message in literal.epoch.head)


def test_a_text_that_the_tail_shows_is_not_repeated() -> None:
    head = head_after_a_cut(*read(1, "a.py", "kept = 1"), *read(2, "b.py", "gone = 1"), last="I read kept = 1 again.")
    assert "--- a.py" not in head
    assert "--- b.py (t1)\ngone = 1" in head


def test_with_no_room_there_are_no_excerpts() -> None:
    assert head_after_a_cut(*read(1, "a.py", "text"), files=0) == ""
    assert len({strategy_text(each) for each in (Slim(), Slim(files=0), Slim(files=1))}) == 3
    assert parse_strategy({"name": "slim", "files": 4000}) == Slim(files=4_000)


paths = st.sampled_from(["a.py", "b.py", "plan.md"])
texts = st.sampled_from(["one", "two\nthree", PLAN, "word " * 900, "x" * 30_000, ""])


@quick
@given(st.lists(st.tuples(st.sampled_from(["read", "edit", "write"]), paths, texts, texts), max_size=12))
def test_excerpts_are_bounded_and_quote_what_was_said(work: list[tuple[str, str, str, str]]) -> None:
    messages: list[Message] = []
    for number, (kind, path, one, other) in enumerate(work):
        ways = {"read": read, "write": write}
        messages += edit(number, path, one, other) if kind == "edit" else ways[kind](number, path, one)
    history = place(user("Begin."), *messages, assistant("x" * 12_000), user("Go on."))
    context = call_model(
        load(history, None), strategy=Slim(files=1_000), policy=Auto(high=3_000, low=2_400), material=EpochInputs()
    )
    assert sum(m.tokens for m in context.epoch.head if m.layer == LAYER) <= 1_000 + 20
    assert sum(m.tokens for m in context.messages if isinstance(m, Entry)) <= 3_000 + 20
    literal = call_model(load(history, None), strategy=Slim(files=1_000), policy=EveryRequest(), material=EpochInputs())
    assert not any(message.layer == LAYER for message in literal.epoch.head)
