"""Every POST is a call of a model, but for the routes that are known as free."""

from __future__ import annotations

import time

import pytest

from tersely.dialects.free_routes import is_model_call


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1beta/models/gemini-3:countTokens"),
        *("/v1/responses/resp_1/cancel", "/v1/chat/completions/chatcmpl-1", "/v1/conversations"),
        *("/v1/conversations/conv_1/items", "/v1/threads", "/v1/threads/thread_1", "/v1/threads/thread_1/messages"),
        *("/v1/threads/thread_1/runs/run_1", "/v1/threads/thread_1/runs/run_1/cancel", "/v1/assistants"),
        *("/v1/files", "/v1/uploads/u_1/parts", "/upload/v1beta/files", "/v1/batches", "/v1/batches/b/cancel"),
        *("/upload/v1beta/fileSearchStores/x:uploadToFileSearchStore", "/v1/messages/batches/b/cancel"),
        *("/v1beta/batches/b:cancel", "/v1internal:loadCodeAssist", "/v1internal:recordCodeAssistMetrics"),
    ],
)
def test_a_free_route_is_no_call(path: str) -> None:
    assert not is_model_call("POST", path)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/completions/", "/v1/chat/completions/", "/v1/responses/compact", "/v1/embeddings"),
        *("/v1/threads/runs", "/v1/threads/thread_1/runs", "/v1/threads/thread_1/runs/run_1/submit_tool_outputs"),
        *("/v1/messages/batches", "/v1/complete", "/v1/images/edits", "/v1/rerank", "/v1/filesystem", "/v1/files//x"),
        *("/v1beta/models/m:embedContent", "/v1beta/models/m:batchGenerateContent", "/v1beta/cachedContents"),
        *("/v1beta/interactions", "/v1internal:generateCode", "/v1internal:countTokensX", "/v1/files/%2e%2e/x"),
        "/upload/v1beta/models/m:generateContent",
    ],
)
def test_another_post_is_a_call(path: str) -> None:
    assert is_model_call("POST", path)
    assert not is_model_call("GET", path)


def test_long_paths_take_no_time() -> None:
    began = time.monotonic()
    for path in ("/v1/files" + "/a" * 50_000 + "//", "/v1/conversations" + "a" * 100_000 + "/%"):
        assert is_model_call("POST", path)
    assert time.monotonic() - began < 1
