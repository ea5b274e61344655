"""Overflow or not: what providers really answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tersely.dialects.dialect import Overflow
from tersely.dialects.errors import classify_error

CASES = Path(__file__).parents[3] / "shared" / "data" / "overflow_errors_dev.json"


def error(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error", **more}}).encode()


def test_recorded_errors():
    if not CASES.exists():
        pytest.skip(f"the recorded errors are not there: {CASES}")
    wrong = []
    for case in json.loads(CASES.read_text()):
        body = case["body"] if isinstance(case["body"], str) else json.dumps(case["body"])
        found = classify_error(case["status"], body.encode())
        if (found is not None) != case["is_overflow"]:
            wrong.append((case["id"], body[:100]))
    assert wrong == []


@pytest.mark.parametrize(
    ("status", "body", "limit", "needed"),
    [
        (
            400,
            error(
                "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."
            ),
            8192,
            9000,
        ),
        (
            400,
            error(
                "This model's maximum context length is 4096 tokens. However, you requested 4100 tokens (4000 in the "
                "messages, 100 in the completion)."
            ),
            4096,
            4100,
        ),
        (400, error("prompt is too long: 210000 tokens > 200000 maximum"), 200000, 210000),
        (400, error("input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"), 200000, 210000),
        (
            400,
            error("The input token count (1048577) exceeds the maximum number of tokens allowed (1048576)."),
            1048576,
            1048577,
        ),
        (400, error("Input length (5000) exceeds model's maximum context length (4096)."), 4096, 5000),
        (
            422,
            error(
                "`inputs` tokens + `max_new_tokens` must be <= 4097. Given: 4000 `inputs` tokens and 200 "
                "`max_new_tokens`"
            ),
            4097,
            4200,
        ),
        (400, error("Your request exceeded model token limit: 8192 (requested: 9000)"), 8192, 9000),
        (500, error("the request exceeds the available context size", n_prompt_tokens=900, n_ctx=512), 512, 900),
        (400, error("Requested tokens (2285) exceed context window of 2048"), 2048, 2285),
        (400, error("prompt too long; exceeded max context length by 12 tokens"), None, None),
        (400, error("whatever", code="context_length_exceeded"), None, None),
        (400, error("max_tokens must be at least 1, got -5."), None, None),
        (
            502,
            error("Provider returned error", metadata={"raw": error("maximum context length is 64 tokens").decode()}),
            64,
            None,
        ),
        (413, b"", None, None),
        (400, b"prompt is too long", None, None),
        (
            200,
            b'data: {"error":{"message":"This model\'s maximum context length is 10 tokens","code":400}}\n\n',
            10,
            None,
        ),
        (
            200,
            b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":'
            b'"context_length_exceeded","message":"x"}}}\n\n',
            None,
            None,
        ),
        (200, b'{"choices":[{"finish_reason":"model_context_window_exceeded"}]}', None, None),
    ],
)
def test_overflow_errors_are_recognised(status: int, body: bytes, limit: int | None, needed: int | None):
    assert classify_error(status, body) == Overflow(limit=limit, needed=needed)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (429, error("This model's maximum context length is 10 tokens.", code="context_length_exceeded")),
        (
            413,
            error(
                "Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 14810, "
                "please reduce "
                "your message size and try again.",
                code="rate_limit_exceeded",
            ),
        ),
        (400, error("max_tokens is too large: 64000. This model supports at most 16384 completion tokens")),
        (400, error("max_tokens: 128000 > 64000, which is the maximum allowed number of output tokens for x")),
        (400, error("Invalid 'user': string too long. Expected a string with maximum length 64")),
        (400, error("Invalid 'messages': array too long. Expected an array with maximum length 2048")),
        (503, error("Too many tokens queued")),
        (401, error("Incorrect API key provided")),
        (413, b"<html><title>413 Request Entity Too Large</title></html>"),
        (500, b""),
        (400, error("An assistant message with 'tool_calls' must be followed by tool messages")),
        (200, b'{"choices":[{"message":{"content":"prompt is too long"},"finish_reason":"stop"}]}'),
        (200, b'data: {"choices":[{"delta":{"content":"context_length_exceeded"}}]}\n\n'),
        (200, b'{"id":"x","error":null,"choices":[]}'),
        (400, b"[" * 100_000),
    ],
)
def test_errors_that_resemble_overflows_are_none(status: int, body: bytes):
    assert classify_error(status, body) is None
