"""Marks of side calls that are no words of instructions or questions: headers, Codex's metadata, the quota probe."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tersely.dialects.clients.known import CODEX_MARKS, CODEX_METADATA, SIDE_HEADERS, SideCall, side_call
from tersely.domain.messages import Message
from tests.builders import assistant, system, user

TASK = [system("You are a coding agent."), user("Fix the bug."), assistant("Done."), user("Thanks.")]


def codex(**metadata: object) -> dict[str, str]:
    return {CODEX_METADATA: json.dumps(metadata)}


def test_every_header_has_a_mark_of_its_own() -> None:
    assert len({(header, value) for _, header, value, _ in SIDE_HEADERS}) == len(SIDE_HEADERS)
    assert all(header == header.lower() for _, header, _, _ in SIDE_HEADERS)


@pytest.mark.parametrize(("header", "value", "kind"), [mark[1:] for mark in SIDE_HEADERS])
@pytest.mark.parametrize("has_tools", [False, True])
def test_side_call_header_wins_over_the_text(header: str, value: str, kind: SideCall, has_tools: bool) -> None:
    assert side_call({header: value}, TASK, has_tools=has_tools) == kind
    assert side_call({header: value}, [], has_tools=has_tools) == kind
    for other in ("", value.upper(), f" {value}", f"{value}-x", value[:-1]):
        assert side_call({header: other}, TASK, has_tools=has_tools) is None
    assert side_call({f"{header}-2": value}, TASK, has_tools=has_tools) is None


@pytest.mark.parametrize(("mark", "kind"), CODEX_MARKS.items())
def test_codex_metadata_names_the_purpose_of_a_call(mark: tuple[str, str], kind: SideCall) -> None:
    name, value = mark
    assert side_call(codex(**{name: value, "turn_id": "t"}), TASK, has_tools=True) == kind
    assert side_call(codex(**{name: f"{value}s"}), TASK, has_tools=True) is None
    assert side_call(codex(**{f"x_{name}": value}), TASK, has_tools=True) is None
    assert side_call(codex(inner={name: value}), TASK, has_tools=True) is None


@pytest.mark.parametrize(
    "metadata",
    [
        "",
        "{",
        "null",
        "[]",
        '"compaction"',
        "7",
        '{"request_kind": ["compaction"]}',
        '{"request_kind": null}',
        "[" * 10**5,
    ],
    ids=range(9),
)
def test_metadata_that_says_nothing(metadata: str) -> None:
    assert side_call({CODEX_METADATA: metadata}, TASK, has_tools=True) is None


def test_turn_of_codex_is_no_side_call() -> None:
    assert side_call(codex(request_kind="turn", thread_source="user"), TASK, has_tools=True) is None


@given(st.text(max_size=60))
def test_any_metadata_can_be_read(metadata: str) -> None:
    assert side_call({CODEX_METADATA: metadata}, TASK, has_tools=True) is None


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("words", ["quota", " quota\n"])
def test_a_question_of_one_token_for_the_quota(words: str, has_tools: bool) -> None:
    assert side_call({}, [user(words)], has_tools=has_tools, max_tokens=1) == "quota"
    assert side_call({}, [*TASK, user(words)], has_tools=has_tools, max_tokens=1) == "quota"


@pytest.mark.parametrize(
    ("messages", "max_tokens"),
    [
        ([user("quota")], None),
        ([user("quota")], 2),
        ([user("quota")], 0),
        ([user("quota?")], 1),
        ([user("Quota")], 1),
        ([user("my quota")], 1),
        ([user("quota"), user("and more")], 1),
        ([system("quota"), user("hello")], 1),
        ([user("hello"), assistant("quota")], 1),
        ([system("quota")], 1),
        ([], 1),
    ],
)
def test_other_short_questions_are_no_quota_probes(messages: list[Message], max_tokens: int | None) -> None:
    assert side_call({}, messages, has_tools=False, max_tokens=max_tokens) is None
