"""Tokens of instructions and tools: by the rules, and counted once."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tersely.domain import tokens as rules
from tersely.service.common.tokens import FixedTokens, count_text, encoding_for

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
    },
}


@pytest.mark.parametrize(("model", "layout"), [("gpt-4o", rules.GPT_4O_TOOLS), ("gpt-4", rules.GPT_4_TOOLS)])
def test_functions_are_counted_by_the_rule_of_their_model(model: str, layout: rules.ToolFormat) -> None:
    raw = json.dumps([TOOL]).encode()
    encode = partial(count_text, name=encoding_for(model))
    assert (
        FixedTokens().count_tools(model, raw) == rules.count_tools([TOOL], encode, layout=layout) < encode(raw.decode())
    )


def test_tools_that_are_no_list_count_by_their_text() -> None:
    for raw in (b'{"a": 1}', b"[not json"):
        assert FixedTokens().count_tools("gpt-4o", raw) == count_text(raw.decode(), "o200k_base")
    assert FixedTokens().count_tools("gpt-4o", b"") == 0
