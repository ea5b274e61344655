"""Bytes that nothing has to change pass unchanged, and what is Tersely's own stays here."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest

from tests.support.http import body_of, post, request_bytes, wire
from tests.support.rows import messages_by_number, query
from tests.support.services import Service, serve
from tests.support.upstreams import DONE, RawUpstream, chunk, http_head, sse

ODD_BODY = (
    b'{ "model":"gpt-4o-mini" ,"messages":[ {"content":"\\u0041 \\ud83d\\ude00 \xf0\x9f\x98\x80","role":"user",'
    b'"x":1.0,"y":12345678901234567890123,"z":1E5} ],\n\t"unknown":{"b":1,"a":[]},"temperature":0.10 }'
)
ODD_REPLY = (
    b'{"object":"chat.completion", "id":"c1","choices":[ {"index":0,"message":{"content":"h\\u0069 \xc3\xa9 and more",'
    b'"role":"assistant","odd":1.50},"finish_reason":"stop"}],"usage":{"prompt_tokens":1},"x":[1.0, 2] }\n'
)
TSK = "tsk_0123456789abcdef_" + "s" * 43


def reply_of(body: bytes, content_type: str = "application/json", **headers: str) -> bytes:
    return http_head(content_type, content_length=str(len(body)), **headers) + body


async def test_full_without_instructions_changes_no_byte(plain_behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(reply_of(ODD_REPLY))

    answer = await post(plain_behind_raw, ODD_BODY, X_Tersely_Session=key)

    assert raw.requests[-1].body == ODD_BODY
    assert answer.body == ODD_REPLY
    assert answer.context == "passthrough"
    assert (await messages_by_number(plain_behind_raw, key))[0].raw in ODD_BODY
    assert (await messages_by_number(plain_behind_raw, key))[1].raw in ODD_REPLY


async def test_full_without_instructions_streams_every_byte(plain_behind_raw: Service, raw: RawUpstream, key: str):
    events = [
        b": a comment\r\n\r\n",
        sse("caf\u00e9 ", role=True).replace(b"data: ", b"data:"),
        sse("<terse>kept, this is full</terse>"),
        b"event: odd\nid: 7\nretry: 10\n\n",
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n',
        sse(finish="stop"),
        DONE,
        b": after\n\n",
    ]
    raw.answer(http_head(), *events)
    body = ODD_BODY[:-1] + b',"stream":true,"stream_options":{"include_usage":true}}'

    answer = await post(plain_behind_raw, body, X_Tersely_Session=key)

    assert raw.requests[-1].body == body
    assert answer.body == b"".join(events)
    assert (await messages_by_number(plain_behind_raw, key))[1].text == "caf\u00e9 <terse>kept, this is full</terse>"


async def test_bypass_forwards_unchanged_and_stores_nothing(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(reply_of(ODD_REPLY))

    answer = await post(behind_raw, ODD_BODY, X_Tersely_Session=key, X_Tersely_Bypass="true")

    assert raw.requests[-1].body == ODD_BODY
    assert answer.body == ODD_REPLY
    assert answer.context == "bypass"
    assert await messages_by_number(behind_raw, key) == []


async def test_bypass_reads_nothing_of_the_body(behind_raw: Service, raw: RawUpstream):
    raw.answer(reply_of(b'{"error":{"message":"no JSON"}}'))

    answer = await post(behind_raw, b"\xff not json", X_Tersely_Bypass="1")

    assert raw.requests[-1].body == b"\xff not json"
    assert answer.context == "bypass"


async def test_a_flag_that_is_neither_is_refused(behind_raw: Service):
    answer = await post(behind_raw, ODD_BODY, X_Tersely_Bypass="perhaps")

    assert answer.status == 400
    assert answer.json["error"]["param"] == "X-Tersely-Bypass"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", b""),
        ("GET", "/v1/models/org%2Fname%20x?limit=2&after=a%26b&x=%C3%A9", b""),
        ("GET", "/v1/chat/completions?limit=3&metadata[a]=b", b""),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", b""),
        ("DELETE", "/v1/chat/completions/chatcmpl-1", b""),
        ("DELETE", "/v1/files/file-1?force=true", b""),
        ("POST", "/v1/embeddings", b'{"input": ["a"],  "model":"m"}'),
        ("POST", "/v1/files", b"--b\r\nContent-Disposition: form-data; name=x\r\n\r\n\x00\xff\r\n--b--\r\n"),
        ("POST", "/v1/responses/compact", b'{"input":"hi"}'),
        ("GET", "/v1/responses/resp_1?include[]=x", b""),
        ("DELETE", "/v1/responses/resp_1", b""),
        ("PATCH", "/v1/odd", b"{}"),
        ("OPTIONS", "/v1/chat/completions", b""),
        ("POST", "/v1/audio/speech", b"\x00" * 300_000),
    ],
)
async def test_other_paths_pass_untouched(
    behind_raw: Service, raw: RawUpstream, key: str, method: str, path: str, body: bytes
):
    answer_body = b'{"object":"whatever", "note": 1.0}'
    raw.answer(reply_of(answer_body, status="201 Created", x_request_id=key, openai_version="2020-10-01"))

    async with wire(behind_raw) as line:
        head = f"{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-type: x/y\r\nauthorization: Bearer sk-1\r\n"
        await line.send(head.encode() + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        got = await line.to_end()

    sent = raw.requests[-1]
    assert (sent.method, sent.target, sent.body) == (method, path, body)
    assert sent.headers["authorization"] == "Bearer sk-1"
    assert sent.headers["content-type"] == "x/y"
    received, _, received_body = got.partition(b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 201")
    assert received_body == answer_body
    assert f"x-request-id: {key}".encode() in received
    assert b"openai-version: 2020-10-01" in received
    assert b"x-tersely-context: passthrough" in received


async def test_head_and_bodiless_answers(behind_raw: Service, raw: RawUpstream):
    raw.answer(http_head(status="204 No Content"))
    assert (await post(behind_raw, b"", method="DELETE", path="/v1/x")).status == 204
    raw.answer(b"HTTP/1.1 200 OK\r\ncontent-length: 5000\r\nconnection: close\r\n\r\n")
    answer = await post(behind_raw, b"", method="HEAD", path="/v1/files/f/content")
    assert (answer.headers["content-length"], answer.body) == ("5000", b"")
    raw.answer(http_head(status="302 Found", location="https://elsewhere.example/", content_length="0"))
    async with wire(behind_raw) as line:
        await line.send(b"GET /v1/x HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        assert b"location: https://elsewhere.example/\r\n" in await line.to_end()


@pytest.mark.parametrize("path", ["/v1/../admin", "/v1/models/../../admin", "/v1/%2e%2e/admin", "/v1/a/%2E./b"])
async def test_a_path_cannot_climb_out_of_the_base_url(behind_raw: Service, raw: RawUpstream, path: str):
    before = len(raw.requests)

    async with wire(behind_raw) as line:
        await line.send(f"GET {path} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n".encode())
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 40")
    assert len(raw.requests) == before


async def test_own_and_hop_by_hop_headers_are_not_forwarded(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(reply_of(ODD_REPLY, set_cookie="a=b", x_tersely_session="spoofed"))

    answer = await post(
        behind_raw,
        ODD_BODY,
        X_Tersely_Session=key,
        X_Tersely_Strategy="slim",
        X_Tersely_Epoch="auto",
        X_Tersely_Unknown="1",
        X_Forwarded_For="10.0.0.1",
        Cookie="secret=1",
        Authorization="Bearer sk-1",
        OpenAI_Organization="org",
        User_Agent="mine/1.0",
        X_Custom="caf\u00e9",
    )

    sent = raw.requests[-1].headers
    assert not [name for name in sent if name.startswith("x-tersely")]
    assert "x-forwarded-for" not in sent
    assert "cookie" not in sent
    assert sent["authorization"] == "Bearer sk-1"
    assert sent["openai-organization"] == "org"
    assert sent["user-agent"] == "mine/1.0"
    assert b"X-Custom: caf\xc3\xa9".lower() in [line.lower() for line in raw.requests[-1].lines]
    assert answer.session == key
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
async def test_a_tersely_key_never_goes_upstream(behind_raw: Service, raw: RawUpstream, path: str):
    raw.answer(reply_of(ODD_REPLY))

    for headers in (
        {"authorization": f"Bearer {TSK}"},
        {"authorization": f"bearer   {TSK}"},
        {"authorization": TSK},
        {"x-api-key": TSK},
        {"x-goog-api-key": TSK, "authorization": f"Bearer {TSK}"},
        {"api-key": TSK},
        {"x-tersely-key": TSK, "x-custom": f"key={TSK}"},
    ):
        await post(behind_raw, ODD_BODY, path=path, **headers)
        assert TSK.encode() not in b"\n".join(raw.requests[-1].lines), headers


async def test_a_tersely_key_in_a_repeated_header_never_goes_upstream(behind_raw: Service, raw: RawUpstream):
    raw.answer(reply_of(ODD_REPLY))

    for first, second in ((TSK, "sk-1"), ("sk-1", TSK)):
        async with wire(behind_raw) as line:
            repeated = f"Bearer {first}\r\nauthorization: Bearer {second}"
            await line.send(request_bytes(ODD_BODY, authorization=repeated, connection="close"))
            await line.to_end()
        assert TSK.encode() not in b"\n".join(raw.requests[-1].lines)


async def test_the_operators_key_takes_the_callers_place(store, raw: RawUpstream):
    raw.answer(reply_of(ODD_REPLY))
    with serve(store, raw.url, openai_api_key="sk-operator") as running:
        for headers in ({"Authorization": f"Bearer {TSK}"}, {"Authorization": "Bearer sk-caller"}, {}):
            await post(running, ODD_BODY, **headers)
            sent = [line for line in raw.requests[-1].lines if line.lower().startswith(b"authorization")]
            assert [line.partition(b": ")[2] for line in sent] == [b"Bearer sk-operator"]


@pytest.mark.parametrize(
    "encoding", ["gzip", "GZIP", "  gzip  ", "x-gzip", "identity, gzip", "gzip,", "deflate", "Deflate", "deflate (raw)"]
)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_compressed_reply_is_read_all_the_same(
    behind_raw: Service, raw: RawUpstream, key: str, encoding: str, streams: bool
):
    content = "packed and unpacked again, whole<terse>packed</terse>"
    if streams:
        reply = sse(role=True) + sse(content) + sse(finish="stop") + DONE
    else:
        choice = {"index": 0, "message": {"content": content}, "finish_reason": "stop"}
        reply = json.dumps({"choices": [choice]}).encode()
    packed = gzip.compress(reply) if "gzip" in encoding.lower() else zlib.compress(reply)
    if encoding == "deflate (raw)":
        encoding, packed = "deflate", packed[2:-4]  # without the header and the checksum of zlib's format
    content_type = "text/event-stream" if streams else "application/json"
    raw.answer(http_head(content_type, content_encoding=encoding), packed[:30], 0.02, packed[30:])

    answer = await post(behind_raw, body_of("pack", stream=streams), X_Tersely_Session=key)

    assert "content-encoding" not in answer.headers
    assert b"packed and unpacked again, whole" in answer.body
    assert b"terse" not in answer.body
    assert (await messages_by_number(behind_raw, key))[1].text == "packed and unpacked again, whole"


async def test_a_compressed_reply_elsewhere_stays_compressed(behind_raw: Service, raw: RawUpstream):
    packed = gzip.compress(b'{"object":"list"}')
    raw.answer(reply_of(packed, content_encoding="gzip"))

    answer = await post(behind_raw, b"{}", path="/v1/embeddings")

    assert (answer.body, answer.headers["content-encoding"]) == (packed, "gzip")


async def test_compressed_request_is_forwarded_unchanged(behind_raw: Service, raw: RawUpstream):
    raw.answer(reply_of(ODD_REPLY))
    packed = gzip.compress(ODD_BODY)

    answer = await post(behind_raw, packed, Content_Encoding="gzip")

    assert raw.requests[-1].body == packed
    assert raw.requests[-1].headers["content-encoding"] == "gzip"
    assert (answer.status, answer.context) == (200, "passthrough")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"<html>gateway</html>",
        b"null",
        b"[]",
        b'{"choices":null}',
        b'{"choices":[{}]}',
        b'{"choices":[{"message":7}]}',
    ],
)
async def test_replies_that_are_no_completions_pass(behind_raw: Service, raw: RawUpstream, key: str, reply: bytes):
    raw.answer(reply_of(reply))

    answer = await post(behind_raw, body_of("odd"), X_Tersely_Session=key)

    assert (answer.status, answer.body) == (200, reply)
    question, *replies = await messages_by_number(behind_raw, key)
    assert question.role == "user"
    assert [(each.role, each.status, each.finish) for each in replies] == [
        ("assistant", "superseded", "unread")
    ] * bool(reply)


@pytest.mark.parametrize(
    "usage",
    [
        b'{"prompt_tokens":99999999999,"completion_tokens":-5}',
        b'{"prompt_tokens":1e300}',
        b'{"prompt_tokens":"many"}',
        b"7",
        b'{"prompt_tokens":9223372036854775807,"prompt_tokens_details":{"cached_tokens":12345678901234567890123}}',
    ],
)
async def test_senseless_usage_costs_no_reply(behind_raw: Service, raw: RawUpstream, key: str, usage: bytes):
    choice = (
        b'{"index":0,"message":{"role":"assistant","content":"a reply worth keeping"},"finish_reason":"st\\u0000p"}'
    )
    reply = b'{"choices":[%s],"usage":%s}' % (choice, usage)
    raw.answer(reply_of(reply))

    answer = await post(behind_raw, body_of("odd"), X_Tersely_Session=key)

    assert (answer.status, answer.body) == (200, reply)
    assert [each.text for each in await messages_by_number(behind_raw, key)] == ["odd", "a reply worth keeping"]


async def test_a_huge_reply_passes_whole(behind_raw: Service, raw: RawUpstream, key: str):
    content = "x" * 8_000_000
    reply = json.dumps({"choices": [{"index": 0, "message": {"content": content}, "finish_reason": "stop"}]}).encode()
    raw.answer(reply_of(reply))

    answer = await post(behind_raw, body_of("much"), X_Tersely_Session=key)

    assert answer.body == reply
    assert len((await messages_by_number(behind_raw, key))[1].text) == 8_000_000


async def test_a_chunked_reply_that_breaks_off_breaks_off_for_the_client(behind_raw: Service, raw: RawUpstream):
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    raw.answer(head + chunk(b'{"half":'))

    async with wire(behind_raw) as line:
        await line.send(b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n")
        got = await line.to_end()

    assert got.startswith(b"HTTP/1.1 200")
    assert not got.endswith(b"0\r\n\r\n"), "the client must not take half an answer for a whole one"


async def test_a_completion_that_breaks_off_is_an_error(behind_raw: Service, raw: RawUpstream, key: str):
    raw.answer(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n" + b'{"half":')

    answer = await post(behind_raw, body_of("half"), X_Tersely_Session=key)

    assert answer.status == 502
    assert answer.json["error"]["code"] == "upstream_unavailable"
    assert [each.role for each in await messages_by_number(behind_raw, key)] == ["user"]
    assert len(await query(behind_raw, "SELECT FROM calls WHERE session_id = $1", key)) == 1
