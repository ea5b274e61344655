"""``### STATE`` extraction: the rule by example and by property."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.text.code_fences import Fences
from tersely.domain.text.state import HEADING, MAX_BLOCK, StateStream, state_text, strip_state

# Small pieces of everything that the rule speaks of, so that random texts are full of it.
TOKENS = st.sampled_from(
    [
        "### STATE",
        "\n### STATE\n",
        "\n\n### STATE  \nGoal: x\n",
        "\r\n### STATE\r\ny",
        "### ST",
        "ATE",
        "#",
        "##",
        "####",
        "\n# Next\n",
        "\n ## Next",
        "\n###\n",
        "\n#### deep\n",
        "\n    # code",
        "\n",
        "\r\n",
        "\r",
        " ",
        "\t",
        "a",
        "b c",
        "Goal: z",
        "```",
        "\n```\n",
        "\n~~~~\n",
        "`",
        "é",
        "\ud83d",
    ]
)
TEXTS = st.lists(TOKENS, max_size=40).map("".join)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def stream(pieces: list[str]) -> tuple[str, tuple[str, ...]]:
    reader = StateStream()
    shown = "".join([reader.feed(piece) for piece in pieces])
    return shown + reader.close(), reader.entries


def by_lines(text: str) -> tuple[str, tuple[str, ...]]:
    """The rule for short texts, told another way: line by line, over the whole text."""
    fences = Fences()
    found: list[str] = []
    shown = ""
    block: str | None = None
    for line, end in re.findall(r"([^\r\n]*)([\r\n]|\Z)", text):
        if not fences.is_inside:
            if block is not None and re.match(r" {0,3}#{1,3}([ \t]|\Z)", line):
                body = block.rstrip(" \t\r\n")
                found.append(body)
                shown += block[len(body) :].lstrip(" \t")
                block = None
            if block is None and re.fullmatch(r"### STATE[ \t]*", line):
                gap = re.search(r"[\r\n](?:[ \t]*[\r\n])*\Z", shown)
                shown = shown[: gap.start()] if gap else shown
                block = ""
        fences.advance(line + end)
        if block is None:
            shown += line + end
        else:
            block += line + end
    if block is not None:
        found.append(block)
    return shown, tuple(entry for entry in map(state_text, found) if entry)


@pytest.mark.parametrize(
    ("text", "shown", "entries"),
    [
        ("plain", "plain", ()),
        ("Done.\n\n### STATE\nGoal: x", "Done.", ("Goal: x",)),
        ("Done.\n\n### STATE\nGoal: x\nContext: y\n\n", "Done.", ("Goal: x\nContext: y",)),
        ("Done.\r\n \r\n### STATE \t\r\nGoal: x\r\n", "Done.", ("Goal: x",)),
        ("### STATE\nGoal: x", "", ("Goal: x",)),
        ("\n\n### STATE\nGoal: x", "", ("Goal: x",)),
        ("a  \n### STATE\nGoal: x", "a  ", ("Goal: x",)),
        ("a\n### STATE\nGoal: x\n\n# Next\nb", "a\n\n# Next\nb", ("Goal: x",)),
        ("a\n### STATE\nGoal: x\n   ##\nb", "a\n   ##\nb", ("Goal: x",)),
        ("a\n### STATE\nGoal: x\n\n#", "a\n\n#", ("Goal: x",)),
        ("a\n### STATE\n1\n\n### STATE\n2", "a", ("1", "2")),
        ("a\n### STATE\n1\n## B\nb\n### STATE\n2\n", "a\n## B\nb", ("1", "2")),
        ("a\n### STATE", "a", ()),
        ("a\n### STATE\n\n", "a", ()),
        ("a\n### STATE\n# Next", "a\n# Next", ()),
        ("a\n### STATE\n\n  - indented\n", "a", ("  - indented",)),
        (
            "a\n### STATE\nx\n#### deep\ny\n#no heading\n####### no\n",
            "a",
            ("x\n#### deep\ny\n#no heading\n####### no",),
        ),
        ("a\n### STATE\n```sh\n# comment\n```\nb\n", "a", ("```sh\n# comment\n```\nb",)),
        ("a\n### STATE\n```sh\n# comment\n```\n# B\n", "a\n# B\n", ("```sh\n# comment\n```",)),
        ("```\n### STATE\nx\n```\n", "```\n### STATE\nx\n```\n", ()),
        ("```\n### STATE\nx\n```\n\n### STATE\ny", "```\n### STATE\nx\n```", ("y",)),
        ("```\n### STATE\nnever closed", "```\n### STATE\nnever closed", ()),
        ("see ### STATE\nx", "see ### STATE\nx", ()),
        ("a\n ### STATE\nx", "a\n ### STATE\nx", ()),
        ("a\n### STATE of things\nx", "a\n### STATE of things\nx", ()),
        ("a\n### STATES\nx", "a\n### STATES\nx", ()),
        ("a\n## STATE\nx", "a\n## STATE\nx", ()),
        ("a\n### state\nx", "a\n### state\nx", ()),
        ("a\n###", "a\n###", ()),
        ("  ### STATE\nx", "  ### STATE\nx", ()),
    ],
)
def test_state_blocks_are_stripped_from_a_text(text: str, shown: str, entries: tuple[str, ...]):
    assert strip_state(text) == (shown, entries)
    assert stream(list(text)) == (shown, entries)
    assert by_lines(text) == (shown, entries)


def test_the_longest_block():
    inside = MAX_BLOCK - len("\n### STATE\n") - 1
    longest = f"a\n{HEADING}\n{'x' * inside}"
    assert strip_state(longest) == ("a", ("x" * inside,))
    too_long = f"{longest}x"
    assert strip_state(too_long) == (too_long, ())
    assert stream(list(too_long)) == (too_long, ())
    # What comes after it may be one again.
    assert strip_state(f"{too_long}\n{HEADING}\ny") == (too_long, ("y",))
    assert stream(list(f"{too_long}\n{HEADING}\ny")) == (too_long, ("y",))
    empty = "a" + "\n" * MAX_BLOCK
    assert stream(list(f"{empty}\n{HEADING}\ny")) == strip_state(f"{empty}\n{HEADING}\ny") == (empty, ("y",))


@given(TEXTS)
def test_state_extraction_equals_the_line_by_line_rule(text: str):
    assert strip_state(text) == by_lines(text)


@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20))
def test_the_cuts_do_not_matter(text: str, cuts: list[int]):
    assert stream(pieces_of(text, cuts)) == strip_state(text)
    assert stream(list(text)) == strip_state(text)


@given(TEXTS, st.lists(st.integers(0, 10_000), max_size=20), st.integers(1, 40))
def test_the_cuts_do_not_matter_at_the_bound(text: str, cuts: list[int], room: int):
    text = "a\n### STATE\n" + "x" * (MAX_BLOCK - len("\n### STATE\n") - room) + text
    assert stream(pieces_of(text, cuts)) == strip_state(text) == stream([text[:-room], *text[-room:]])


@given(TEXTS.filter(lambda text: not re.search(r"^### STATE[ \t]*$", text.replace("\r", "\n"), re.MULTILINE)))
def test_text_without_a_block_is_untouched(text: str):
    assert stream(list(text)) == (text, ())


@given(TEXTS)
def test_no_more_is_held_back_than_the_beginning_of_a_possible_block(text: str):
    reader = StateStream()
    shown = ""
    for end in range(1, len(text) + 1):
        shown += reader.feed(text[end - 1])
        held = reader.held
        assert len(held) < MAX_BLOCK
        assert text[:end].endswith(held)
        line = held.lstrip(" \t\r\n")
        assert held == "" or held[0] in "\r\n#"
        assert line == "" or HEADING.startswith(line) or line.startswith(HEADING) or re.match(r"#{1,3}", line)
        if HEADING not in text[:end]:
            assert shown + held == text[:end]


@given(
    st.lists(st.sampled_from(["a", "b c", "é", "- x", "\n", " y", "#no", "`z`"]), max_size=30).map("".join),
    st.sampled_from(["\n", "\n\n", "\n \n", "\r\n", "\n\n\n"]),
    st.lists(st.sampled_from(["Goal: x", "\n", "a b", "  - y", "é"]), max_size=8).map("".join),
    st.sampled_from(["", "\n# Next\nb", "\n\n## Next"]),
)
def test_a_planted_block_leaves_no_trace(text: str, gap: str, inside: str, rest: str):
    text = text.rstrip()
    entry = state_text(inside)
    block = f"{HEADING}\n{inside}".rstrip()
    assert strip_state(text + gap + block + rest) == (text + rest, (entry,) if entry else ())


def test_a_state_given_with_its_heading_is_the_same_without():
    assert state_text("\n### STATE\nGoal: x\n") == state_text("Goal: x") == "Goal: x"
    assert state_text("### STATE\r\n\r\nGoal: x\r\n") == "Goal: x"
    assert state_text("### STATE") == state_text(" \n") == ""
    assert state_text("### STATE of things") == "### STATE of things"


def test_many_headings_take_linear_time():
    text = "\n### STATE\nx\n##\n" * 20_000
    shown, entries = strip_state(text)
    assert len(entries) == 20_000
    assert shown == "\n##" * 20_000 + "\n"
