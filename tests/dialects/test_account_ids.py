"""Ids of a provider's account are found in request bodies, however they are written."""

import json

import pytest

from tersely.dialects.account_ids import AccountId, cited, find_account_ids
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect

# (dialect, body, the ids in it)
NAMED: list[tuple[Dialect, dict[str, object], list[str]]] = [
    ("openai_responses", {"previous_response_id": "resp_1", "input": "Hi"}, ["resp_1"]),
    ("openai_responses", {"conversation": {"id": "conv_1"}, "input": "Hi"}, ["conv_1"]),
    ("openai_responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}, ["msg_1"]),
    (
        "openai_chat",
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
        ["file-1"],
    ),
    (
        "anthropic",
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {"file_id": "file_1"}}]}]},
        ["file_1"],
    ),
    ("anthropic", {"container": "container_1", "messages": []}, ["container_1"]),
    ("gemini", {"cachedContent": "cachedContents/1", "contents": []}, ["cachedContents/1"]),
]


@pytest.mark.parametrize(("dialect", "body", "ids"), NAMED)
def test_an_id_is_found_in_each_dialect(dialect: Dialect, body: dict[str, object], ids: list[str]) -> None:
    assert list(dict.fromkeys(found.id for found in find_account_ids(dialect, json.dumps(body).encode()))) == ids


def test_an_escaped_member_name_does_not_hide_an_id() -> None:
    body = b'{"previous_response\\u005fid": "resp_1", "input": "Hi"}'
    assert find_account_ids("openai_responses", body) == [AccountId(id="resp_1", field="previous_response_id")]


def test_all_of_several_members_with_one_name_count() -> None:
    body = b'{"previous_response_id": "resp_1", "previous_response_id": "resp_2", "input": "Hi"}'
    assert [found.id for found in find_account_ids("openai_responses", body)] == ["resp_1", "resp_2"]


def test_text_that_mentions_an_id_names_none() -> None:
    body = {"messages": [{"role": "user", "content": 'What is "file_id": "file-1"?'}]}
    assert find_account_ids("openai_chat", json.dumps(body).encode()) == []


def test_a_citation_has_an_id_of_its_own() -> None:
    assert cited("file-1") != "file-1"


@pytest.mark.parametrize("body", [b"[]", b'{"file_id": ', b'"file_id"', b"\xff\xfe{"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        find_account_ids("openai_chat", body)


def test_a_body_that_is_nested_too_deep_is_refused() -> None:
    body = b'{"file_id": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(InvalidRequest, match="nested too deep"):
        find_account_ids("openai_chat", body)
