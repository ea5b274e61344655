"""Messages over REST: byte for byte, numbered without gaps, once per key."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime

import asyncpg
import pytest

from tersely.dialects.wire import raw_json
from tests.api.conftest import Api

ODD = [
    rb'{"role":"user","content":"nul \u0000 and lone \ud83d surrogate"}',
    rb'{"content" : "keys the other way round", "role":"user"}',
    rb'{"role":"user","content":"a","n":[1.0,1,1e2,-0.0,123456789012345678901234567890,0.1000]}',
    '{"role":"user","content":"\u00fc \u65e5\u672c \U0001f600 \\u00fc","x":{"b":1,"a":2}}'.encode(),
    b'{"role":"user","content":[{"type":"text","text":"parts"},{"type":"text","text":"two"}],"name":"n"}',
    rb'{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function",'
    rb'"function":{"name":"f","arguments":"{\"a\" :1}"}}]}',
    rb'{"role":"tool","tool_call_id":"c1","content":"\u003cterse\u003e stays in a result"}',
    b'{"role":"assistant","content":"dup","content":"licate keys"}',
]


def raws_of(body: bytes) -> list[bytes]:
    items = raw_json.split_array(raw_json.split_object(body)["items"])
    return [raw_json.split_object(item)["raw"] for item in items]


async def append_raw(api: Api, session: str, raws: list[bytes], **headers: str):
    body = b'{ "messages" : [ ' + b" ,\n".join(raws) + b" ] }"
    return await api.post_raw(f"/api/sessions/{session}/messages", body, **headers)


@pytest.mark.parametrize("view", ["client", "model", "all"])
async def test_messages_come_back_byte_for_byte(api: Api, view: str) -> None:
    done = await append_raw(api, "v", ODD)
    assert done.status_code == 201, done.text
    assert done.json() == {"first_seq": 1, "last_seq": len(ODD), "turn": "t5"}
    listed = await api.http.get("/api/sessions/v/messages", params={"view": view})
    assert raws_of(listed.content) == ODD
    assert listed.headers["content-type"] == "application/json"


async def test_every_message_is_tagged_with_its_dialect(api: Api) -> None:
    for dialect in ("openai_chat", "anthropic"):
        body = {"dialect": dialect, "messages": [{"role": "user", "content": "hello"}]}
        assert (await api.http.post("/api/sessions/tagged/messages", json=body)).status_code == 201
    listed = (await api.http.get("/api/sessions/tagged/messages")).json()["items"]
    assert [item["dialect"] for item in listed] == ["openai_chat", "anthropic"]


async def test_they_lie_byte_for_byte_in_the_store(api: Api, database) -> None:
    await append_raw(api, "v", ODD)
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        assert [r["raw"] for r in await admin.fetch("SELECT raw FROM messages ORDER BY seq")] == ODD
    finally:
        await admin.close()


async def test_tags_in_replies_go_to_the_log_and_the_model_keeps_them(api: Api) -> None:
    reply = b'{"role":"assistant","content":"Done. <terse>made a palette</terse>","x":1.0}'
    await append_raw(api, "t", [b'{"role":"user","content":"a <terse>not mine</terse>"}', reply])
    client, model, whole = [
        (await api.http.get("/api/sessions/t/messages", params={"view": view})) for view in ("client", "model", "all")
    ]
    assert raws_of(client.content)[1] == b'{"role":"assistant","content":"Done. ","x":1.0}'
    assert raws_of(model.content)[1] == reply
    assert whole.json()["items"][1]["model_raw"]["content"] == "Done. <terse>made a palette</terse>"
    assert whole.json()["items"][0]["model_raw"] is None
    log = (await api.http.get("/api/sessions/t/terse")).json()["items"]
    (entry,) = log
    said_at = datetime.fromisoformat(whole.json()["items"][1]["created_at"])
    assert datetime.fromisoformat(entry.pop("ts")) == said_at
    assert entry == {"turnId": "t1", "role": "assistant", "summary": "made a palette", "source": "model"}


async def test_a_turn_without_a_tag_gets_a_derived_entry(api: Api) -> None:
    await api.append("d", {"role": "user", "content": "hi"}, {"role": "assistant", "content": "I fixed it. And more."})
    await api.append("d", {"role": "user", "content": "open"})
    log = (await api.http.get("/api/sessions/d/terse")).json()["items"]
    assert [(e["turnId"], e["summary"], e["source"]) for e in log] == [("t1", "I fixed it.", "derived")]


async def test_with_strategy_full_tags_are_text(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "f", "strategy": "full"})
    reply = b'{"role":"assistant","content":"Done. <terse>made a palette</terse>"}'
    await append_raw(api, "f", [b'{"role":"user","content":"a"}', reply])
    listed = await api.http.get("/api/sessions/f/messages")
    assert raws_of(listed.content)[1] == reply
    assert (await api.http.get("/api/sessions/f/terse")).json()["items"] == []


async def test_turns_are_numbered_and_results_start_none(api: Api) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    await api.append("n", {"role": "system", "content": "be kind"}, {"role": "user", "content": "1"})
    await api.append("n", {"role": "assistant", "content": None, "tool_calls": [call]})
    await api.append("n", {"role": "tool", "tool_call_id": "c", "content": "ok"})
    done = await api.append("n", {"role": "assistant", "content": "done"}, {"role": "user", "content": "2"})
    assert done.json() == {"first_seq": 5, "last_seq": 6, "turn": "t2"}
    items = (await api.http.get("/api/sessions/n/messages")).json()["items"]
    assert [item["turn"] for item in items] == [None, "t1", "t1", "t1", "t1", "t2"]
    assert all(item["tokens"] > 0 for item in items)


async def test_new_instructions_replace_the_old_ones(api: Api) -> None:
    alone = await api.append("i", {"role": "system", "content": "old"})
    assert alone.json() == {"first_seq": 1, "last_seq": 1, "turn": None}
    await api.append("i", {"role": "user", "content": "x"})
    await api.append("i", {"role": "developer", "content": "new"})
    contents = [m["raw"]["content"] for m in (await api.http.get("/api/sessions/i/messages")).json()["items"]]
    assert contents == ["x", "new"]
    built = (await api.http.post("/api/sessions/i/context", json={"strategy": "full"})).json()
    assert built["instructions"] == "new"
    whole = (await api.http.get("/api/sessions/i/messages", params={"view": "all"})).json()["items"]
    assert [m["status"] for m in whole] == ["superseded", "live", "live"]


async def test_numbers_have_no_gaps_under_concurrent_appends(api: Api) -> None:
    async def one(n: int):
        return await api.append(
            "c", {"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"answer {n}"}
        )

    answers = await asyncio.gather(*(one(n) for n in range(20)))
    assert {a.status_code for a in answers} == {201}
    spans = sorted((a.json()["first_seq"], a.json()["last_seq"]) for a in answers)
    assert spans == [(2 * n + 1, 2 * n + 2) for n in range(20)]
    items = (await api.http.get("/api/sessions/c/messages", params={"view": "all"})).json()["items"]
    assert [item["seq"] for item in items] == list(range(1, 41))
    assert [item["turn"] for item in items] == [f"t{n // 2 + 1}" for n in range(40)]
    for answer, question in zip(items[1::2], items[::2], strict=True):
        assert answer["raw"]["content"] == question["raw"]["content"].replace("q", "answer ")


async def test_a_key_stores_once(api: Api) -> None:
    message = {"role": "user", "content": "once"}
    answers = await asyncio.gather(*(api.append("k", message, **{"Idempotency-Key": "a"}) for _ in range(8)))
    assert {a.status_code for a in answers} == {201}
    assert {a.text for a in answers} == {answers[0].text}
    assert sum("idempotent-replayed" in a.headers for a in answers) == 7
    other = await api.append("k", {"role": "user", "content": "other"}, **{"Idempotency-Key": "a"})
    assert other.status_code == 409
    assert other.json()["field"] == "Idempotency-Key"
    assert (await api.append("k", message, **{"Idempotency-Key": "b"})).json()["first_seq"] == 2
    assert (await api.append("k2", message, **{"Idempotency-Key": "a"})).json()["first_seq"] == 1


async def test_pages_follow_one_another(api: Api) -> None:
    await api.append("p", *({"role": "user", "content": str(n)} for n in range(1, 26)))
    for view in ("client", "model", "all"):
        seen: list[str] = []
        after = 0
        for _ in range(10):
            page = (
                await api.http.get("/api/sessions/p/messages", params={"view": view, "after": after, "limit": 7})
            ).json()
            seen += [m["raw"]["content"] for m in page["items"]]
            if page["next"] is None:
                break
            after = page["next"]
        assert seen == [str(n) for n in range(1, 26)]
    beyond = (await api.http.get("/api/sessions/p/messages", params={"after": 2**52})).json()
    assert beyond == {"items": [], "next": None}


async def test_large_page_ends_early(api: Api) -> None:
    for _ in range(4):
        await api.append("large", {"role": "user", "content": "x" * 3_000_000})
    sizes: list[int] = []
    after: int | None = 0
    while after is not None:
        page = (await api.http.get("/api/sessions/large/messages", params={"after": after})).json()
        sizes.append(len(page["items"]))
        after = page["next"]
    assert sizes == [2, 2]


DEEP = b'{"messages":[{"role":"user","content":"a","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}]}"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b'{"messages":[{"role":"user","content":"a"}]', None),
        (b"[]", None),
        (b"7", None),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', None),
        (DEEP, None),
        (b"{}", "messages"),
        (b'{"messages":[]}', "messages"),
        (b'{"messages":null}', "messages"),
        (b'{"messages":["a"]}', "messages[0]"),
        (b'{"messages":[{"role":"user","content":"a"},{"role":"wizard","content":"a"}]}', "messages[1]"),
        (b'{"messages":[{"content":"a"}]}', "messages[0]"),
        (b'{"messages":[{"role":"user","content":7}]}', "messages[0]"),
        (b'{"messages":[{"role":"user","content":"a"}],"dialect":"smoke"}', "dialect"),
        (b'{"messages":[{"role":"user","content":"a"}],"message":1}', "message"),
    ],
)
async def test_an_unreadable_message_is_refused_and_nothing_is_stored(api: Api, body: bytes, field: str | None) -> None:
    refused = await api.post_raw("/api/sessions/bad/messages", body)
    assert refused.status_code == 422, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.json().get("field") == field
    assert (await api.http.get("/api/sessions/bad")).status_code == 404


@pytest.mark.parametrize("key", ["", "x" * 257, "a\tb"])
async def test_unusable_keys_are_refused(api: Api, key: str) -> None:
    refused = await api.append("k", {"role": "user", "content": "a"}, **{"Idempotency-Key": key})
    assert refused.status_code == 422
    assert refused.json()["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "-1"),
        ("limit", "1001"),
        ("limit", "x"),
        ("after", "-1"),
        ("after", str(10**30)),
        ("view", "god"),
    ],
)
async def test_bad_queries_are_named(api: Api, name: str, value: str) -> None:
    await api.append("q", {"role": "user", "content": "a"})
    refused = await api.http.get("/api/sessions/q/messages", params={name: value})
    assert refused.status_code == 422
    assert refused.json()["field"] == name


async def test_the_body_has_a_limit_and_a_kind(database) -> None:
    from tests.api.conftest import serve

    async with serve(database.dsn, max_body=2048) as api:
        large = await api.append("l", {"role": "user", "content": "x" * 4096})
        assert large.status_code == 413

        async def chunks():
            for _ in range(10):
                yield b" " * 1024

        unannounced = await api.http.post(
            "/api/sessions/l/messages", content=chunks(), headers={"content-type": "application/json"}
        )
        assert unannounced.status_code == 413
        form = await api.http.post(
            "/api/sessions/l/messages",
            content=json.dumps({"messages": [{"role": "user", "content": "a"}]}),
            headers={"content-type": "text/plain"},
        )
        assert form.status_code == 415
        assert (await api.http.get("/api/sessions/l")).status_code == 404
