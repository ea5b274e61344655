"""Offering tools of Tersely's own, and asking for an answer without any, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.dialects.dialect import Dialect, ToolOffer
from tersely.dialects.registry import DIALECTS, dialect_named
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Dialect as DialectName

OFFER = ToolOffer(name="look", description="Looks.", parameters={"type": "object", "properties": {}})
BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "model": "m",
        "tools": [{"type": "function", "function": {"name": "own", "parameters": {"x": 1.0}}}],
        "messages": [],
    },
    "openai_responses": {"model": "m", "tools": [{"type": "function", "name": "own", "parameters": {}}], "input": []},
    "anthropic": {"model": "m", "tools": [{"name": "own", "input_schema": {}}], "messages": []},
    "gemini": {"contents": [], "tools": [{"functionDeclarations": [{"name": "own"}]}], "toolConfig": {"a": 1}},
    "gemini_gca": {"model": "m", "request": {"contents": [], "tools": [{"functionDeclarations": [{"name": "own"}]}]}},
}
WITHOUT: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "m", "messages": []},
    "openai_responses": {"model": "m", "input": []},
    "anthropic": {"model": "m", "messages": []},
    "gemini": {"contents": []},
    "gemini_gca": {"request": {"contents": []}},
}
NAMED = [pytest.param(dialect_named(name), body, id=name) for name, body in BODIES.items()]
BARE = [pytest.param(dialect_named(name), body, id=name) for name, body in WITHOUT.items()]


def names(body: bytes) -> list[str]:
    request = json.loads(body)
    request = request.get("request", request)
    found = []
    for tool in request.get("tools", []):
        declared = tool.get("functionDeclarations") or [tool.get("function", tool)]
        found += [each["name"] for each in declared]
    return found


@pytest.mark.parametrize(("dialect", "body"), NAMED)
def test_offers_stand_behind_the_clients_own_tools(dialect: Dialect, body: dict[str, Any]) -> None:
    raw = json.dumps(body, indent=1).encode()
    added = dialect.add_tools(raw, [OFFER])
    assert names(added) == ["own", "look"]
    own = json.dumps(body["tools"][0], indent=1)[2:30] if "tools" in body else '"own"'
    assert own.strip().encode()[:8] in added
    assert dialect.add_tools(raw, [OFFER]) == added


@pytest.mark.parametrize(("dialect", "body"), BARE)
def test_request_without_tools_gets_own_tools_alone(dialect: Dialect, body: dict[str, Any]) -> None:
    assert names(dialect.add_tools(json.dumps(body).encode(), [OFFER])) == ["look"]


@pytest.mark.parametrize(("dialect", "body"), NAMED)
def test_forbidden_tools_stay_where_they_are(dialect: Dialect, body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    forbidden = dialect.forbid_tools(raw)
    assert names(forbidden) == ["own"]
    request = json.loads(forbidden)
    request = request.get("request", request)
    choice = request.get("tool_choice") or request["toolConfig"]["functionCallingConfig"]
    assert choice in ("none", {"type": "none"}, {"mode": "NONE"})
    assert dialect.forbid_tools(forbidden) == forbidden


@pytest.mark.parametrize(("dialect", "body"), BARE)
def test_forbid_tools_without_tools_changes_nothing(dialect: Dialect, body: dict[str, Any]) -> None:
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert json.loads(dialect.forbid_tools(raw)) == body


CLOSED = [
    ("gemini", {"contents": [], "tools": [{"google_search": {}}]}),
    ("gemini", {"contents": [], "tools": [{"functionDeclarations": []}, {"codeExecution": {}}]}),
    ("gemini", {"contents": [], "cachedContent": "x"}),
    ("gemini_gca", {"request": {"contents": [], "tools": [{"google_search": {}}]}}),
    ("gemini_gca", {"request": {"contents": [], "cachedContent": "x"}}),
    ("openai_responses", {"input": "x", "max_tool_calls": 1}),
    ("openai_responses", {"input": "x", "prompt": {"id": "p"}}),
]


@pytest.mark.parametrize(("name", "body"), CLOSED)
def test_requests_that_take_no_more_functions(name: DialectName, body: dict[str, Any]) -> None:
    assert not DIALECTS[name].read_request(json.dumps(body).encode()).takes_tools


@pytest.mark.parametrize(("dialect", "body"), [*NAMED, *BARE])
def test_requests_that_take_more_functions(dialect: Dialect, body: dict[str, Any]) -> None:
    assert dialect.read_request(json.dumps(body).encode()).takes_tools


def test_tools_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        DIALECTS["openai_chat"].add_tools(b'{"tools":{"a":1}}', [OFFER])


_ANY = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["autofix"]}}


@pytest.mark.parametrize(
    ("name", "choice", "requires"),
    [
        ("openai_chat", "auto", False),
        ("openai_chat", "none", False),
        ("openai_chat", "required", True),
        ("openai_chat", "any", True),
        ("openai_chat", None, False),
        ("openai_chat", {"type": "function", "function": {"name": "autofix"}}, True),
        ("openai_chat", {"type": "custom", "custom": {"name": "nonempty"}}, True),
        ("openai_chat", {"name": "autofix"}, True),
        ("openai_chat", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, False),
        ("openai_chat", {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": ["auto"]}}, True),
        ("openai_responses", "auto", False),
        ("openai_responses", "required", True),
        ("openai_responses", {"type": "function", "name": "none_left"}, True),
        ("openai_responses", {"type": "file_search"}, True),
        ("openai_responses", {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}, False),
        ("openai_responses", {"type": "allowed_tools", "mode": "required", "tools": [{"name": "auto"}]}, True),
        ("anthropic", {"type": "auto"}, False),
        ("anthropic", {"type": "none"}, False),
        ("anthropic", {"type": "any"}, True),
        ("anthropic", {"type": "tool", "name": "autofix"}, True),
        ("gemini", {"functionCallingConfig": {"mode": "AUTO"}}, False),
        ("gemini", {"functionCallingConfig": {"mode": "VALIDATED"}}, False),
        ("gemini", {"retrievalConfig": {"languageCode": "de"}}, False),
        ("gemini", _ANY, True),
        ("gemini", {"function_calling_config": {"mode": "any"}}, True),
        ("gemini_gca", _ANY, True),
    ],
)
def test_a_tool_choice_is_read_in_its_dialect(name: DialectName, choice: Any, requires: bool) -> None:
    assert dialect_named(name).requires_call(json.dumps(choice).encode()) is requires


@pytest.mark.parametrize("name", [*DIALECTS])
def test_a_tool_choice_that_cannot_be_read_requires_nothing(name: DialectName) -> None:
    for choice in (b"[", b"7", b'[{"type": "any"}]', b'"\xff"'):
        assert not dialect_named(name).requires_call(choice)


def test_the_older_function_call_is_a_tool_choice() -> None:
    body = {"messages": [], "functions": [{"name": "autofix"}], "function_call": {"name": "autofix"}}
    dialect = dialect_named("openai_chat")
    assert dialect.requires_call(dialect.read_request(json.dumps(body).encode()).tool_choice)
