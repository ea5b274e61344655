"""Patching messages of a context: other texts in the results, a text in front; every other byte stays."""

from __future__ import annotations

import json

import pytest

from tersely.dialects.openai_chat.read import read_message
from tersely.dialects.openai_chat.write import with_prefix, with_results

IMAGE = b'{"type":"image_url" , "image_url":{"url":"data:image/png;base64,AAAA"}}'


@pytest.mark.parametrize(
    ("raw", "patched"),
    [
        (
            b'{"role":"tool" , "tool_call_id":"c","x": 1.0, "content":"long \\u00e9"}',
            b'{"role":"tool","tool_call_id":"c","x":1.0,"content":"new"}',
        ),
        (
            b'{"role":"function","name":"c","content":"long"}',
            b'{"role":"function","name":"c","content":"new"}',
        ),
        (
            b'{"role":"tool","tool_call_id":"c","content":[{"type":"text","cache_control":{"type": "x"},"text":"a"},'
            + IMAGE
            + b',{"type":"text","text":"b"}]}',
            b'{"role":"tool","tool_call_id":"c","content":[{"type":"text","cache_control":{"type": "x"},"text":"new"},'
            + IMAGE
            + b"]}",
        ),
        (
            b'{"role":"tool","tool_call_id":"c","content":["a","b"]}',
            b'{"role":"tool","tool_call_id":"c","content":["new"]}',
        ),
        (b'{"role":"tool","tool_call_id":"c","content":null}', b'{"role":"tool","tool_call_id":"c","content":"new"}'),
        (
            b'{"role":"tool", "tool_call_id":"other","content":"a"}',
            b'{"role":"tool", "tool_call_id":"other","content":"a"}',
        ),
    ],
)  # fmt: skip
def test_a_result_gets_another_text(raw: bytes, patched: bytes):
    assert with_results(raw, {"c": "new", "function_call:c": "new"}) == patched


def test_the_placeholder_of_media_in_a_result_is_written_once():
    raw = b'{"role":"tool","tool_call_id":"c","content":[' + IMAGE + b',{"type":"text","text":"words"}]}'
    (result,) = read_message(raw).results
    assert result.text == "[image]\nwords"
    content = json.loads(with_results(raw, {"c": "[image]\nwor... [TRUNCATED]"}))["content"]
    assert [part.get("text", "image") for part in content] == ["image", "wor... [TRUNCATED]"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'"words"', b'"memo\\n\\nwords"'),
        (b'""', b'"memo"'),
        (b"null", b'"memo"'),
        (b'"\\ud800"', b'"memo\\n\\n\\ud800"'),
        (
            b"[" + IMAGE + b' , {"type":"text","text":"w"}]',
            b'[{"type":"text","text":"memo"},' + IMAGE + b',{"type":"text","text":"w"}]',
        ),
    ],
)  # fmt: skip
def test_with_prefix_precedes_the_users_text(content: bytes, expected: bytes):
    raw = b'{"name":"n" ,"role":"user","content":' + content + b"}"
    assert with_prefix(raw, "memo") == b'{"name":"n","role":"user","content":' + expected + b"}"
