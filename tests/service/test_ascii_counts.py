"""Short ASCII texts have as many tokens as the encoder finds."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.service.common import ascii_counts
from tersely.service.common.ascii_counts import AsciiCounter, ascii_counter, ascii_pattern
from tersely.service.common.tokens import count_text
from tersely.service.common.vocabulary import EncodingName, load_encoding

NAMES: tuple[EncodingName, ...] = ("o200k_base", "cl100k_base")
TEXTS = [
    "",
    "Hello, world",
    "it's we'RE I'Ll they'Ve DON'T 'twas 's",
    "HTTPServer getHTTPResponseCode aB Ab ABc 'S",
    "123456789 1,234.56 v0.6.2 x1y22z333",
    "  two   spaces \t\ttabs\n\n\r\n  \n x\r\r\n/",
    "trailing   ",
    "trailing \n ",
    "\n",
    "((())){}[];//\n/ !!\r\n/=== --- __x__",
    "\x00\x01\x1c\x1d\x1e\x1f\x7f a\x1cb \x0b\x0c",
    '{"name":"read_file","arguments":"{\\"path\\": \\"src/app.py\\"}"}',
    "x" * 1000,
    " " * 1000,
    "\n" * 1000,
    "!?" * 500,
]
# Characters between which patterns tell, more often than others.
TELLING = st.text(st.sampled_from(" \t\n\r\x0b\x0c\x1c'/.,_-sSdDtTmMlLvVrReEaAzZ019"), max_size=40)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_tokens_of_the_encoder(name: EncodingName, text: str) -> None:
    assert count_text(text, name) == len(load_encoding(name).encode_ordinary(text))


@pytest.mark.parametrize("name", NAMES)
@given(text=st.one_of(TELLING, st.text(st.characters(max_codepoint=127))))
def test_any_ascii_text_has_the_tokens_of_the_encoder(name: EncodingName, text: str) -> None:
    assert ascii_counter(name).count(text) == len(load_encoding(name).encode_ordinary(text))


def test_other_texts_are_left_to_the_encoder() -> None:
    text = "Größe: 3 µm, naïve, 你好"
    assert count_text(text, "o200k_base") == len(load_encoding("o200k_base").encode_ordinary(text))


def test_few_and_short_pieces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascii_counts, "PIECES", 100)
    encoding = load_encoding("o200k_base")
    counter = AsciiCounter(encoding)
    counts = counter._count.__self__  # type: ignore[attr-defined]
    for text in (f"{first}{second} {'x' * 50}" for first in string.ascii_letters for second in string.ascii_letters):
        assert counter.count(text) == len(encoding.encode_ordinary(text))
        assert len(counts) <= 100
        assert max(map(len, counts)) <= ascii_counts.LONGEST


def test_a_class_of_characters_that_is_not_known_is_refused() -> None:
    with pytest.raises(KeyError):
        ascii_pattern(r"\p{Han}+")
