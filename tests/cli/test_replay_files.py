"""The files that `tersely replay` takes: recorded requests, agents' own sessions, and what is wrong with others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tersely.fakellm.strict import (
    anthropic as strict_anthropic,
)
from tersely.fakellm.strict import (
    gemini as strict_gemini,
)
from tersely.fakellm.strict import (
    openai_chat as strict,
)
from tersely.fakellm.strict import (
    openai_responses as strict_responses,
)
from tersely.replay.play import Variant
from tersely.transcripts.conversations import BadTranscript, Conversation, RecordedCall, ReplyForm
from tersely.transcripts.files import load_transcript
from tersely.transcripts.recordings import going_on_from
from tersely.transcripts.replies import bits
from tests.conftest import Database
from tests.support.chat_messages import assistant, user
from tests.support.replays import play

ASKING = ReplyForm(model="m")


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only(path: Path, **options: Any) -> Conversation:
    (conversation,) = load_transcript(path, **options).conversations
    return conversation


def body(step: RecordedCall) -> dict[str, Any]:
    sent: dict[str, Any] = json.loads(step.request(ASKING).body)
    return sent


# Recordings


def resent(*, stream: bool = False) -> list[dict[str, Any]]:
    """Three requests of one chat, each with everything before it."""
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    return [{"model": "gpt", "stream": stream, "messages": messages[:upto]} for upto in (1, 3, 5)]


def test_bodies_that_resend_each_other_are_a_recording(tmp_path: Path) -> None:
    conversation = only(write(tmp_path / "mine.jsonl", *resent()))
    assert conversation.is_recording
    assert [body(step) for step in conversation.steps] == resent()
    assert [step.reply for step in conversation.steps] == [assistant("b"), assistant("d"), None]
    assert {step.request(ASKING).target for step in conversation.steps} == {"/v1/chat/completions"}


def test_conversations_that_resend_nothing_are_no_recording(tmp_path: Path) -> None:
    lines = [{"messages": [user("a"), assistant("b")]}, {"messages": [user("c"), assistant("d")]}]
    first, second = load_transcript(write(tmp_path / "t.jsonl", *lines)).conversations
    assert not first.is_recording
    assert [second.number, second.steps[0].reply] == [2, assistant("d")]
    assert len(load_transcript(tmp_path / "t.jsonl", limit=1).conversations) == 1


def test_calls_are_played_as_they_were_made(tmp_path: Path) -> None:
    anthropic = {"model": "c", "max_tokens": 9, "stream": True, "messages": [user("a")]}
    gemini = {"contents": [{"role": "user", "parts": [{"text": "a"}]}]}
    headers = {"Host": "h", "X-Mine": "1", "X-Tersely-Session": "old", "Content-Length": "7"}
    calls = [
        {"n": 1, "method": "HEAD", "path": "/", "body": None},
        {"n": 2, "path": "/v1/messages", "query": {"beta": "true"}, "headers": headers, "body": anthropic},
        {"n": 3, "method": "POST", "url": "https://h/x/v1beta/models/g:streamGenerateContent?alt=sse", "body": gemini},
        {"n": 4, "url": "https://h/openai/v1/responses", "body": json.dumps({"model": "m", "input": "a"})},
        {"n": 5, "method": "POST", "path": "/v1/embeddings", "body": {"model": "m", "input": "a"}},
    ]  # fmt: skip
    chunk = {"candidates": [{"content": {"parts": [{"text": "b"}]}}]}
    write(
        tmp_path / "cli" / "responses.jsonl",
        {"n": 2, "reply": [{"type": "text", "text": "b"}]},
        {"n": 3, "reply": [chunk]},
    )
    transcript = load_transcript(write(tmp_path / "cli" / "requests.jsonl", *calls))
    assert transcript.name == "cli"
    first, second, third = transcript.conversations[0].steps
    request = first.request(ASKING)
    assert [step.index for step in (first, second, third)] == [2, 3, 4]
    assert (request.target, request.headers, request.is_streamed) == ("/v1/messages?beta=true", {"x-mine": "1"}, True)
    assert first.reply == {"role": "assistant", "content": [{"type": "text", "text": "b"}]}
    assert second.request(ASKING).target == "/v1beta/models/g:streamGenerateContent?alt=sse"
    assert second.reply == {"role": "model", "parts": [{"text": "b"}]}
    assert (third.dialect, third.request(ASKING).target, third.reply) == ("openai_responses", "/v1/responses", None)


def test_files_that_a_line_names_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.sse").write_text('data: {"type":"message_start"}\n\ndata: {"type":"message_stop"}\n\n')
    (tmp_path / "a.json").write_text(json.dumps({"model": "c", "max_tokens": 9, "messages": [user("a")]}))
    line = {"method": "POST", "url": "https://h/v1/messages", "request_file": "a.json", "file": "a.sse", "stream": True}
    (step,) = only(write(tmp_path / "index.jsonl", line)).steps
    assert step.reply == {"role": "assistant", "content": []}
    with pytest.raises(BadTranscript, match=r"line 1: \.\./a\.json cannot be read \(outside of"):
        load_transcript(write(tmp_path / "below" / "index.jsonl", {**line, "request_file": "../a.json"}))


def test_request_continues_from_the_reply_id_that_was_given(tmp_path: Path) -> None:
    first = {"model": "m", "input": "a"}
    second = {"model": "m", "input": "c", "previous_response_id": "resp_recorded"}
    calls = [{"path": "/v1/responses", "body": each} for each in (first, second)]
    other = {**second, "previous_response_id": "resp_elsewhere"}
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]}
    calls[0]["response"] = {"id": "resp_recorded", "output": [message]}
    path = write(tmp_path / "requests.jsonl", *calls, {"path": "/v1/responses", "body": other})
    question, answered = only(path).steps
    assert (question.follows, answered.follows) == (None, question.index)
    changed = going_on_from(answered.request(ASKING), "resp_given")
    assert json.loads(changed.body) == {**second, "previous_response_id": "resp_given"}


async def test_a_recording_is_played_and_its_side_calls_are_passed_on(database: Database, tmp_path: Path) -> None:
    title = {
        "model": "gpt",
        "messages": [{"role": "system", "content": "You are a title generator. Write a title."}, user("a")],
    }
    calls = [{"path": "/v1/chat/completions", "body": each} for each in (*resent(stream=True), title)]
    path = write(tmp_path / "requests.jsonl", *calls)
    variants = [Variant(strategy="full", epoch="auto"), Variant(strategy="slim", epoch="every_request")]
    for result in await play(database, [path], *variants):
        assert [str(failure) for failure in result.failures] == []
        assert (result.tally.conversations, result.tally.calls, result.tally.beside) == (1, 3, 1)


@pytest.mark.parametrize("strategy", ["slim", "window", "tiered"])
@pytest.mark.parametrize("epoch", ["every_request", '{"high": 1000, "low": 500}'])
async def test_a_client_that_compacts_its_history_keeps_one(
    strategy: str, epoch: str, database: Database, tmp_path: Path
) -> None:
    """Its summary comes late and stands before what was said earlier; what is cut then is not what is stored."""
    dialogue = [
        message
        for number in range(9)
        for message in (user(f"Question {number}. " + "mill " * 60), assistant(f"Answer {number}: the wheel turns."))
    ]
    summary = [user("Summary of what was said: the wheel was asked about.")]
    before = [dialogue[:upto] for upto in (1, 3, 5, 7)]
    after = [[*summary, *dialogue[3:upto]] for upto in (9, 11, 13, 15, 17)]
    calls = [
        {
            "path": "/v1/chat/completions",
            "body": {"model": "gpt", "messages": messages},
            "reply": dialogue[dialogue.index(messages[-1]) + 1],
        }
        for messages in (*before, *after)
    ]
    path = write(tmp_path / "requests.jsonl", *calls)
    (result,) = await play(database, [path], Variant(strategy=strategy, epoch=epoch))
    assert [str(failure) for failure in result.failures] == []
    assert (result.tally.conversations, result.tally.calls) == (1, 9)


# Agents' own files


def entry(number: int, kind: str, content: object, *, parent: int | None = None, **more: Any) -> dict[str, Any]:
    """A line of Claude Code's."""
    parent_id = None if parent is None else f"u{parent}"
    message = {"role": kind, "content": content, **({"id": more.pop("reply")} if "reply" in more else {})}
    return {"type": kind, "uuid": f"u{number}", "parentUuid": parent_id, "sessionId": "s", "message": message, **more}


def use(call_id: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "Read", "input": {"path": call_id}}


def result(call_id: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": f"of {call_id}"}


def test_a_session_of_claude_code(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"type": "summary", "summary": "Mill", "leafUuid": "u9"},
        entry(1, "user", "Look at both."),
        entry(2, "assistant", [{"type": "text", "text": "I will."}], parent=1, reply="msg_1"),
        entry(3, "assistant", [use("a")], parent=2, reply="msg_1"),
        entry(4, "user", [result("a")], parent=3),
        entry(5, "assistant", [use("b")], parent=3, reply="msg_1"),
        entry(6, "user", [result("b")], parent=5),
        entry(20, "user", "Of another agent.", isSidechain=True),
        entry(7, "assistant", [{"type": "text", "text": "An attempt."}], parent=6, reply="msg_2"),
        entry(8, "assistant", [{"type": "text", "text": "Both turn."}], parent=6, reply="msg_3"),
        {"type": "system", "subtype": "compact_boundary", "uuid": "u9", "parentUuid": None, "logicalParentUuid": "u8"},
        entry(10, "user", "This session is being continued ...", parent=9, isCompactSummary=True),
        entry(11, "user", "Thanks.", parent=10),
        entry(12, "assistant", [{"type": "text", "text": "Gladly."}], parent=11, reply="msg_4"),
    ]
    conversation = only(write(tmp_path / "0b1c.jsonl", *lines))
    last = body(conversation.steps[-1])
    text = "Look at both.", "Both turn.", "Thanks."
    question, both_turn, thanks = ({"type": "text", "text": each} for each in text)
    assert last["messages"] == [
        {"role": "user", "content": [question]},
        {"role": "assistant", "content": [{"type": "text", "text": "I will."}, use("a"), use("b")]},
        {"role": "user", "content": [result("a"), result("b")]},
        {"role": "assistant", "content": [both_turn]},
        {"role": "user", "content": [thanks]},
    ]
    assert conversation.id == "0b1c"
    assert len(conversation.steps) == 3
    check_all(conversation, strict_anthropic.check)


def test_a_rollout_of_codex(tmp_path: Path) -> None:
    call = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"}
    items: Sequence[Mapping[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "mill.py"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One file."}]},
    ]
    lines = [
        {"timestamp": "t", "type": "session_meta", "payload": {"id": "x", "base_instructions": {"text": "Be brief."}}},
        {"timestamp": "t", "type": "turn_context", "payload": {"model": "gpt"}},
        *({"timestamp": "t", "type": "response_item", "payload": item} for item in items),
        {"timestamp": "t", "type": "event_msg", "payload": {"type": "token_count"}},
    ]
    first, second = only(write(tmp_path / "rollout-1.jsonl", *lines)).steps
    assert body(first) == {"model": "m", "instructions": "Be brief.", "input": items[:1]}
    assert first.reply == {"output": items[1:3]}
    assert body(second)["input"] == items[:4]
    assert bits(second.reply or {}, "openai_responses") == [("content", "One file.")]
    check_all(only(tmp_path / "rollout-1.jsonl"), strict_responses.check)


def gemini_records() -> list[dict[str, Any]]:
    response = {"functionResponse": {"id": "c1", "name": "ls", "response": {"output": "mill.py"}}}
    call = {"id": "c1", "name": "ls", "args": {"dir": "."}, "result": [response], "status": "success"}
    return [
        {"id": "1", "type": "user", "content": [{"text": "List the files."}]},
        {"id": "2", "type": "info", "content": "Checking for updates"},
        {"id": "3", "type": "gemini", "content": "I will.", "toolCalls": [call], "thoughts": [], "model": "g"},
        {"id": "4", "type": "user", "content": "/stats"},
        {"id": "5", "type": "gemini", "content": "One file."},
    ]


@pytest.mark.parametrize("is_old", [False, True])
def test_a_chat_of_gemini_cli(is_old: bool, tmp_path: Path) -> None:
    head: dict[str, Any] = {"sessionId": "s", "projectHash": "h", "startTime": "t"}
    records = gemini_records()
    if is_old:
        path = tmp_path / "session-1.json"
        path.write_text(json.dumps({**head, "messages": records}, indent=2))
    else:
        undone = {"id": "9", "type": "user", "content": "Never mind."}
        first = {**records[2], "toolCalls": []}
        lines = (head, *records[:2], first, undone, {"$rewindTo": "9"}, *records[2:], {"$set": {"summary": "x"}})
        path = write(tmp_path / "session-1.jsonl", *lines)
    conversation = only(path)
    last = body(conversation.steps[-1])["contents"]
    assert [content["role"] for content in last] == ["user", "model", "user"]
    assert last[1]["parts"][1] == {"functionCall": {"id": "c1", "name": "ls", "args": {"dir": "."}}}
    assert conversation.steps[-1].reply == {"role": "model", "parts": [{"text": "One file."}]}
    check_all(conversation, strict_gemini.check)


def test_a_call_that_gemini_cli_wrote_down_twice_is_one(tmp_path: Path) -> None:
    records = gemini_records()
    call = {"functionCall": {"id": "c1", "name": "ls", "args": {"dir": "."}}, "thoughtSignature": "c2ln"}
    records[2]["content"] = [{"text": "I will."}, call]
    path = write(tmp_path / "session-1.jsonl", {"sessionId": "s", "projectHash": "h"}, *records)
    assert body(only(path).steps[-1])["contents"][1]["parts"] == [{"text": "I will."}, call]


@pytest.mark.parametrize("is_bare", [False, True])
def test_a_checkpoint_of_gemini_cli(is_bare: bool, tmp_path: Path) -> None:
    history = [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}]
    path = tmp_path / "checkpoint-mill.json"
    path.write_text(json.dumps(history if is_bare else {"history": history, "authType": "x"}))
    (step,) = only(path).steps
    assert body(step) == {"contents": history[:1]}


@pytest.mark.parametrize("has_branches", [False, True])
def test_a_session_of_pi(has_branches: bool, tmp_path: Path) -> None:
    call = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "ls"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, call], "api": "x", "usage": {}},
        {"role": "toolResult", "toolCallId": "c1", "content": [{"type": "text", "text": "mill.py"}], "isError": False},
        {"role": "assistant", "content": [{"type": "text", "text": "On"}], "stopReason": "aborted"},
        {"role": "assistant", "content": [{"type": "text", "text": "One file."}]},
    ]
    lines: list[dict[str, Any]] = [{"type": "session", "id": "s", "cwd": "/mill"}]
    for number, message in enumerate(messages):
        links = {"id": f"e{number}", "parentId": f"e{number - 1}" if number else None} if has_branches else {}
        lines.append({"type": "message", **links, "message": message})
        if has_branches and number == 2:
            left = {"role": "assistant", "content": [{"type": "text", "text": "An attempt."}]}
            lines.append({"type": "message", "id": "x1", "parentId": "e2", "message": left})
    first, second = only(write(tmp_path / "pi.jsonl", *lines)).steps
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert first.reply == called
    assert body(second)["messages"][1:] == [called, {"role": "tool", "tool_call_id": "c1", "content": "mill.py"}]
    assert second.reply == assistant("One file.")
    check_all(only(tmp_path / "pi.jsonl"), strict.check)


def check_all(conversation: Conversation, check: Any) -> None:
    """The provider takes each request."""
    assert conversation.steps
    for step in conversation.steps:
        request = body(step)
        assert check({"max_tokens": 9, **request}) is None, request


# What is wrong


def test_line_in_no_dialect_is_reported_with_number_and_expected_members(tmp_path: Path) -> None:
    good = {"messages": [user("a"), assistant("b")]}
    path = write(tmp_path / "t.jsonl", good, {"prompt": "a", "completion": "b"}, good)
    with pytest.raises(BadTranscript) as refused:
        load_transcript(path)
    assert "t.jsonl, line 2: not a conversation: the line fits no dialect: looked for messages" in str(refused.value)
    assert str(refused.value).endswith("; it has prompt, completion")
    left_out: list[str] = []
    kept = load_transcript(path, on_bad_line=left_out.append)
    assert [each.number for each in kept.conversations] == [1, 3]
    assert len(left_out) == 1


@pytest.mark.parametrize(
    "bad", [b"{", b"7", b'{"messages": [7]}', b'{"messages": 7}', b"\xff\xfe", b'{"contents": {}}']
)
def test_invalid_lines_are_reported_without_a_traceback(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(bad + b"\n")
    with pytest.raises(BadTranscript, match=r"t\.jsonl, line 1: not a conversation"):
        load_transcript(path)


def test_lines_are_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"messages": [user("a" * 500)]}, {"messages": [user("a"), assistant("b")]})
    with pytest.raises(BadTranscript, match="line 1: longer than 200 bytes"):
        load_transcript(path, max_line=200)
    left_out: list[str] = []
    (kept,) = load_transcript(path, max_line=200, on_bad_line=left_out.append).conversations
    assert kept.number == 2
