"""Routes that tenants may use with the operator's key."""

from __future__ import annotations

import pytest

from tersely.dialects.account_routes import ALLOWED, allow, find_route, parse_passthrough, rules_for
from tersely.domain.errors import InvalidRequest


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("DELETE", "/v1/files/file-1"),
        ("GET", "/v1/organization/users"),
        ("GET", "/v1/responses"),
        ("POST", "/v1/models"),
        ("GET", "/v1/models/../files"),
        ("GET", "/v1/models/%2e%2e/files"),
        ("GET", "/v1/models/a%2f..%2ffiles"),
        ("GET", "/v1/models/%252e%252e"),
        ("GET", "/v1/models//x"),
        ("GET", "v1/models"),
        ("GET", "/v1/models?$httpMethod=DELETE"),
    ],
)
def test_every_other_route_is_refused(method: str, path: str) -> None:
    assert find_route(ALLOWED["openai_chat"], "openai_chat", method, path) is None


def test_ids_in_a_path_are_returned_to_be_checked() -> None:
    found = find_route(ALLOWED["openai_responses"], "openai_responses", "GET", "/v1/responses/resp_1?include=x")

    assert found is not None
    assert (found.ids, found.creates) == (("resp_1",), True)


def test_googles_ids_carry_the_name_of_their_collection() -> None:
    rules = (allow("GET", "/v1beta/cachedContents/{id}"),)
    found = find_route(rules, "gemini", "GET", "/v1beta/cachedContents/abc")

    assert found is not None
    assert found.ids == ("cachedContents/abc",)


@pytest.mark.parametrize("path", ["/v2/x", "v1/x", "/v1/**/x", "/v1/../x", "/v1/a b", ""])
def test_patterns_that_could_match_too_much_are_refused(path: str) -> None:
    with pytest.raises(InvalidRequest):
        allow("GET", path)


def test_the_operators_additions() -> None:
    passthrough = parse_passthrough("GET /v1/files/{id}\nPOST /v1/files, ID file-shared-*")

    assert passthrough.is_shared("file-shared-1")
    assert not passthrough.is_shared("file-1")
    rules = rules_for("openai_chat", passthrough)
    found = find_route(rules, "openai_chat", "GET", "/v1/files/file-9")
    assert found is not None
    assert found.ids == ("file-9",)
    made = find_route(rules, "openai_chat", "POST", "/v1/files")
    assert made is not None
    assert made.creates


@pytest.mark.parametrize("entry", ["GET", "GET /v1/a /v1/b", "FETCH /v1/files", "ID a b", "ID [a-z]"])
def test_an_entry_that_is_neither_route_nor_id_is_refused(entry: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_passthrough(entry)
