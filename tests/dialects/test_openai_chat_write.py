"""Writing requests: patches that leave every other byte alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersely.dialects.dialect import ClientView, ErrorDescription, RequestPatch
from tersely.dialects.errors import classify_error
from tersely.dialects.openai_chat.read import read_request
from tersely.dialects.openai_chat.write import (
    add_instructions,
    as_input,
    error_body,
    with_text,
    write_message,
    write_request,
    write_text,
)
from tersely.dialects.registry import DIALECTS
from tersely.domain.errors import InvalidRequest
from tersely.domain.messages import Media, Message, Reasoning, Text
from tersely.domain.text.tags import TagKinds

BODY = (
    b'{ "model" : "m", "seed": 1.0, "messages" : [ {"role":"user","content":"old"} ],\n "x": '
    b'{"y" :[1 ,2]},"seed":2.50, '
    b'"big":123456789012345678901234567890,"odd":"\\ud800\\u0000" }'
)


def test_only_the_messages_change():
    assert write_request(BODY, RequestPatch(messages=[b'{"role":"user" , "content":"new"}', b"{}"])) == (
        b'{"model":"m","seed":2.50,"messages":[{"role":"user" , "content":"new"},{}],"x":{"y" :[1 ,2]},'
        b'"big":123456789012345678901234567890,"odd":"\\ud800\\u0000"}'
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (b"", b'{"include_usage":true}'),
        (b',"stream_options":null', b'{"include_usage":true}'),
        (b',"stream_options":{"x":1.0,"include_usage":false}', b'{"x":1.0,"include_usage":true}'),
    ],
)
def test_include_usage_sets_the_stream_option(options: bytes, expected: bytes):
    written = write_request(b'{"messages":[]' + options + b"}", RequestPatch(messages=[], include_usage=True))
    assert written == b'{"messages":[],"stream_options":' + expected + b"}"
    assert read_request(written).include_usage


def test_invalid_body_is_refused():
    for body in (b"{", b"[]", b'{"messages":[],"stream_options":5}'):
        with pytest.raises(InvalidRequest):
            write_request(body, RequestPatch(messages=[], include_usage=True))


USER = b'{"role":"user","content":"u"}'


@pytest.mark.parametrize(
    ("leading", "expected"),
    [
        ([], [b'{"role":"system","content":"OURS"}']),
        ([b'{"content":"A", "x":1.0,"role":"system"}'], [b'{"content":"A\\n\\nOURS","x":1.0,"role":"system"}']),
        (
            [b'{"role":"system","content":"A"}', b'{"role":"developer","content":"B"}'],
            [b'{"role":"system","content":"A"}', b'{"role":"developer","content":"B\\n\\nOURS"}'],
        ),
        (
            [b'{"role":"system","content":[ {"type":"text","text":"A","cache_control":{}} ]}'],
            [
                b'{"role":"system","content":[{"type":"text","text":"A","cache_control":{}},'
                b'{"type":"text","text":"OURS"}]}'
            ],
        ),
        ([b'{"role":"system","content":""}'], [b'{"role":"system","content":"OURS"}']),
        ([b'{"role":"system"}'], [b'{"role":"system","content":"OURS"}']),
    ],
)
def test_instructions_are_put_behind_the_clients_own(leading: list[bytes], expected: list[bytes]):
    later = b'{"role":"system","content":"later"}'
    assert add_instructions([*leading, USER, later], "OURS") == [*expected, USER, later]
    written = write_request(b'{"messages":[]}', RequestPatch(messages=[*leading, USER], instructions="OURS"))
    assert written == b'{"messages":[' + b",".join([*expected, USER]) + b"]}"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            {
                "role": "assistant",
                "content": "x",
                "refusal": None,
                "annotations": [],
                "audio": None,
                "tool_calls": None,
            },
            {"role": "assistant", "content": "x"},
        ),
        (
            {"content": None, "tool_calls": [{"id": "a"}], "reasoning_content": "hm", "citations": []},
            {"content": None, "tool_calls": [{"id": "a"}], "reasoning_content": "hm", "role": "assistant"},
        ),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "content": None, "refusal": "no"},
        ),
        (
            {"role": "assistant", "content": None, "audio": {"id": "au", "data": "AAAA", "transcript": "t"}},
            {"role": "assistant", "content": None, "audio": {"id": "au"}},
        ),
        (
            {"role": "assistant", "content": "", "reasoning_details": [{"type": "x"}], "images": [1]},
            {"role": "assistant", "content": "", "reasoning_details": [{"type": "x"}]},
        ),
    ],
)
def test_a_reply_as_input(reply: dict[str, Any], expected: dict[str, Any]):
    written = as_input(json.dumps(reply).encode())
    assert json.loads(written) == expected
    assert as_input(written) == written


def test_a_reply_as_input_keeps_the_bytes_of_its_members():
    raw = b'{"role":"assistant","content":"\\ud800 \\u00e9","tool_calls":[ {"id":"a","n":1.0} ]}'
    assert as_input(raw) == raw


@pytest.mark.parametrize(
    ("echo", "text", "expected"),
    [
        (
            b'{"role":"assistant", "content":"a","x":1.0}',
            "a<terse>b</terse>",
            b'{"role":"assistant", "content":"a<terse>b</terse>","x":1.0}',
        ),
        (
            b'{"role":"assistant","content":[{"type":"text","text":"a","cache_control":{}},{"type":"text","text":"c"}]}',
            "ab",
            b'{"role":"assistant","content":[{"type":"text","text":"ab","cache_control":{}}]}',
        ),
        (
            b'{"role":"assistant","content":[{"type":"thinking"}]}',
            "ab",
            b'{"role":"assistant","content":[{"type":"thinking"},{"type":"text","text":"ab"}]}',
        ),
        (b'{"role":"assistant","content":""}', None, b'{"role":"assistant","content":null}'),
        (
            b'{"role":"assistant","tool_calls":[]}',
            "\ud800",
            b'{"role":"assistant","tool_calls":[],"content":"\\ud800"}',
        ),
    ],
)
def test_restore_reply_restores_the_models_text(echo: bytes, text: str | None, expected: bytes):
    assert with_text(echo, text) == expected


def test_messages_of_our_own():
    assert write_text("user", "ä\n") == '{"role":"user","content":"ä\\n"}'.encode()
    parts = (Reasoning(text="r"), Text(text="a"), Media(kind="image", digest="d"))
    assert (
        write_message(Message(role="user", parts=parts, raw=b"ignored")) == b'{"role":"user","content":"a\\n[image]"}'
    )


def test_errors_in_the_providers_shape():
    assert json.loads(error_body(ErrorDescription(message="no", code="c", param="p"))) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "c"}
    }


def test_the_registry_knows_the_dialect_by_its_name():
    for name, dialect in DIALECTS.items():
        assert dialect.name == name
    dialect = DIALECTS["openai_chat"]
    assert dialect.read_request(dialect.write_request(BODY, RequestPatch(messages=[USER]))).messages[0].text == "u"
    stream = dialect.open_stream(ClientView(tags=TagKinds(terse=True), strip_usage=True))
    assert stream.feed(b"data: [DONE]\n\n") + stream.close() == b"data: [DONE]\n\n"
    assert stream.reply.is_done
    assert dialect.split_reply(b"{}", ClientView(tags=TagKinds(terse=True)))[0] == b"{}"
    assert (
        classify_error(400, dialect.error_body(ErrorDescription(message="x", code="context_length_exceeded")))
        is not None
    )
