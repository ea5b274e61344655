"""The memory that a worker spends on the request_heads of requests is bounded, whoever sends them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from tersely.api.request_heads import RequestHeads
from tersely.api.transport.body import Scope


def scope_of(path: str = "/v1/chat/completions", query: str = "", key: str = "sk-1") -> Scope:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"authorization", f"Bearer {key}".encode()), (b"content-length", b"10")],
    }


@pytest.mark.parametrize(
    "long",
    [
        lambda number: scope_of(f"/v1/files/{number}{'a' * 30_000}"),
        lambda number: scope_of(query=f"a={number}{'a' * 30_000}"),
        lambda number: scope_of(key=f"{number}{'a' * 30_000}"),
    ],
    ids=["path", "query", "header"],
)
def test_long_requests_are_not_kept(long: Callable[[int], Scope]) -> None:
    request_heads = RequestHeads()
    tracemalloc.start()
    try:
        for number in range(100):
            assert request_heads.read(long(number)) is not None
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000


def test_requests_of_another_caller_are_read_anew() -> None:
    request_heads = RequestHeads()
    first = request_heads.read(scope_of(query="key=tsk_mine"))
    assert first is not None
    assert request_heads.read(scope_of(query="key=tsk_mine")) is first
    for other in (scope_of(query="key=tsk_theirs"), scope_of(query="key=tsk_mine", key="sk-2")):
        found = request_heads.read(other)
        assert found is not None
        assert found is not first
        assert found.headers != first.headers
