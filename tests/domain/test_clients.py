"""Facts that clients tell about themselves: ids, side calls, retries."""

from __future__ import annotations

import pytest

from tersely.dialects.clients.known import (
    BODY_IDS,
    SESSION_HEADERS,
    SideCall,
    client_ids,
    is_retry,
    side_call,
)
from tersely.domain.client_ids import ClientIds
from tersely.domain.messages import Message
from tests.builders import assistant, call, result, system, user

TASK = [system("You are a coding agent."), user("Fix the bug."), assistant("Done."), user("Thanks.")]


@pytest.mark.parametrize("name", SESSION_HEADERS)
def test_a_header_names_the_clients_own_session(name: str) -> None:
    assert client_ids({name: "abc"}, {}) == ClientIds(id="abc", source="header")


@pytest.mark.parametrize("name", BODY_IDS)
def test_a_member_of_the_body_does_too(name: str) -> None:
    assert client_ids({}, {name: "abc"}) == ClientIds(id="abc", source="body")


def test_headers_come_before_the_body_and_earlier_ones_before_later_ones() -> None:
    headers = {"x-session-affinity": "second", "x-session-id": "first"}
    assert client_ids(headers, {"session_id": "third"}) == ClientIds(id="first", source="header")


@pytest.mark.parametrize("value", ["", " abc", "a b", "a\nb", "ä", "x" * 257, 7, None, ["abc"]])
def test_unusable_client_ids_are_ignored(value: object) -> None:
    assert client_ids({}, {"session_id": value}) == ClientIds()


def test_an_unusable_id_does_not_hide_a_usable_one() -> None:
    assert client_ids({"x-session-id": "", "session_id": "abc"}, {}).id == "abc"


def test_a_subagent_names_its_parent() -> None:
    headers = {"x-session-id": "sub", "x-parent-session-id": "abc"}
    assert client_ids(headers, {}) == ClientIds(id="sub", source="header", parent="abc")


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([system("You are a title generator. You output ONLY a title."), user("Fix the bug.")], "title"),
        ([system("You are a context summarization agent."), user("[User]: ...")], "summary"),
        ([system("You write concise, one-line Git commit messages for diffs."), user("# Diffs:")], "commit"),
        ([system("*Briefly* summarize this partial conversation about programming."), user("# USER")], "summary"),
        ([system("You are now acting as the managed memory extraction subagent."), *TASK[1:]], "memory"),
        ([*TASK[:3], user("Please provide a concise summary of our conversation so far, capturing...")], "summary"),
        ([*TASK[:3], user("\nFirst, reason in your scratchpad. Then, generate the snapshot.")], "summary"),
        ([user("<role>\nContext Extraction Assistant\n</role>")], "summary"),
        ([user("### Task:\nGenerate a concise, 3-5 word title with an emoji.")], "title"),
    ],
)
def test_side_calls_are_known_by_their_marks(messages: list[Message], kind: SideCall) -> None:
    assert side_call({}, messages, has_tools=False) == kind


COMPONENT = (
    "You are the component that summarizes a conversation when its context window is about to overflow. The summary"
)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([*TASK, user(COMPONENT)], "summary"),
        (
            [system(COMPONENT), user("First, reason in your <analysis> block. Then, produce the <state_snapshot>.")],
            "summary",
        ),
        ([*TASK, user("First, reason in your <analysis> block. Then, produce the <state_snapshot> XML.")], "summary"),
        ([*TASK, user("Managed memory has TWO directories. Choose which one to write each memory into")], "memory"),
    ],
)
def test_side_calls_of_qwen_code_since_0_24(messages: list[Message], kind: SideCall, *, has_tools: bool) -> None:
    assert side_call({}, messages, has_tools=has_tools) == kind


def test_a_header_may_say_that_a_call_is_beside_the_conversation() -> None:
    assert side_call({"x-interaction-type": "conversation-compaction"}, TASK, has_tools=True) == "summary"
    assert side_call({"x-interaction-type": "conversation-user"}, TASK, has_tools=True) is None


def test_planning_calls_stop_at_their_mark_and_have_no_tools() -> None:
    stops = b'["<end_plan>", "Observation:"]'
    assert side_call({}, TASK, has_tools=False, stops=stops) == "planning"
    assert side_call({}, TASK, has_tools=True, stops=stops) is None


@pytest.mark.parametrize(
    "messages",
    [
        TASK,
        [user("Hello.")],
        [user("Write a concise summary of this file.")],
        [user("What does 'Please provide a concise summary of our conversation so far' do in this client?")],
        [system("You are an agent."), user("Why does the log say 'You are a title generator'?")],
        [system("You are an agent. " + "Be brief. " * 30 + "Its prompt: You are a title generator"), user("Go.")],
        [*TASK[:2], assistant(None, call("c1")), result("c1", "Generate a title for this conversation:")],
        [*TASK[:2], assistant("Please create a detailed summary of the conversation so far"), user("No.")],
    ],
)
def test_text_about_side_calls_is_no_side_call(messages: list[Message]) -> None:
    assert side_call({}, messages, has_tools=False) is None


@pytest.mark.parametrize(
    ("count", "retries"),
    [(None, False), ("0", False), ("1", True), ("12", True), ("-1", False), ("x", False), ("", False)],
)
def test_sdks_count_their_retries(count: str | None, *, retries: bool) -> None:
    headers = {} if count is None else {"x-stainless-retry-count": count}
    assert is_retry(headers) is retries
