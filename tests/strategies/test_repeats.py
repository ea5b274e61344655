"""Repeated text is sent once: without loss, without changing what was sent, and only where it is allowed."""

from __future__ import annotations

import time
from itertools import pairwise
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.domain.history.context import Context
from tersely.domain.history.history import Entry, Epoch, EpochInputs, Repeats
from tersely.domain.messages import Message
from tersely.domain.tokens import estimate_text
from tersely.strategies.epochs.policies import Auto, EveryRequest, Policy
from tersely.strategies.presets import Compact, Full, Slim, Strategy, Tiered, Trim, Window
from tersely.strategies.reduction.repeats import BEGIN, carry_over, expand, fold_entries
from tests.builders import assistant, call, result, user
from tests.strategies.histories import call_model, load, place
from tests.strategies.test_properties import quick

FILE = [f"def function_{n}(argument: int) -> int: return argument + {n}" for n in range(40)]
NUMBERED = "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(FILE, start=1))
PLAIN = "\n".join(FILE)


def texts(entries: tuple[Entry, ...]) -> list[str]:
    return [each.text for entry in entries for each in entry.message.results]


def fold(*messages: Message) -> tuple[Entry, ...]:
    return fold_entries(place(*messages), encode=estimate_text)


def read(number: int, text: str, *, path: str = "src/app.py", name: str = "read", **more: object) -> list[Message]:
    return [assistant("", call(f"c{number}", name, {"path": path, **more})), result(f"c{number}", text)]


# Few different lines, so that histories repeat themselves; some look like numbers, references or nothing.
lines = st.one_of(
    st.sampled_from(FILE[:9]),
    st.sampled_from(
        [
            "",
            "}",
            "12\tx",
            "007\tx",
            "  3→y",
            "a\tb",
            "1\u0663\tx",
            "[Repeated text: lines 1 to 4 of the result of f()]",
        ]
    ),
)


@st.composite
def listings(draw: st.DrawFn) -> str:
    """A text: pieces of one file in order, with or without numbers, and lines of all kinds between them."""
    out: list[str] = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, 30))
        piece = FILE[first : first + draw(st.integers(0, 20))]
        start = draw(st.sampled_from([0, first + 1, 95, 998]))
        width, mark = draw(st.sampled_from([(6, "\t"), (0, "\t"), (6, "→"), (3, "→")]))
        out += [f"{start + n:>{width}}{mark}{line}" for n, line in enumerate(piece)] if start else piece
        out += draw(st.lists(lines, max_size=5))
    return "\n".join(out)


@st.composite
def histories(draw: st.DrawFn) -> list[list[Message]]:
    """Batches: the new messages of each call."""
    batches: list[list[Message]] = [[user("Begin.")]]
    for number in range(draw(st.integers(1, 8))):
        path = draw(st.sampled_from(["a.py", "b.py", "c]d.py"]))
        name = draw(st.sampled_from(["read", "write", "bash"]))
        content = {"content": draw(listings())} if name == "write" else {}
        batches.append(read(number, draw(listings()), path=path, name=name, **content))
        if draw(st.booleans()):
            batches[-1].append(user("Go on."))
    return batches


@quick
@given(histories())
def test_references_give_the_original_back(batches: list[list[Message]]) -> None:
    entries = place(*(message for batch in batches for message in batch))
    folded = fold_entries(entries, encode=estimate_text)
    assert texts(expand(folded)) == texts(entries)
    assert all(after.tokens <= before.tokens for before, after in zip(entries, folded, strict=True))


def play(batches: list[list[Message]], strategy: Strategy, policy: Policy, *, folds: bool = True) -> list[Context]:
    messages: list[Message] = []
    epoch: Epoch | None = None
    contexts: list[Context] = []
    for number, batch in enumerate(batches):
        messages += batch
        snapshot = replace(load(place(*messages), epoch, calls=number), folds_repeats=folds)
        context = call_model(snapshot, strategy=strategy, policy=policy, material=EpochInputs())
        epoch = context.epoch
        contexts.append(context)
    return contexts


def shown(context: Context) -> list[str]:
    return [m.prefix + repr(m.message) if isinstance(m, Entry) else m.text for m in context.messages]


every_strategy = st.sampled_from([Full(), Slim(), Window(), Trim(), Compact(), Tiered(total_budget=3_000)])


@quick
@given(histories(), every_strategy, st.sampled_from([Auto(), Auto(high=2_000, low=800), EveryRequest()]))
def test_what_was_sent_never_changes_within_an_epoch(
    batches: list[list[Message]], strategy: Strategy, policy: Policy
) -> None:
    for first, second in pairwise(play(batches, strategy, policy)):
        if first.epoch.number == second.epoch.number and not (first.must_answer or second.must_answer):
            before = shown(first)
            assert shown(second)[: len(before)] == before


def price(contexts: list[Context], *, write: float, read: float) -> float:
    """The price of the messages with a perfect cache of the request before."""
    total, before = 0.0, list[str]()
    for context in contexts:
        sent = shown(context)
        same = next((n for n, (one, other) in enumerate(zip(sent, before, strict=False)) if one != other), None)
        same = min(len(sent), len(before)) if same is None else same
        sizes = [message.tokens for message in context.messages]
        total += read * sum(sizes[:same]) + write * sum(sizes[same:])
        before = sent
    return total


@quick
@given(histories(), every_strategy, st.sampled_from([Auto(), Auto(high=2_000, low=800), EveryRequest()]))
def test_references_make_no_session_dearer(batches: list[list[Message]], strategy: Strategy, policy: Policy) -> None:
    without, with_references = (play(batches, strategy, policy, folds=folds) for folds in (False, True))

    epochs = [[(context.epoch.number, context.epoch.cut) for context in each] for each in (without, with_references)]
    assert epochs[0] == epochs[1]
    for write, read in ((1.25, 0.1), (1.0, 0.5), (1.0, 1.0), (1.0, 0.0)):
        dear = price(without, write=write, read=read)
        assert price(with_references, write=write, read=read) <= dear + 1e-9


@quick
@given(histories(), every_strategy)
def test_contexts_hold_what_their_references_point_at(batches: list[list[Message]], strategy: Strategy) -> None:
    originals = {entry.seq: entry for entry in place(*(message for batch in batches for message in batch))}
    for context in play(batches, strategy, Auto(high=2_000, low=800)):
        entries = tuple(message for message in context.messages if isinstance(message, Entry))
        whole = [(e, originals[e.seq]) for e in expand(entries) if e.is_folded and not context.epoch.tiers]
        for entry, original in whole:
            assert entry.message.results == original.message.results


def test_a_file_that_is_read_again_is_a_reference() -> None:
    folded = fold(user("Read."), *read(1, NUMBERED), *read(2, NUMBERED, offset=1))
    assert texts(folded)[1] == "[Repeated text: lines numbered 1 to 40 of the result of read(path=src/app.py)]"
    assert folded[-1].tokens < folded[2].tokens / 4


def test_numbers_of_lines_are_no_difference() -> None:
    written = [assistant("", call("c0", "write", {"path": "src/app.py", "content": PLAIN})), result("c0", "ok")]
    moved = "\n".join(f"{n:>6}\t{line}" for n, line in enumerate(FILE, start=7))
    source = "the argument content of write(path=src/app.py)"
    folded = fold(user("Write."), *written, *read(1, NUMBERED))
    assert texts(folded)[1] == f'[Repeated text: lines 1 to 40 of {source}, numbered from "     1\t"]'
    folded = fold(user("Write."), *written, *read(1, moved, name="view"))
    assert texts(folded)[1].endswith('numbered from "     7\t"]')


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"timeout": 9, "command": "b" * 100}, f"read(command={'b' * 80}..., timeout=9)"),
        ({"path": f"/home/{'deep/' * 20}app.py"}, f"read(path=...{('deep/' * 20)[-74:]}app.py)"),
        ({"command": f"cat {'a' * 100}"}, f"read(command=cat {'a' * 76}...)"),
        ({"path": "b.py", "note": "a" * 100}, "read(path=b.py)"),
    ],
    ids=["timeout", "path", "command", "both"],
)
def test_calls_with_long_arguments_have_a_name(arguments: dict[str, object], name: str) -> None:
    first = [assistant("", call("c1", "read", arguments)), result("c1", PLAIN)]
    folded = fold(user("Read."), *first, *read(2, PLAIN, name="view"))
    assert texts(folded)[1] == f"[Repeated text: lines 1 to 40 of the result of {name}]"


def test_digits_of_other_scripts_are_no_numbers_of_lines() -> None:
    other = "\n".join(f"1{chr(0x660 + n)}\t{line}" for n, line in enumerate(FILE[:10]))
    entries = place(user("Read."), *read(1, PLAIN), *read(2, other, path="b.txt"))
    assert texts(expand(fold_entries(entries, encode=estimate_text))) == texts(entries)


def test_whoever_asks_twice_gets_the_whole_text() -> None:
    folded = fold(user("Read."), *read(1, PLAIN), *read(2, PLAIN), *read(3, PLAIN), *read(4, PLAIN))
    assert [BEGIN in text for text in texts(folded)] == [False, True, False, True]


def run_command(number: int, text: str, command: str = "cat src/app.py") -> list[Message]:
    return [assistant("", call(f"c{number}", "bash", {"command": command})), result(f"c{number}", text)]


def test_whoever_asks_twice_by_another_tool_gets_the_whole_text() -> None:
    folded = fold(user("Read."), *read(1, NUMBERED), *read(2, NUMBERED), *run_command(3, PLAIN), *read(4, PLAIN))
    assert [BEGIN in text for text in texts(folded)] == [False, True, False, True]


def test_a_command_that_prints_mostly_new_text_refers_to_the_rest() -> None:
    new = "\n".join(f"new line {n} of a log that has not been printed before" for n in range(12))
    logs = [run_command(n, f"{PLAIN[:600]}\n{new.replace('new', f'{n}th')}", f"make test {n}") for n in range(3)]
    folded = fold(user("Run."), *logs[0], *logs[1], *logs[2])
    assert [BEGIN in text for text in texts(folded)] == [False, True, False]
    other = run_command(3, f"{PLAIN}\n{new}", "make lint")
    folded = fold(user("Run."), *logs[0], *logs[1], *read(8, PLAIN[900:]), *other)
    assert BEGIN in texts(folded)[-1]


def test_a_section_of_a_file_stays_whole_if_only_parts_stand_above() -> None:
    upper, section, whole = "\n".join(FILE[:20]), "\n".join(FILE[10:35]), f"{PLAIN}\n[20 more lines]"
    assert BEGIN not in texts(fold(user("Read."), *read(1, upper), *read(2, section)))[-1]
    # A command's output is no text that an edit must quote.
    assert BEGIN in texts(fold(user("Read."), *read(1, upper), *run_command(2, section)))[-1]
    assert texts(fold(user("Read."), *read(1, PLAIN), *read(2, whole)))[-1].endswith(")]\n[20 more lines]")


@quick
@given(
    st.lists(
        st.tuples(
            st.sampled_from([read(0, PLAIN), read(0, NUMBERED, name="view"), run_command(0, PLAIN)]),
            st.integers(0, 12_000),
        ),
        min_size=3,
        max_size=8,
    ),
    every_strategy,
    st.sampled_from([Auto(), Auto(high=2_000, low=800), Auto(high=5_000, low=2_500), EveryRequest()]),
)
def test_text_that_was_replaced_is_sent_whole_next_whatever_cuts_fall_between(
    asked: list[tuple[list[Message], int]], strategy: Strategy, policy: Policy
) -> None:
    batches: list[list[Message]] = [[user("Begin.")]]
    for number, (messages, size) in enumerate(asked):
        called = [replace(messages[0].calls[0], id=f"c{number}")]
        filler = run_command(100 + number, f"{number} " * (size // 2), f"make {number}")
        batches.append([assistant("", *called), result(f"c{number}", messages[1].results[0].text)])
        batches.append([*filler, user("Go on.")])
    contexts = play(batches, strategy, policy)[1::2]

    newest = [next((m for m in reversed(c.messages) if isinstance(m, Entry)), None) for c in contexts]
    replaced = [entry is not None and entry.is_folded for entry in newest]
    assert not any(one and other for one, other in pairwise(replaced))


@pytest.mark.parametrize(
    "again",
    [user(PLAIN), assistant(PLAIN), assistant("", call("c2", "write", {"path": "b.py", "content": PLAIN}))],
    ids=["user", "model", "arguments"],
)
def test_only_results_are_shortened(again: Message) -> None:
    folded = fold(user("Read."), *read(1, PLAIN), again)
    assert folded[-1].message == again


def test_small_results_and_short_runs_stay() -> None:
    small = "\n".join(FILE[:6])
    assert len(small) < 400
    mixed = "\n".join(line for n, each in enumerate(FILE) for line in ([each] if n % 3 else [each, f"new {n}"]))
    folded = fold(user("Read."), *read(1, PLAIN), *read(2, small, path="b.py"), *read(3, mixed, path="c.py"))
    assert BEGIN not in "".join(texts(folded))


def test_results_of_terselys_own_tools_stay() -> None:
    entries = place(user("Read."), *read(1, PLAIN), *read(2, PLAIN, name="context_search"))
    own = (*entries[:-1], replace(entries[-1], is_ours=True))
    assert texts(fold_entries(own, encode=estimate_text))[1] == PLAIN


def test_an_epoch_that_loses_the_first_copy_writes_it_out() -> None:
    long = PLAIN + "\n" + "x" * 3_000
    batches = [[user("Read.")], read(1, long), read(2, PLAIN), read(3, "y" * 2_800, path="b.py"), [user("Next?")]]
    contexts = play(batches, Slim(references=0, files=0), Auto(high=2_200, low=1_650))

    def copies(context: Context) -> list[str]:
        return texts(tuple(m for m in context.messages if isinstance(m, Entry)))

    assert BEGIN in copies(contexts[2])[1]
    assert contexts[-1].epoch.cut == 4
    assert copies(contexts[-1])[0] == PLAIN


def test_a_second_ask_after_a_cut_gets_the_whole_text() -> None:
    long = PLAIN + "\n" + "x" * 3_000
    fill = run_command(3, "y" * 2_800, "make")
    batches = [[user("Read.")], read(1, long), read(2, PLAIN), fill, [user("Next?")], run_command(4, PLAIN)]
    contexts = play(batches, Slim(references=0, files=0), Auto(high=2_200, low=1_650))

    assert BEGIN in texts(tuple(m for m in contexts[2].messages if isinstance(m, Entry)))[-1]
    assert contexts[4].epoch.cut > contexts[2].epoch.cut
    # Its first copy has left the context, the second one is whole, and so is the third.
    assert [t for t in texts(tuple(m for m in contexts[5].messages if isinstance(m, Entry))) if "def" in t] == [
        PLAIN
    ] * 2


def test_a_text_that_was_whole_for_a_second_ask_stays_whole_after_a_cut() -> None:
    long = PLAIN + "\n" + "x" * 3_000
    fill = run_command(4, "y" * 2_800, "make")
    batches = [[user("Read.")], read(1, long), read(2, PLAIN), run_command(3, PLAIN), fill, [user("Next?")]]
    contexts = play(batches, Slim(references=0, files=0), Auto(high=3_000, low=2_450))

    assert contexts[-1].epoch.repeats is not None
    assert contexts[-1].epoch.cut == 4
    assert [BEGIN in text for text in texts(tuple(m for m in contexts[-1].messages if isinstance(m, Entry)))[:2]] == [
        False,
        False,
    ]


@pytest.mark.parametrize("stored", [b"\x01", b"\x01\x02\x03\x04\x05"])
def test_contexts_are_made_from_any_stored_checksums(stored: bytes) -> None:
    entries = place(user("Read."), *read(1, PLAIN), *read(2, PLAIN))
    earlier = Repeats(replaced=stored)
    assert fold_entries(entries, earlier, encode=estimate_text) == fold_entries(entries, encode=estimate_text)
    assert carry_over(entries, earlier).replaced[:-4].startswith(stored[: len(stored) // 4 * 4])


def test_checksums_are_stored_in_one_byte_order() -> None:
    entries = place(user("Read."), *read(1, PLAIN), *read(2, PLAIN))
    stored = carry_over(entries, None).replaced
    assert stored[:4] == crc32("\n".join(FILE[:4]).encode()).to_bytes(4, "little")


def test_time_is_linear_in_the_text() -> None:
    def seconds(lines_each: int) -> float:
        text = "\n".join(f"line {n % 7} of {lines_each}" for n in range(lines_each))
        other = "\n".join(f"line {n % 7} of {lines_each}" + "!" * (n % 5 == 0) for n in range(lines_each))
        entries = place(user("Read."), *read(1, text), *read(2, other, path="b.py"), *read(3, text, path="c.py"))
        best = 60.0
        for _ in range(3):
            started = time.process_time()
            fold_entries(entries, encode=estimate_text)
            best = min(best, time.process_time() - started)
        return best

    # Eight times the text; a quadratic fold takes 64 times as long.
    assert seconds(16_000) < 30 * max(seconds(2_000), 0.002)
