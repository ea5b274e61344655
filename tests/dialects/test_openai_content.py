"""Content of OpenAI's formats is patched with every other byte unchanged."""

import pytest

from tersely.dialects.openai_content import append, is_text, prepend, replace_text, with_words, without_lines

IMAGE = b'{"type": "image_url",  "image_url": {"url": "https://example.com/a.png"}}'


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("words", True),
        ({"type": "text", "text": "words"}, True),
        ({"type": "output_text", "text": "words"}, True),
        ({"text": "words"}, True),
        ({"type": "text"}, False),
        ({"type": "refusal", "text": "words"}, False),
        ({"type": ["text"], "text": "words"}, False),
        (5, False),
    ],
)
def test_text_parts_are_distinguished_from_others(part: object, expected: bool) -> None:
    assert is_text(part) is expected


def test_replace_text_puts_the_text_into_the_first_text_part_and_keeps_media() -> None:
    parts = [b'{"type":"text","text":"one","cache":1}', IMAGE, b'"two"']
    assert replace_text(parts, "new") == [b'{"type":"text","text":"new","cache":1}', IMAGE]


def test_replace_text_adds_a_part_where_there_is_no_text() -> None:
    assert replace_text([IMAGE], "new", "input_text") == [IMAGE, b'{"type":"input_text","text":"new"}']
    assert replace_text([IMAGE], "") == [IMAGE]


def test_with_text_replaces_a_string_and_the_text_of_a_list() -> None:
    assert with_words(b'"old"', "new") == b'"new"'
    assert with_words(b'["old"]', "new") == b'["new"]'
    assert with_words(b'"old"', None) == b"null"


@pytest.mark.parametrize(
    ("content", "in_front", "behind"),
    [
        (b'"own"', b'"more\\n\\nown"', b'"own\\n\\nmore"'),
        (b'""', b'"more"', b'"more"'),
        (b"null", b'"more"', b'"more"'),
        (b'["own"]', b'[{"type":"text","text":"more"},"own"]', b'["own",{"type":"text","text":"more"}]'),
    ],
)
def test_text_is_added_in_front_and_behind(content: bytes, in_front: bytes, behind: bytes) -> None:
    assert prepend(content, "more") == in_front
    assert append(content, "more") == behind


def test_without_lines_removes_each_placeholder_once() -> None:
    assert without_lines("a\n[image]\n[image]\nb", ["[image]", "[file]"]) == "a\n[image]\nb"
