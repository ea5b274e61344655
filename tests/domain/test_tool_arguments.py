"""Forms in which models write a tool's arguments, and the errors that they are told."""

from __future__ import annotations

import pytest

from tersely.domain.errors import InvalidRequest
from tersely.domain.tools.arguments import MAX_ARGUMENTS, read_arguments
from tersely.domain.tools.catalog import OFFERED_BY_DEFAULT, TOOLS, parse_offer


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        ("retrieve_memos", b"", {}),
        ("retrieve_memos", b' {"tags": null, "limit": 2.0}', {"limit": 2}),
        ("save_memo", '{"content": "a", "tags": []}', {"content": "a", "tags": []}),
        ("read_artifact", {"sha256": "ab", "offset": 0}, {"sha256": "ab", "offset": 0}),
    ],
)
def test_valid_arguments(name: str, given: object, read: object) -> None:
    assert read_arguments(TOOLS[name], given) == read


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("query_db", b'{"sql": "SELECT', "not valid JSON"),
        ("query_db", b"\xff", "not valid JSON"),
        ("query_db", b"[" * 100_000, "nested too deep"),
        ("query_db", b"[]", "must be a JSON object"),
        ("query_db", b" " * (MAX_ARGUMENTS + 1), "too long"),
        ("query_db", b"{}", "sql is missing. Parameters: sql (required)."),
        ("query_db", b'{"query": "x"}', "unknown parameter 'query'. Parameters: sql (required)."),
        ("query_db", b'{"sql": 1}', "sql must be a string, not '1'"),
        ("manage_scratchpad", {"action": "delete"}, "action must be one of 'read', 'update', 'append', not 'delete'"),
        ("manage_scratchpad", {"action": []}, "action must be one of"),
        ("save_memo", {"content": "a", "tags": "b"}, "tags must be a list of strings"),
        ("save_memo", {"content": "a", "tags": [1]}, "tags must be a list of strings"),
        ("retrieve_memos", {"limit": True}, "limit must be an integer from 1 to 20"),
        ("retrieve_memos", {"limit": 1.5}, "limit must be an integer from 1 to 20"),
        ("retrieve_memos", {"query": "x" * 1_001}, "query must have at most 1000 characters, not 1001"),
    ],
)
def test_invalid_arguments_are_refused(name: str, given: object, words: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_arguments(TOOLS[name], given)
    assert words in refused.value.detail


def test_every_strategy_offers_known_tools() -> None:
    assert {name for names in OFFERED_BY_DEFAULT.values() for name in names} <= set(TOOLS)
    assert parse_offer(" OFF ") == ()
    assert parse_offer("query_db, context_search,query_db") == ("query_db", "context_search")
    for wrong in ("", "search", "off,query_db"):
        with pytest.raises(InvalidRequest, match="must be off or some of context_search"):
            parse_offer(wrong)
