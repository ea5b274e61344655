"""Excerpts of files: what an agent may change next stands in the head to the letter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.history.history import Entry, EpochInputs, FileExcerpt
from tersely.domain.messages import Message
from tersely.strategies.epochs.policies import Auto, EveryRequest
from tersely.strategies.head.file_excerpts import (
    LAYER,
    MAX_BEGINNING,
    MAX_CARRIED,
    MAX_CARRIED_TEXT,
    MAX_ITEMS,
    carry_over,
    follow,
    open_items,
)
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


def head_after_a_cut(
    *work: Message, files: int | None = 2_000, last: str = "y", high: int = 3_000, low: int = 2_400
) -> str:
    history = place(user("Begin."), *work, *[assistant("x" * 4 * high), user("Go on."), assistant(last), user("Next?")])
    context = call_model(
        load(history, None), strategy=Slim(files=files), policy=Auto(high=high, low=low), material=EpochInputs()
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


def test_open_items_end_with_the_heading_of_what_follows_if_it_is_near() -> None:
    assert open_items("- [ ] One\n\n---\n\n## Next\n- [x] Done") == "- [ ] One\n\n---\n\n## Next"
    assert open_items("- [ ] One\n\nText\n- [ ] Two\n## Next") == "- [ ] One\n...\n- [ ] Two\n## Next"
    assert open_items("- [ ] One\n" + "Text\n" * 5 + "## Next") == "- [ ] One"


@quick
@given(st.lists(st.sampled_from(["- [ ] One", "* [ ] Two", "- [x] Done", "## Part", "Text", "", "..."]), max_size=20))
def test_open_items_of_open_items_are_the_same(lines: list[str]) -> None:
    items = open_items("\n".join(lines))
    assert open_items(items) == items
    assert [line for line in items.split("\n") if "[ ]" in line] == [line for line in lines if "[ ]" in line]


def test_of_a_plan_with_too_many_items_the_next_ones_stand_in_the_head() -> None:
    plan = "\n\n".join(f"- [ ] Work package {number} of the plan" for number in range(200))
    head = head_after_a_cut(*read(1, "plan.md", plan), files=4_000, high=12_000, low=9_000)

    assert "- [ ] Work package 0 of" in head
    assert "- [ ] Work package 199 of" not in head
    assert MAX_ITEMS // 2 < len(head) / 4 < MAX_ITEMS + 100


def test_the_file_that_is_changed_most_stands_in_the_head_whole() -> None:
    long = "\n".join(f"line {number} of the file" for number in range(400))
    edits = [message for n in range(3) for message in edit(n, "long.py", f"line {n} of", f"changed {n} of")]

    def head(*work: Message) -> str:
        return head_after_a_cut(*work, files=4_000, high=12_000, low=9_000)

    assert "line 399 of the file" in head(*write(9, "long.py", long), *edits)
    assert "line 399 of the file" not in head(*write(9, "long.py", long))
    assert "changed 1 of" in head(*edit(1, "a.py", "one", "changed 1 of"), *write(9, "long.py", long))


def test_a_text_that_had_no_room_is_shown_by_a_later_epoch() -> None:
    strategy, policy = Slim(files=600), Auto(high=3_000, low=2_400)
    long = read(1, "early.py", "early = 1\n" * 100) + read(2, "late.py", "late = 1\n" * 150)
    history = place(user("Begin."), *long, assistant("x" * 12_000), user("Go on."))
    first = call_model(load(history, None), strategy=strategy, policy=policy, material=EpochInputs()).epoch
    new = [*write(3, "late.py", "late = 2"), assistant("y" * 12_000), user("Next?")]
    longer = place(*(e.message for e in history), *new)
    second = call_model(load(longer, first), strategy=strategy, policy=policy, material=EpochInputs()).epoch

    assert [each.path for each in first.excerpts] == ["early.py", "late.py"]
    assert not any("early = 1" in message.text for message in first.head)
    assert any("early = 1" in message.text for message in second.head)


excerpts = st.builds(
    FileExcerpt,
    path=st.sampled_from(["a.py", "b.py", "plan.md"]),
    turn=st.just(1),
    seqs=st.sampled_from([(1,), (9,), (50,), (2, 7), (3, 40)]),
    text=st.sampled_from(["one", "x" * 9_000, "y" * (MAX_CARRIED_TEXT + 1), PLAN, PLAN + "z" * MAX_CARRIED_TEXT, ""]),
)


CHAPTERS = "\n".join(f"## Part {n}\n\nText {n}.\n\n- [ ] Build {n}\n- [ ] Test {n}\n\n---\n" for n in range(4))


def items_after(old: str, new: str) -> str:
    """Return the open items that a plan too long to be carried over shows after an edit."""
    carried = carry_over(follow((), place(*write(1, "plan.md", CHAPTERS + "z" * MAX_CARRIED_TEXT))))
    assert [each.only_items for each in carried] == [True]
    return follow(carried, place(*edit(2, "plan.md", old, new)))[0].text


def test_items_that_were_carried_over_follow_edits_of_the_whole_plan() -> None:
    part = "## Part 1\n\nText 1.\n\n- [ ] Build 1\n- [ ] Test 1\n\n---\n"
    assert part in CHAPTERS

    changed = items_after(part, part.replace("1", "9"))
    assert "- [ ] Test 0\n\n---\n\n## Part 9\n...\n- [ ] Build 9\n- [ ] Test 9\n" in changed
    assert "Build 1" not in changed
    assert "## Part 2\n...\n- [ ] Build 2" in changed.replace("9", "2")
    assert items_after("- [ ] Build 1\n- [ ] Test 1", "- [x] Build 1\n- [x] Test 1").count("[ ]") == 6
    assert items_after("Text 1.\n\n- [ ] Build 1", "Text 1.\n\n- [x] Build 1").count("Build") == 3


def plan_lines(first: int) -> st.SearchStrategy[list[str]]:
    """Lines of a plan; no two are alike, but for empty ones. Numbers begin at ``first``."""
    kinds = st.sampled_from(["- [ ] Item {}", "- [ ] Item {}", "- [x] Done {}", "## Part {}", "Text {}", ""])
    return st.lists(kinds, min_size=1, max_size=12).map(
        lambda lines: [line.format(number) for number, line in enumerate(lines, first)]
    )


@quick
@given(plan_lines(0), plan_lines(100), st.data())
def test_items_that_were_carried_over_are_those_of_the_plan_after_any_edit_of_whole_lines(
    lines: list[str], new: list[str], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(lines) - 1))
    end = data.draw(st.integers(start + 1, len(lines)))
    filler = "z" * MAX_CARRIED_TEXT
    carried = carry_over(follow((), place(*write(1, "plan.md", "\n".join([*lines, filler])))))
    change = edit(2, "plan.md", "\n".join(lines[start:end]), "\n".join(new))
    after = [each.text for each in follow(carried, place(*change)) if each.only_items]

    plan = [*lines[:start], *new, *lines[end:]]
    assert all(line in plan for text in after for line in text.split("\n") if "[ ]" in line)
    assert all(open_items(text) == text for text in after)


def test_items_that_were_carried_over_stay_where_an_edit_has_no_clear_place() -> None:
    items = items_after("Text 7.", "Text 8.")

    assert items.count("[ ]") == 8
    assert items_after("- [ ] Test 3\nText\n- [ ] Build 0", "- [ ] Test 5") == items


def test_the_beginning_of_a_long_text_that_was_written_stands_in_the_head_if_much_room_is_left() -> None:
    long = "\n".join(f"line {number} of the file" for number in range(2_000))

    def head(*work: Message) -> str:
        return head_after_a_cut(*work, files=4_000, high=12_000, low=9_000)

    shown = head(*write(1, "long.py", long))
    assert "line 0 of the file" in shown
    assert "line 1999 of the file" not in shown
    assert MAX_BEGINNING * 3 / 4 < len(shown) / 4 < MAX_BEGINNING + 100
    assert "of the file" not in head(*read(1, "long.py", long))
    others = [message for n in range(2, 5) for message in read(n, f"{n}.py", f"{n}" * 3_600)]
    assert "of the file" not in head(*write(1, "long.py", long), *others)


@quick
@given(st.lists(excerpts, max_size=30).map(tuple))
def test_what_an_epoch_carries_over_is_bounded_and_settled(known: tuple[FileExcerpt, ...]) -> None:
    carried = carry_over(known)

    assert sum(len(each.text) for each in carried) <= MAX_CARRIED
    assert all(0 < len(each.text) <= MAX_CARRIED_TEXT for each in carried)
    assert all(each in known or each.text in open_items(PLAN) for each in carried)
    assert carry_over(carried) == carried


def test_texts_of_changed_files_are_carried_over_first() -> None:
    def text(path: str, *seqs: int) -> FileExcerpt:
        return FileExcerpt(path=path, turn=1, seqs=seqs, text="x" * 12_000)

    known = (text("changed.py", 1, 2), *(text(f"read{n}.py", n) for n in range(3, 9)))
    assert [each.path for each in carry_over(known)] == ["changed.py", *(f"read{n}.py" for n in range(5, 9))]


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
