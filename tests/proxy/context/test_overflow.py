"""Real errors of providers about contexts that are too long, and errors that sound alike, with a long history behind
the request.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import body_of, post
from tests.support.rows import messages_by_number, query
from tests.support.services import Service
from tests.support.upstreams import DONE, RawRequest, RawUpstream, http_head, sse

TURNS = 40


def history() -> list[dict[str, Any]]:
    """Long enough that it can be reduced, short enough that it is sent whole at first."""
    words = "the quick brown fox jumps over the lazy dog and goes on to the river bank " * 8
    turns: list[dict[str, Any]] = [{"role": "system", "content": "You are helpful."}]
    for number in range(TURNS):
        turns.append({"role": "user", "content": f"question {number}: {words}"})
        turns.append({"role": "assistant", "content": f"answer {number}: {words}"})
    return [*turns, {"role": "user", "content": "and the last question"}]


GOOD = (
    http_head("application/json")
    + json.dumps(
        {
            "id": "c1",
            "object": "chat.completion",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "it fits, at last"}, "finish_reason": "stop"}
            ],
        }
    ).encode()
)
GOOD_STREAM = http_head() + sse("it fits, at last", role=True) + sse(finish="stop") + DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An answer of a provider."""

    id: str
    status: int
    body: bytes
    transport: str
    is_overflow: bool

    @property
    def reply(self) -> bytes:
        content_type = "text/event-stream" if self.transport == "sse" else "application/json"
        return http_head(content_type, status=f"{self.status} X", x_request_id=self.id, retry_after="7") + self.body


def load(shared_data: Path) -> list[Case]:
    path = shared_data / "overflow_errors_dev.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    return [
        Case(
            id=each["id"],
            status=each["status"],
            body=each["body"].encode(),
            transport=each["transport"],
            is_overflow=each["is_overflow"],
        )
        for each in json.loads(path.read_text())
    ]


async def play(
    service: Service, raw: RawUpstream, case: Case, second: bytes, *, streams: bool, **headers: str
) -> tuple[Any, list[Any]]:
    """Send a long history; the first try is answered with the case, the next ones with ``second``."""
    session = f"overflow-{case.id}-{streams}"
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(case.reply if len(seen) == 1 else second)
        await writer.drain()

    raw.handler = handler
    answer = await post(service, body_of(*history(), stream=streams), X_Tersely_Session=session, **headers)
    return answer, seen


async def test_every_known_error(behind_raw: Service, raw: RawUpstream, shared_data: Path):
    cases = load(shared_data)
    assert {case.is_overflow for case in cases} == {True, False}
    wrong = []
    for case in cases:
        streams = case.transport == "sse"
        answer, seen = await play(behind_raw, raw, case, GOOD_STREAM if streams else GOOD, streams=streams)
        if case.is_overflow:
            is_right = len(seen) == 2 and answer.status == 200 and b"it fits, at last" in answer.body
            is_right = is_right and len(seen[1].body) < len(seen[0].body)
        else:
            is_right = (
                len(seen) == 1
                and (answer.status, answer.body) == (case.status, case.body)
                and answer.headers["x-request-id"] == case.id
                and answer.headers["retry-after"] == "7"
            )
        if not is_right:
            wrong.append((case.id, case.is_overflow, len(seen), answer.status, answer.body[:80]))
    assert wrong == []


@pytest.mark.parametrize("streams", [False, True])
async def test_the_reduced_retry_starts_an_epoch(behind_raw: Service, raw: RawUpstream, streams: bool):
    answer, seen = await play(
        behind_raw, raw, _refusal(f"ok-{streams}"), GOOD_STREAM if streams else GOOD, streams=streams
    )

    assert len(seen) == 2
    messages = json.loads(seen[1].body)["messages"]
    assert messages[-1]["content"] == "and the last question"
    assert "You are helpful." in messages[0]["content"]
    assert int(answer.headers["x-tersely-tokens-after"]) < int(answer.headers["x-tersely-tokens-before"])
    epochs = await query(behind_raw, "SELECT reason FROM epochs WHERE session_id = $1 ORDER BY number", answer.session)
    assert [row["reason"] for row in epochs][-1:] == ["overflow"]
    assert (await messages_by_number(behind_raw, answer.session))[-1].text == "it fits, at last"


@pytest.mark.parametrize("streams", [False, True])
async def test_a_retry_that_fails_too_is_the_providers_own_error(behind_raw: Service, raw: RawUpstream, streams: bool):
    second = _refusal(f"again-{streams}", says="again too long")

    answer, seen = await play(behind_raw, raw, _refusal(f"bad-{streams}"), second.reply, streams=streams)

    assert len(seen) == 2
    assert (answer.status, answer.body) == (400, second.body)
    epochs = await query(behind_raw, "SELECT reason FROM epochs WHERE session_id = $1", answer.session)
    assert "overflow" not in [row["reason"] for row in epochs]
    assert [each.role for each in await messages_by_number(behind_raw, answer.session)].count("user") == TURNS + 1


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("is_again", [False, True])
async def test_compact_makes_a_checkpoint_and_tries_again_once(
    behind_raw: Service, raw: RawUpstream, streams: bool, is_again: bool
):
    """tiancaiamao/ai, "Automatic and Recovery Compaction Paths": also without automatic compaction."""
    refusal = _refusal(f"compact-{is_again}-{streams}")
    good = GOOD_STREAM if streams else GOOD
    strategy = json.dumps({"name": "compact", "auto_compact": False})

    answer, seen = await play(
        behind_raw, raw, refusal, refusal.reply if is_again else good, streams=streams, X_Tersely_Strategy=strategy
    )

    assert len(seen) == 2
    assert answer.status == (400 if is_again else 200)
    first, second = (json.dumps(json.loads(each.body)["messages"]) for each in seen)
    assert "[Previous conversation summary]" not in first
    assert "[Previous conversation summary]" in second
    assert "question 0" in second  # in the checkpoint
    assert "and the last question" in second


@pytest.mark.parametrize("streams", [False, True])
async def test_trim_is_cleared_at_the_second_refusal_and_remembers_what_went(
    behind_raw: Service, raw: RawUpstream, key: str, streams: bool
):
    """CowAgent, "Overflow Emergency Handling", through the proxy."""
    refusal = _refusal(key)
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(refusal.reply if len(seen) <= 2 else GOOD_STREAM if streams else GOOD)
        await writer.drain()

    raw.handler = handler
    strategy = json.dumps({"name": "trim", "max_context_turns": 1_000})
    asked = body_of(*history(), stream=streams)
    answer = await post(behind_raw, asked, X_Tersely_Session=key, X_Tersely_Strategy=strategy)

    assert answer.status == 200
    _, second, third = (json.loads(each.body)["messages"] for each in seen)
    questions = [message for message in second if message["role"] == "user"]
    assert 1 < len(questions) <= 5
    assert [(m["role"], m["content"]) for m in third if m["role"] != "system"] == [("user", "and the last question")]
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while not found:
            await asyncio.sleep(0.1)
            found = (await post(behind_raw, b"", method="GET", path=f"/api/memory?session={key}")).json["items"]
    ranges = sorted((each["first_seq"], each["last_seq"]) for each in found)
    assert ranges[0][0] <= 2
    assert ranges[-1][1] == 2 * TURNS + 1
    assert sum(last - first + 1 for first, last in ranges) >= 2 * TURNS


async def test_a_history_that_cannot_be_reduced_gets_the_error(behind_raw: Service, raw: RawUpstream, key: str):
    refusal = _refusal(key)
    before = len(raw.requests)
    raw.answer(refusal.reply)

    answer = await post(behind_raw, body_of("only this"), X_Tersely_Session=key)

    assert (answer.status, answer.body) == (400, refusal.body)
    assert len(raw.requests) == before + 1


async def test_overflow_error_in_pieces_after_a_comment_is_recognised(behind_raw: Service, raw: RawUpstream, key: str):
    event = b'data: {"error":{"code":"context_length_exceeded","message":"This model\'s maximum context length"}}\n\n'
    seen: list[RawRequest] = []

    async def handler(request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        if len(seen) == 2:
            writer.write(GOOD_STREAM)
            return
        for piece in (http_head(), b": PROCESSING\n\n", event[:30], event[30:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)

    raw.handler = handler
    answer = await post(behind_raw, body_of(*history(), stream=True), X_Tersely_Session=key)

    assert len(seen) == 2
    assert b"it fits, at last" in answer.body


def _refusal(name: str, says: str = "too long") -> Case:
    error = {"message": f"This model's maximum context length: {says}", "code": "context_length_exceeded"}
    body = json.dumps({"error": error}).encode()
    return Case(id=name, status=400, body=body, transport="http", is_overflow=True)
