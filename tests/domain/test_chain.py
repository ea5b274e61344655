"""The identity of messages and histories; what real clients change must not change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tersely.dialects.openai_chat.read import read_message
from tersely.domain.history.chain import (
    INJECTED_BLOCKS,
    canonical,
    canonical_arguments,
    chain,
    link,
    summary_anchors,
    without_calls_as_text,
    without_injected,
)
from tersely.domain.messages import Media, Message, Reasoning, Text, ToolCall
from tests.builders import assistant, call, message, result, system, user

CLIENTS = Path(__file__).parents[3] / "shared" / "data" / "clients"


def read(**members: Any) -> Message:
    return read_message(json.dumps(members).encode())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (read(role="user", content="hi"), read(role="user", content=[{"type": "text", "text": "hi"}])),
        (
            read(role="user", content="hi"),
            read(role="user", content=[{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]),
        ),
        (read(role="user", content=" hi\n"), read(role="user", content="hi")),
        (read(role="user", content="hi", name="bob", __x=1), read(role="user", content="hi")),
        (assistant(None, call("a")), read(**{**json.loads(assistant("x", call("a")).raw), "content": ""})),
        (assistant(None, call("a", "f", '{"b":1.0,"a":[1e2]}')),
         assistant(None, call("a", "f", '{ "a":[100], "b":1 }'))),
        (assistant(None, call("a", "f", "")), assistant(None, call("a", "f", "{}"))),
        (assistant(None, call("a", "f", " {x ")), assistant(None, call("a", "f", "{x"))),
        (result("a", "ok\n"), result("a", "ok")),
        (
            read(role="assistant", content="a", refusal=None, reasoning_content="hm", annotations=[]),
            read(role="assistant", content="a"),
        ),
        (read(role="assistant", content="a", refusal="no"), read(role="assistant", content="a")),
        (read(role="assistant", content=None, refusal="no"), read(role="assistant", content=None, refusal=" no\n")),
        (
            message("assistant", Reasoning(text="1"), Text(text="a")),
            message("assistant", Text(text="a"), Reasoning(text="2")),
        ),
        (user("<system-reminder>today</system-reminder>\nhi"), user("hi")),
        (user("<current_datetime>2026</current_datetime>\n\nhi"),
         user("<current_datetime>2027</current_datetime>\n\nhi")),
    ],
)  # fmt: skip
def test_equal_messages_have_equal_digests(one: Message, other: Message):
    assert canonical(one) == canonical(other) != b""
    assert link(b"x", one) == link(b"x", other) != b"x"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("hi"), user("ho")),
        (user("hi"), assistant("hi")),
        (user("a b"), user("a  b")),
        (assistant(None, call("a")), assistant(None, call("b"))),
        (assistant(None, call("a", "f")), assistant(None, call("a", "g"))),
        (assistant(None, call("a", "f", {"x": 1})), assistant(None, call("a", "f", {"x": "1"}))),
        (assistant(None, call("a", "f", {"x": 1})), assistant(None, call("a", "f", {"x": True}))),
        (assistant(None, call("a"), call("b")), assistant(None, call("b"), call("a"))),
        (result("a", "x"), result("a", "y")),
        (result("a", "x"), result("b", "x")),
        (message("user", Media(kind="image", digest="1")), message("user", Media(kind="image", digest="2"))),
        (user("<system-reminder>never closed"), user("never closed")),
        (assistant("<system-reminder>x</system-reminder>hi"), assistant("hi")),
        (user(""), user("hi")),
    ],
)
def test_different_messages_have_different_digests(one: Message, other: Message):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    "no_link",
    [
        system("x"),
        replace(system("x"), role="developer"),
        user("<system-reminder>\nx\n</system-reminder>"),
        user("<environment_context>\n<cwd>/</cwd></environment_context>\n"),
        message("user", Text(text="<session_context>a</session_context>"), Text(text=" ")),
        user("This is the Qwen Code. We are setting up the context for our chat.\nToday's date is ..."),
        user("# AGENTS.md instructions for /p\n\n<INSTRUCTIONS>\nBe brief.\n</INSTRUCTIONS>"),
    ],
)
def test_injected_and_instruction_messages_are_no_links(no_link: Message):
    assert canonical(no_link) == b""
    assert link(b"previous", no_link) == b"previous"


def test_an_injected_part_is_no_part_of_the_message():
    image = Media(kind="image", digest="1")
    parts = (Text(text="<system-reminder>x</system-reminder>"), Text(text="hi"), image)
    assert canonical(message("user", *parts)) == canonical(message("user", Text(text="hi"), image))
    assert canonical(message("user", parts[0], image)) == canonical(message("user", image))


def test_the_chain_repeats_its_value_where_there_is_no_link():
    values = chain([system("s"), user("a"), system("t"), assistant("b"), user("<system-reminder>x</system-reminder>")])
    assert values[0] == b""
    assert values[1] == values[2] != values[3] == values[4]
    assert len(values[1]) == 16
    assert chain([user("a"), assistant("b")])[-1] == values[-1]
    assert chain([user("b"), assistant("b")])[-1] != values[-1]


def test_repeated_result_counts_once():
    twice = replace(result("a", "x"), parts=result("a", "x").parts * 2)
    assert canonical(twice) == canonical(result("a", "x"))


def test_arguments_of_any_kind():
    assert canonical_arguments('{"n": 123456789012345678901234567890}') == '{"n":123456789012345678901234567890}'
    assert canonical_arguments('{"b":1,"a":"\\ud800"}') == '{"a":"\ud800","b":1}'
    assert canonical_arguments("[" * 5000) == "[" * 5000
    deep = "[" * 5000 + "]" * 5000
    assert canonical_arguments(deep) == deep
    assert canonical_arguments('{"a":NaN}') == '{"a":NaN}'
    assert canonical_arguments('{"a":1e999}') == '{"a":Infinity}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_arguments_survive_being_serialised_again(value: object):
    texts = [
        json.dumps(value),
        json.dumps(value, indent=1, ensure_ascii=False),
        json.dumps(value, sort_keys=True, separators=(",", ":")),
    ]
    assert len({canonical_arguments(text) for text in texts}) == 1


@given(st.text(), st.text())
def test_no_two_texts_have_one_form(one: str, other: str):
    same = one.strip() == other.strip()
    assert same or canonical(assistant(one)) != canonical(assistant(other))


@given(st.text(), st.sampled_from(INJECTED_BLOCKS), st.text())
def test_text_that_is_not_injected_is_the_same_object(text: str, block: Any, inside: str):
    assert without_injected(text) is text
    injected = f"{block.opening}{inside}{block.closing}"
    if block.opening not in text and block.closing not in inside:
        assert without_injected(text + injected) == text


SUMMARY = "1. Primary request: list files. 2. README.md and main.py exist."


@pytest.mark.parametrize(
    ("reply", "later"),
    [
        (SUMMARY, assistant(SUMMARY)),
        (SUMMARY, system(SUMMARY + "\n")),
        (SUMMARY, user(f"Context summary:\n\n{SUMMARY}\n\n## Files\nRead:\n- none\nModified:\n- none")),
        (SUMMARY, user(f"Here is a summary of the conversation to date:\n\n{SUMMARY}")),
        (SUMMARY, user(f"I spoke to you previously about a number of things.\n{SUMMARY}")),
        (SUMMARY, user(f"... was compacted into the following summary:\n\n<summary>\n{SUMMARY}\n</summary>")),
        (
            f"<analysis>hm</analysis>\n<summary>\n{SUMMARY}\n</summary>",
            user(
                "This session is being continued from a previous conversation that ran out of context. The "
                "summary below "
                f"covers the earlier portion of the conversation.\n\nSummary:\n{SUMMARY}\n\nIf you need "
                f"specific details "
                "from before compaction (like exact code snippets), read the full transcript at: /x"
            ),
        ),
        (
            f"<scratchpad>x</scratchpad><state_snapshot>{SUMMARY}</state_snapshot>",
            user(f"<state_snapshot>{SUMMARY}</state_snapshot>"),
        ),
    ],
)
def test_a_summary_is_known_again(reply: str, later: Message):
    assert set(summary_anchors(assistant(reply))) & set(summary_anchors(later))


def test_short_texts_are_no_anchors():
    assert summary_anchors(assistant("OK")) == ()
    assert not set(summary_anchors(assistant(SUMMARY))) & set(summary_anchors(user("What about " + SUMMARY)))


def load(client: str, name: str) -> list[dict[str, Any]]:
    path = CLIENTS / client / name
    if not path.exists():
        pytest.skip(f"the client recordings are not there: {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


# First turns after a compaction (these are found by the summary), and Qwen Code's three first turns, which
# begin with a canned assistant message of its own.
ALLOWED_MISSES = {"cline": 1, "langchain": 2, "opencode": 1, "pi": 2, "qwen-code": 3 + 1}


# Clients whose compaction call goes out over chat completions, with the requests that follow it.
@pytest.mark.parametrize("client", ["cline", "copilot-cli", "langchain", "llamaindex", "opencode", "pi", "qwen-code"])
def test_recorded_compactions_are_linked(client: str):
    replies = {line["n"]: line["reply"] for line in load(client, "responses.jsonl")}
    requests = [line for line in load(client, "requests.jsonl") if line["path"] == "/v1/chat/completions"]
    found = 0
    for place, line in enumerate(requests[:-1]):
        if not any(word in line["note"] for word in ("side: compaction", "side: summarisation")):
            continue
        anchors = set(summary_anchors(read_message(json.dumps(replies[line["n"]]).encode())))
        following = requests[place + 1]["body"]["messages"]
        found += any(anchors & set(summary_anchors(read_message(json.dumps(each).encode()))) for each in following)
    assert found >= 1


@pytest.mark.parametrize(
    "client", ["autogen", "cline", "continue-cli", "copilot-cli", "langchain", "llm", "openai-agents", "opencode", "pi",
               "pydantic-ai", "qwen-code", "vercel-ai-sdk"]
)  # fmt: skip
def test_recorded_clients_continue_their_chain(client: str):
    """A main turn that resends a relayed reply right after the history that it answered continues that
    chain.
    """
    replies = {line["n"]: line["reply"] for line in load(client, "responses.jsonl")}
    known: set[bytes] = set()
    followed = missed = 0
    for line in load(client, "requests.jsonl"):
        if line["path"] != "/v1/chat/completions":
            continue
        messages = [read_message(json.dumps(each).encode()) for each in line["body"]["messages"]]
        values = chain(messages)
        has_history = any(each.role == "assistant" for each in messages[:-1])
        is_main = line["note"].endswith("main turn")
        if has_history and is_main:
            followed += any(value in known for value in values)
            missed += not any(value in known for value in values)
        reply = replies.get(line["n"])
        if reply is not None and values[-1] and is_main:
            known.add(link(values[-1], read_message(json.dumps(reply).encode())))
    assert followed >= 1
    assert missed == ALLOWED_MISSES.get(client, 0)


# smolagents writes the calls of a reply as text when it sends that again


def _echoed(text: str) -> Message:
    return Message(role="assistant", parts=(Text(text=text),), raw=b"")


_WRITTEN = (
    "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1.0}}}]"
)


def test_calls_written_as_text_are_the_calls_of_the_reply() -> None:
    call = ToolCall(id="call_1", name="add", arguments='{"a": 1}')
    alone = Message(role="assistant", parts=(call,), raw=b"")
    assert canonical(_echoed(_WRITTEN)) == canonical(alone)
    with_words = Message(role="assistant", parts=(Text(text="I add."), call), raw=b"")
    assert canonical(_echoed(f"I add.\n{_WRITTEN}")) == canonical(with_words)
    assert canonical(_echoed(_WRITTEN.replace("call_1", "call_2"))) != canonical(alone)


def test_calls_made_of_the_replys_own_code_are_no_part_of_it() -> None:
    reply = "Thought: done\n<code>\nfinal_answer('two files')\n</code>"
    made = "Calling tools:\n[{'id': 'call_1', 'type': 'function', 'function': {'name': 'python_interpreter', "
    assert canonical(_echoed(f"{reply}\n{made}'arguments': \"final_answer('two files')\"}}}}]")) == canonical(
        _echoed(reply)
    )
    other = _echoed(f"{reply}\n{made}'arguments': \"something_else()\"}}}}]")
    assert canonical(other) != canonical(_echoed(reply))


@pytest.mark.parametrize(
    "text",
    [
        "Calling tools:\n[{'id': 'call_1'",
        "Calling tools:\n[{'id': 'call_1'}]",
        "Calling tools:\n[{'id':" + "[" * 5_000,
        "Calling tools:\n[{'id': __import__('os').getcwd()}]",
        f"as in: {_WRITTEN}",
        f"{_WRITTEN} and so on",
    ],
)
def test_text_that_only_looks_like_calls_stays_text(text: str) -> None:
    assert without_calls_as_text(text) == (text, ())
