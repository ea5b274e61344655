"""Export and import: the document's shapes, and nothing lost on the way."""

from __future__ import annotations

import json
import re

import asyncpg
import pytest

from tersely.dialects.wire import raw_json
from tests.api.conftest import Api
from tests.api.test_messages import ODD, append_raw, raws_of
from tests.conftest import Database

TAGGED = rb'{"role":"assistant","content":"Done. <terse>made it</terse>","x":1.0,"turnId":"mine"}'


async def export(api: Api, session: str) -> bytes:
    answer = await api.http.get(f"/api/sessions/{session}/export")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.content


async def take_in(api: Api, body: bytes, **more: object):
    document = raw_json.split_object(body) | {key: json.dumps(value).encode() for key, value in more.items()}
    return await api.post_raw("/api/sessions/import", raw_json.join_object(document))


async def test_the_shapes_of_the_document(api: Api) -> None:
    await api.append("e", {"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
    await append_raw(api, "e", [b'{"role":"assistant","content":"Done. <terse>made it</terse>"}'])
    document = json.loads(await export(api, "e"))
    assert set(document) == {"context", "terse", "tersely"}
    assert [m["turnId"] for m in document["context"]] == [None, "t1", "t1"]
    assert document["context"][2]["content"] == "Done. <terse>made it</terse>"
    (entry,) = document["terse"]
    assert entry.pop("ts") == document["context"][2]["ts"]
    assert entry == {"turnId": "t1", "role": "assistant", "summary": "made it", "source": "model"}


async def test_out_and_in_again_is_the_same(api: Api) -> None:
    await append_raw(api, "one", [b'{"role":"system","content":"be kind"}', *ODD, TAGGED])
    await api.http.post("/api/sessions/one/turns/t2/drop")
    await append_raw(api, "one", [b'{"role":"user","content":"last"}', b'{"role":"assistant","content":"ok, fine."}'])
    first = await export(api, "one")
    made = await take_in(api, first, id="two", metadata={"a": 1})
    assert made.status_code == 201, made.text
    assert made.json()["metadata"] == {"a": 1}
    assert (await export(api, "two")).replace(b'"metadata":{"a":1}', b'"metadata":{}') == first
    for view in ("client", "model"):
        pages = [await api.http.get(f"/api/sessions/{s}/messages", params={"view": view}) for s in ("one", "two")]
        assert raws_of(pages[0].content) == raws_of(pages[1].content)
        numbers = [[(m["turn"], m["created_at"], m["tokens"]) for m in page.json()["items"]] for page in pages]
        assert numbers[0] == numbers[1]
    assert TAGGED in raws_of((await api.http.get("/api/sessions/two/messages", params={"view": "model"})).content)
    assert made.json()["turns"] == 6
    assert (await api.append("two", {"role": "user", "content": "more"})).json()["turn"] == "t7"


async def test_tags_that_were_text_stay_text(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "f", "strategy": "full"})
    reply = b'{"role":"assistant","content":"literally <terse>x</terse>"}'
    await append_raw(api, "f", [b'{"role":"user","content":"say it"}', reply])
    first = await export(api, "f")
    assert (await take_in(api, first, id="g")).status_code == 201
    assert raws_of((await api.http.get("/api/sessions/g/messages")).content)[1] == reply
    assert await export(api, "g") == first


async def test_a_document_that_was_rewritten_on_its_way(api: Api) -> None:
    await append_raw(api, "one", [b'{"role":"user","content":"hi","n":1.0}', TAGGED[:-17] + b"}"])
    document = json.loads(await export(api, "one"))
    rewritten = json.dumps(document, indent=2, sort_keys=True).encode()
    assert (await take_in(api, rewritten, id="two")).status_code == 201
    again = json.loads(await export(api, "two"))
    assert again == document


async def test_an_untagged_history_gets_its_turns(api: Api) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "2"},
    ]
    made = await api.http.post("/api/sessions/import", json={"context": messages, "terse": []})
    listed = (await api.http.get(f"/api/sessions/{made.json()['id']}/messages")).json()["items"]
    assert [m["turn"] for m in listed] == [None, "t1", "t1", "t2"]
    found = await api.http.post(f"/api/sessions/{made.json()['id']}/search", json={"mode": "turn", "turnId": "t1"})
    assert found.json()["excerpts"][0]["last"] == 2


async def test_more_than_one_batch(api: Api) -> None:
    for start in range(0, 1200, 400):
        await api.append(
            "many",
            *({"role": "user" if n % 2 else "assistant", "content": f"m{n} text."} for n in range(start, start + 400)),
        )
    first = await export(api, "many")
    assert len(json.loads(first)["context"]) == 1200
    # Each turn but the running one has a line; the first turn has the first three messages.
    assert [entry["turnId"] for entry in json.loads(first)["terse"]] == [f"t{n}" for n in range(1, 600)]
    assert (await take_in(api, first, id="copy")).status_code == 201
    assert await export(api, "copy") == first


async def test_turns_without_a_tag_are_paged_among_the_others(api: Api) -> None:
    """A line that is made when it is read stands where a stored one would, once, whatever the size of the pages."""
    for n in range(1, 31):
        tag = f"<terse>tagged {n}</terse>" * (n % 3 == 0) + f"<terse>twice {n}</terse>" * (n % 6 == 0)
        replies = [{"role": "assistant", "content": f"Reply {n}. {tag}"}] * (n not in {8, 30})
        if n == 21:  # the last reply has no tag
            replies += [{"role": "assistant", "content": "And more."}]
        await api.append("p", {"role": "user", "content": f"question {n}"}, *replies)
    for turn in ("t9", "t10", "t11"):
        assert (await api.http.post(f"/api/sessions/p/turns/{turn}/drop")).status_code == 200
    wanted = []
    for n in range(1, 30):
        if n in {8, 9, 10, 11}:
            continue
        lines = [f"tagged {n}"] * (n % 3 == 0) + [f"twice {n}"] * (n % 6 == 0)
        lines += ["And more."] * (n == 21)
        wanted += [(f"t{n}", line) for line in lines or [f"Reply {n}."]]
    for limit in (1, 2, 3, 5, 7, 29, 100):
        found: list[tuple[str, str]] = []
        query: dict[str, str | int] = {"limit": limit}
        while True:
            page = (await api.http.get("/api/sessions/p/terse", params=query)).json()
            assert 0 < len(page["items"]) <= limit or page["next"] is None
            found += [(item["turnId"], item["summary"]) for item in page["items"]]
            if page["next"] is None:
                break
            query["after"] = page["next"]
        assert found == wanted, limit


async def test_the_log_passes_over_numbers_without_turns(api: Api) -> None:
    context = [
        {"turnId": f"t{turn}", "role": role, "content": f"{role} {turn}."}
        for turn in (1, 2_000_000_000)
        for role in ("user", "assistant")
    ]
    made = await api.http.post("/api/sessions/import", json={"id": "gap", "context": context, "terse": []})
    assert made.status_code == 201
    first = (await api.http.get("/api/sessions/gap/terse", params={"limit": 1})).json()
    rest = (await api.http.get("/api/sessions/gap/terse", params={"limit": 1, "after": first["next"]})).json()
    told = [(item["turnId"], item["summary"]) for item in first["items"] + rest["items"]]
    assert told == [("t1", "assistant 1."), ("t2000000000", "assistant 2000000000.")]
    assert [entry["turnId"] for entry in json.loads(await export(api, "gap"))["terse"]] == ["t1", "t2000000000"]


async def test_a_line_that_is_stored_between_two_pages_comes_once(api: Api) -> None:
    for n in range(1, 8):
        await api.append(
            "cut", {"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"Reply {n}. " + "x " * 900}
        )
    first = (await api.http.get("/api/sessions/cut/terse", params={"limit": 2})).json()
    assert (await api.http.post("/api/sessions/cut/compact", json={})).status_code == 200
    rest = (await api.http.get("/api/sessions/cut/terse", params={"after": first["next"]})).json()
    assert [item["turnId"] for item in first["items"] + rest["items"]] == [f"t{n}" for n in range(1, 8)]


async def test_lines_that_an_epoch_packed_are_part_of_a_copy(api: Api, database: Database) -> None:
    for n in range(1, 8):
        await api.append(
            "cut", {"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"Reply {n}. " + "x " * 900}
        )
    assert (await api.http.post("/api/sessions/cut/compact", json={})).status_code == 200
    first = await export(api, "cut")
    rows = json.loads(first)["tersely"]["terse"]
    assert [row["source"] for row in rows] == ["derived"] * len(rows)
    assert rows
    assert not [name for row in json.loads(first)["tersely"]["epochs"] for name in row if name.startswith("log")]
    assert (await take_in(api, first, id="copy")).status_code == 201
    assert await export(api, "copy") == first
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        stored = await admin.fetch("SELECT session_id, count(*) AS lines FROM terse GROUP BY session_id")
        packed = await admin.fetch("SELECT session_id, log_lines FROM epochs WHERE log IS NOT NULL")
    finally:
        await admin.close()
    assert {row["session_id"]: row["lines"] for row in stored} == {"copy": len(rows)}
    assert {row["session_id"]: row["log_lines"] for row in packed} == {"cut": len(rows)}
    both = [(await api.http.get(f"/api/sessions/{name}/stats")).json()["terse"] for name in ("cut", "copy")]
    assert both[0] == both[1]
    # Turns, and a removed one, are the same in both.
    for name in ("cut", "copy"):
        assert (await api.http.delete(f"/api/sessions/{name}/turns/t2")).status_code == 204
    for path in ("turns", "terse"):
        cut, copy = [(await api.http.get(f"/api/sessions/{name}/{path}")).json() for name in ("cut", "copy")]
        assert cut == copy
        assert "Reply 1." in json.dumps(cut)
        assert "Reply 2." not in json.dumps(cut)


async def test_a_line_does_not_depend_on_the_replies_beside_it(api: Api) -> None:
    """Replies of several dialects stand on one page; a call without its result ends no turn in any of them."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    await api.append(
        "mixed",
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
    )
    messages = [
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": [{"type": "text", "text": "Ok."}]},
    ]
    added = await api.http.post("/api/sessions/mixed/messages", json={"dialect": "anthropic", "messages": messages})
    assert added.status_code == 201, added.text
    items = (await api.http.get("/api/sessions/mixed/terse")).json()["items"]
    assert [(item["turnId"], item["summary"]) for item in items] == [("t2", "Ok.")]
    turns = (await api.http.get("/api/sessions/mixed/turns")).json()["items"]
    assert [turn["terse"] for turn in turns] == [[], ["Ok."]]


async def test_the_log_is_paged(api: Api) -> None:
    for n in range(5):
        await api.append(
            "l",
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": f"<terse>a{n}</terse><terse>b{n}</terse>x"},
        )
    seen: list[str] = []
    after: str | None = None
    while True:
        query = {"limit": "3", **({"after": after} if after else {})}
        page = (await api.http.get("/api/sessions/l/terse", params=query)).json()
        seen += [e["summary"] for e in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == [f"{kind}{n}" for n in range(5) for kind in "ab"]
    assert (await api.http.get("/api/sessions/l/terse", params={"after": "x"})).status_code == 422


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "context"),
        ({"context": {}}, "context"),
        ({"context": [1]}, "context[0]"),
        ({"context": [{"role": "wizard", "turnId": "t1"}]}, "context[0]"),
        ({"context": [{"role": "user", "content": "x", "turnId": "7"}]}, "context[0].turnId"),
        ({"context": [{"role": "user", "content": "x", "turnId": "t99999999999"}]}, "context[0].turnId"),
        ({"context": [{"role": "user", "content": "x", "ts": "yesterday"}]}, "context[0].ts"),
        ({"context": [{"turnId": "t1", "ts": "soon", "role": "user", "content": "x"}]}, "context[0].ts"),
        ({"context": [], "terse": [{"turnId": "t1", "summary": "x"}]}, "terse[0].turnId"),
        ({"context": [], "terse": [{"summary": "x"}]}, "terse[0].turnId"),
        ({"context": [], "terse": [{"turnId": "t1"}]}, "terse[0].summary"),
        ({"context": [], "id": ".."}, "id"),
        ({"context": [], "parent": "nobody"}, "parent"),
        ({"context": [], "sessions": 1}, "sessions"),
    ],
)
async def test_bad_documents_are_refused_whole(api: Api, body: dict[str, object], field: str) -> None:
    refused = await api.http.post("/api/sessions/import", json=body)
    assert refused.status_code == 422, refused.text
    assert refused.json()["field"] == field
    assert (await api.http.get("/api/sessions")).json()["items"] == []


async def test_an_import_takes_no_other_session_s_place(api: Api) -> None:
    await api.append("taken", {"role": "user", "content": "mine"})
    refused = await api.http.post("/api/sessions/import", json={"id": "taken", "context": []})
    assert refused.status_code == 409
    assert (await api.http.get("/api/sessions/taken")).json()["messages"] == 1


def in_dialects() -> dict[str, list[dict[str, object]]]:
    """One conversation with a tool call, as each dialect writes it."""
    question = "Is it windy in Kiel?"
    function = {"name": "wind", "arguments": '{"city": "Kiel"}'}
    use = {"type": "tool_use", "id": "c1", "name": "wind", "input": {"city": "Kiel"}}
    return {
        "openai_chat": [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "8 Beaufort"},
        ],
        "openai_responses": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": question}]},
            {"type": "function_call", "call_id": "c1", **function},
            {"type": "function_call_output", "call_id": "c1", "output": "8 Beaufort"},
        ],
        "anthropic": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "8 Beaufort"}]},
        ],
        "gemini": [
            {"role": "user", "parts": [{"text": question}]},
            {"role": "model", "parts": [{"functionCall": {"name": "wind", "args": {"city": "Kiel"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "wind", "response": {"output": "8 Beaufort"}}}]},
        ],
    }


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "gemini"])
async def test_import_detects_the_dialect_from_the_messages(api: Api, dialect: str) -> None:
    messages = in_dialects()[dialect]
    made = await api.http.post("/api/sessions/import", json={"id": "i", "context": messages})
    assert made.status_code == 201, made.text
    done = await api.http.post("/api/sessions/a/messages", json={"messages": messages})
    assert done.status_code == 201, done.text
    for session in ("i", "a"):
        items = (await api.http.get(f"/api/sessions/{session}/messages")).json()["items"]
        assert {item["dialect"] for item in items} == {dialect}
        assert {item["turn"] for item in items} == {"t1"}
        found = await api.http.post(f"/api/sessions/{session}/search", json={"mode": "search", "query": "beaufort"})
        assert found.json()["total"] == 3
        assert "8 Beaufort" in found.json()["text"]


async def test_shapes_of_several_dialects_are_refused_with_their_places(api: Api) -> None:
    mixed = [*in_dialects()["openai_chat"], *in_dialects()["anthropic"]]
    for path, field, more in (
        ("/api/sessions/import", "context", {"id": "m"}),
        ("/api/sessions/m/messages", "messages", {}),
    ):
        refused = await api.http.post(path, json={field: mixed, **more})
        assert (refused.status_code, refused.json()["field"]) == (422, "dialect")
        assert f"openai_chat ({field}[1]), anthropic ({field}[4])" in refused.json()["detail"]
    assert (await api.http.get("/api/sessions/m")).status_code == 404


async def test_import_accepts_plain_text_and_a_named_dialect(api: Api) -> None:
    words = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [{"type": "text", "text": "hello"}]}]
    for session, more in (("p", {}), ("q", {"dialect": "anthropic"})):
        assert (await api.http.post("/api/sessions/import", json={"id": session, "context": words, **more})).is_success
        items = (await api.http.get(f"/api/sessions/{session}/messages")).json()["items"]
        assert {item["dialect"] for item in items} == {more.get("dialect", "openai_chat")}


async def test_a_log_counts_the_turns_that_a_plan_of_the_whole_did_not_read(api: Api) -> None:
    """Under `full` no epoch cuts, so no turn has an entry; `slim` then reads the newest 5,000 messages."""
    turns = 3_500
    await api.http.post("/api/sessions", json={"id": "long", "strategy": "full"})
    for start in range(0, turns, 250):
        numbers = range(start + 1, start + 251)
        pairs = (
            [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"Reply {n}."}] for n in numbers
        )
        await api.append("long", *(message for pair in pairs for message in pair))
    assert (await api.http.patch("/api/sessions/long", json={"strategy": "slim"})).status_code == 200
    context = (await api.http.post("/api/sessions/long/context", json={"dialect": "openai_chat"})).json()
    log = context["messages"][0]["content"].splitlines()
    told = re.fullmatch(r"\[t1-t(\d+) \S+\] assistant: (\d+) turns: Reply \d+.*", log[1])
    assert told is not None, log[1]
    assert told[1] == told[2]
    numbered = [re.match(r"\[t(\d+)(?:-t(\d+))?", line) for line in log[2:]]
    last = int(told[1])
    for found in numbered:  # each turn up to the cut is in one line
        assert found is not None
        assert int(found[1]) == last + 1
        last = int(found[2] or found[1])
    assert last > 3_000
