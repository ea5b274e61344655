"""``<terse>`` extraction: the rule by example and by property."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.domain.text.terse import CLOSE, MAX_TAG, OPEN, TerseStream, strip_terse

# Small pieces of everything that the rule speaks of, so that random texts are full of it.
TOKENS = st.sampled_from(
    [
        "<terse>",
        "</terse>",
        "<",
        ">",
        "<ter",
        "se>",
        "/",
        "a",
        "b c",
        "\n",
        "\r\n",
        "\r",
        " ",
        "   ",
        "    ",
        "```",
        "~~~",
        "`",
        "````",
        "```py",
        "\n```\n",
        "\n~~~~\n",
        "é",
        "\ud83d",
        "<b>",
        "</b>",
        "<terse",
        "<<terse>x</terse>",
        "\t",
    ]
)
TEXTS = st.lists(TOKENS, max_size=40).map("".join)


# Without code a whole text takes a shorter way.
PLAIN_TEXTS = st.lists(
    st.sampled_from(
        ["<terse>", "</terse>", "<", "se>", "a", "b c", "\n", " ", "~~", "é", "x" * 1_990, "<terse>y</terse>"]
    ),
    max_size=25,
).map("".join)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


def stream(pieces: list[str]) -> tuple[str, tuple[str, ...]]:
    reader = TerseStream()
    shown = "".join([reader.feed(piece) for piece in pieces])
    return shown + reader.close(), reader.entries


@pytest.mark.parametrize(
    ("text", "shown", "entries"),
    [
        ("plain", "plain", ()),
        ("a <terse>did x</terse> b", "a  b", ("did x",)),
        ("a\n<terse>did\n  x </terse>", "a\n", ("did x",)),
        ("<terse>1</terse>mid<terse>2</terse>", "mid", ("1", "2")),
        ("<terse></terse><terse> \n</terse>x", "x", ()),
        ("<terse>a < b > c <b>d</b></terse>!", "!", ("a < b > c <b>d</b>",)),
        ("<terse>a <terse>b</terse> c</terse>", " c</terse>", ("a <terse>b",)),
        ("<<terse>x</terse>>", "<>", ("x",)),
        ("<terse>never closed", "<terse>never closed", ()),
        ("</terse> alone", "</terse> alone", ()),
        ("<TERSE>x</TERSE>", "<TERSE>x</TERSE>", ()),
        ("<terse >x</terse>", "<terse >x</terse>", ()),
        ("```\n<terse>x</terse>\n```\n", "```\n<terse>x</terse>\n```\n", ()),
        ("```\ncode\n```\n<terse>x</terse>", "```\ncode\n```\n", ("x",)),
        ("```\ncode\n```   \r\n<terse>x</terse>", "```\ncode\n```   \r\n", ("x",)),
        ("````\n```\n<terse>x</terse>", "````\n```\n<terse>x</terse>", ()),
        ("~~~\n```\n<terse>x</terse>", "~~~\n```\n<terse>x</terse>", ()),
        ("~~~ a`b\n<terse>x</terse>", "~~~ a`b\n<terse>x</terse>", ()),
        ("```a`b\n<terse>x</terse>", "```a`b\n", ("x",)),
        ("   ```\n<terse>x</terse>", "   ```\n<terse>x</terse>", ()),
        ("    ```\n<terse>x</terse>", "    ```\n", ("x",)),
        ("``\n<terse>x</terse>", "``\n", ("x",)),
        ("use ``` here <terse>x</terse>", "use ``` here ", ("x",)),
        ("```py <terse>x</terse>", "```py <terse>x</terse>", ()),
        # Behind the mark that closes a fence stands a tag, and the fence ends there; behind no such mark it is code.
        ("```\ncode\n```<terse>x</terse>", "```\ncode\n```", ("x",)),
        ("```\ncode\n``` \t<terse>x</terse>\n<terse>y</terse>", "```\ncode\n``` \t\n", ("x", "y")),
        ("~~~~\ncode\n~~~~~<terse>x\ny</terse>!", "~~~~\ncode\n~~~~~!", ("x y",)),
        ("````\ncode\n```<terse>x</terse>", "````\ncode\n```<terse>x</terse>", ()),
        ("~~~\ncode\n```<terse>x</terse>", "~~~\ncode\n```<terse>x</terse>", ()),
        ("```\ncode\n```py<terse>x</terse>", "```\ncode\n```py<terse>x</terse>", ()),
        ("```\ncode\n```<terse>x", "```\ncode\n```<terse>x", ()),
        ("```\ncode\n```<b><terse>x</terse>", "```\ncode\n```<b><terse>x</terse>", ()),
        # Code spans are text; a backtick without its fellow on the line is no span.
        ("write `<terse>x</terse>` last", "write `<terse>x</terse>` last", ()),
        ("between `<terse>` and `</terse>`", "between `<terse>` and `</terse>`", ()),
        ("``a ` <terse>x</terse>``", "``a ` <terse>x</terse>``", ()),
        ("`npm test` <terse>x</terse> `a`", "`npm test`  `a`", ("x",)),
        ("a ` b <terse>x</terse> c", "a ` b  c", ("x",)),
        ("a ` b\n<terse>x</terse> ` c", "a ` b\n ` c", ("x",)),
        ("a ` b <terse>x</terse> c\n ` d", "a ` b  c\n ` d", ("x",)),
        ("a `` b <terse>x</terse> ` c", "a `` b  ` c", ("x",)),
        ("``` ` <terse>x</terse>` <terse>y</terse>", "``` ` <terse>x</terse>` ", ("y",)),
        ("a `<terse>x</terse>", "a `", ("x",)),
        # The fences are those of the full text: a mark with a tag in front of it is none, one inside a tag
        # counts.
        ("<terse>x</terse>```\n<terse>y</terse>", "```\n", ("x", "y")),
        ("<terse>x\n```\n</terse><terse>y</terse>", "<terse>y</terse>", ("x ```",)),
    ],
)
def test_terse_tags_are_stripped_from_a_text(text: str, shown: str, entries: tuple[str, ...]):
    assert strip_terse(text) == (shown, entries)
    assert stream(list(text)) == (shown, entries)


def test_the_longest_tag():
    inside = MAX_TAG - len(OPEN) - len(CLOSE)
    longest = f"{OPEN}{'x' * inside}{CLOSE}"
    assert strip_terse(f"a{longest}b") == ("ab", ("x" * inside,))
    too_long = f"{OPEN}{'x' * (inside + 1)}{CLOSE}"
    assert strip_terse(too_long) == (too_long, ())
    assert stream(list(too_long)) == (too_long, ())
    # What begins inside a tag that proved too long may be one.
    nested = f"{OPEN}{'x' * MAX_TAG}{OPEN}y{CLOSE}"
    assert strip_terse(nested) == (f"{OPEN}{'x' * MAX_TAG}", ("y",))
    assert stream(list(nested)) == strip_terse(nested)


@given(st.one_of(TEXTS, PLAIN_TEXTS), st.lists(st.integers(0, 10_000), max_size=20))
def test_the_cuts_do_not_matter(text: str, cuts: list[int]):
    assert stream(pieces_of(text, cuts)) == strip_terse(text)
    assert stream(list(text)) == strip_terse(text)


@given(TEXTS.filter(lambda text: not re.search("<terse>.*?</terse>", text, re.DOTALL)))
def test_text_without_a_whole_tag_is_untouched(text: str):
    assert stream(list(text)) == (text, ())


@given(TEXTS)
def test_no_more_is_held_back_than_the_beginning_of_a_possible_tag(text: str):
    reader = TerseStream()
    shown = ""
    for end in range(1, len(text) + 1):
        shown += reader.feed(text[end - 1])
        held = reader.held
        is_line_open = "`" in text[:end] and not re.search("[\r\n]", held)
        is_open = CLOSE not in held or is_line_open  # a span may still make it code
        assert held == "" or OPEN.startswith(held) or (held.startswith(OPEN) and is_open)
        assert len(held) < MAX_TAG
        if not held and CLOSE not in text[:end]:
            assert shown == text[:end]
        assert text[:end].endswith(held)
    assert shown + reader.close() == strip_terse(text)[0]


@given(
    st.lists(st.sampled_from(["a", "b c", "\n", " ", "é", "<", ">", "`", "x<y", "</", "\r\n"]), max_size=30).map(
        "".join
    ),
    st.integers(0, 10_000),
    st.lists(st.sampled_from(["x", " ", "\n", "<b>", "é", "``"]), min_size=1, max_size=8).map("".join),
)
def test_a_planted_tag_leaves_no_trace(text: str, place: int, inside: str):
    """Outside of code; three backticks in a row would open a fence, and two runs on a line begin and end a span."""
    place %= len(text) + 1
    planted = text[:place] + OPEN + inside + CLOSE + text[place:]
    if "```" in planted or (re.search("`[^\r\n]*$", text[:place]) and re.search("[^\r\n]*`", inside + text[place:])):
        return
    entry = " ".join(inside.split())
    assert strip_terse(planted) == (text, (entry,) if entry else ())


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        (["<terse>a", "b", "c</terse>d"], ["", "", "d"]),
        (["`<terse>a</terse>", "\n"], ["`", "\n"]),  # the line's end says that no span is open
        (["`a<terse>b`", "c"], ["`a", "<terse>b`c"]),  # the run of backticks may have gone on
        (["`a<terse>b", "`", "c"], ["`a", "", "<terse>b`c"]),
        (
            ["<terse>", "x" * (MAX_TAG - len(OPEN) - 1), "y"],
            ["", "", "<terse>" + "x" * (MAX_TAG - len(OPEN) - 1) + "y"],
        ),
    ],
)
def test_a_tag_waits_until_it_is_known_to_be_one(pieces: list[str], shown: list[str]):
    reader = TerseStream()
    assert [reader.feed(piece) for piece in pieces] == shown


@given(TEXTS)
def test_entries_are_single_lines(text: str):
    assert all(entry and entry == " ".join(entry.split()) for entry in strip_terse(text)[1])


def test_many_tags_that_never_close_take_linear_time():
    text = OPEN * 40_000
    assert strip_terse(text) == (text, ())


def test_a_backtick_before_many_tags_that_never_close_takes_linear_time():
    text = "`" + OPEN * 40_000
    assert strip_terse(text) == (text, ())
