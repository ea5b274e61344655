"""Search over REST: the four modes, the document's format, bounds, long sessions."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import asyncpg
import pytest

from tersely.store.search import pages as pages
from tests.api.conftest import Api

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "dom", "arguments": '{"action":"create","Selector":"#Palette"}'},
}


async def find(api: Api, session: str = "s", **options: object) -> Any:
    answer = await api.http.post(f"/api/sessions/{session}/search", json=options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def small(api: Api) -> None:
    await api.append(
        "s",
        {"role": "system", "content": "palette is a word of the instructions"},
        {"role": "user", "content": "Can you make a colour palette?"},
        {"role": "assistant", "content": "I'll create one. <terse>made a palette</terse>", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Straße drawn"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Can you make the greens warmer?"},
        {"role": "assistant", "content": "Updated the PALETTE."},
    )


async def test_the_document_s_format_to_the_letter(api: Api) -> None:
    await small(api)
    found = await find(api, mode="search", query="colour palette", before=0, after=3)
    assert found["text"] == (
        "--- messages 1-4 of 6 ---\n"
        "[user t1] Can you make a colour palette?\n"
        "[assistant t1] I'll create one.  [tool: dom({action: 'create', ...})]\n"
        "[tool t1] Straße drawn\n"
        "[assistant t1] Done."
    )
    (excerpt,) = found["excerpts"]
    assert (excerpt["first"], excerpt["last"], found["total"], found["truncated"]) == (1, 4, 6, False)
    assert [(m["number"], m["seq"], m["turn"], m["role"]) for m in excerpt["messages"]] == [
        (1, 2, "t1", "user"),
        (2, 3, "t1", "assistant"),
        (3, 4, "t1", "tool"),
        (4, 5, "t1", "assistant"),
    ]
    assert excerpt["messages"][2]["text"] == "[tool t1] Straße drawn"


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("PALETTE", [1, 2, 6]),
        ("strasse", [3]),
        ("STRASSE DRAWN", [3]),
        ("dom", [2]),
        ("#palette", [2]),
        ("create", [2]),
        ("made a palette", []),
        ("of the instructions", []),
        ("100%_", []),
        ("'; drop table messages", []),
        ("?", [1, 5]),
    ],
)
async def test_search_finds_text_names_inputs_and_results(api: Api, query: str, numbers: list[int]) -> None:
    await small(api)
    found = await find(api, mode="search", query=query, before=0, after=0)
    assert [m["number"] for e in found["excerpts"] for m in e["messages"]] == numbers
    if not numbers:
        assert found["text"] == "No messages found."


async def test_windows_that_touch_are_one(api: Api) -> None:
    await api.append(
        "w", *({"role": "user", "content": f"n{n} {'x' if n in (3, 7, 20) else ''}"} for n in range(1, 31))
    )
    found = await find(api, "w", mode="search", query="x")
    assert [(e["first"], e["last"]) for e in found["excerpts"]] == [(1, 9), (18, 22)]
    apart = await find(api, "w", mode="search", query="x", before=1, after=1)
    assert [(e["first"], e["last"]) for e in apart["excerpts"]] == [(2, 4), (6, 8), (19, 21)]


async def test_head_tail_and_turn(api: Api) -> None:
    await small(api)
    assert (await find(api, mode="head", first=1))["text"] == (
        "--- messages 1-1 of 6 ---\n[user t1] Can you make a colour palette?"
    )
    assert (await find(api, mode="tail", last=2))["excerpts"][0]["first"] == 5
    assert [(e["first"], e["last"]) for e in (await find(api, mode="tail"))["excerpts"]] == [(1, 6)]
    assert [(e["first"], e["last"]) for e in (await find(api, mode="turn", turnId="t2"))["excerpts"]] == [(5, 6)]
    around = await find(api, mode="turn", turnId="t2", before=1)
    assert [(e["first"], e["last"]) for e in around["excerpts"]] == [(1, 6)]
    assert (await find(api, mode="turn", turnId="t9"))["text"] == "No messages found."
    assert (await find(api, mode="tail", last=0))["excerpts"] == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "mode"),
        ({"mode": "all"}, "mode"),
        ({"mode": "search"}, "query"),
        ({"mode": "search", "query": "  "}, "query"),
        ({"mode": "search", "query": "x" * 1001}, "query"),
        ({"mode": "search", "query": "x", "before": -1}, "before"),
        ({"mode": "search", "query": "x", "after": 1001}, "after"),
        ({"mode": "search", "query": "x", "after": "2"}, "after"),
        ({"mode": "turn"}, "turnId"),
        ({"mode": "turn", "turnId": "5"}, "turnId"),
        ({"mode": "tail", "last": 10**9}, "last"),
        ({"mode": "head", "first": True}, "first"),
        ({"mode": "head", "limit": 3}, "limit"),
    ],
)
async def test_bad_arguments_are_named(api: Api, options: dict[str, object], field: str) -> None:
    await small(api)
    refused = await api.http.post("/api/sessions/s/search", json=options)
    assert refused.status_code == 422
    assert refused.json()["field"] == field


async def test_hidden_turns_are_not_found_and_do_not_count(api: Api) -> None:
    for n in range(1, 6):
        await api.append("h", {"role": "user", "content": f"word {n}"}, {"role": "assistant", "content": f"reply {n}"})
    await api.http.post("/api/sessions/h/turns/t2/drop")
    await api.http.delete("/api/sessions/h/turns/t3")
    await api.http.post("/api/sessions/h/undo")
    found = await find(api, "h", mode="search", query="word", before=0, after=0)
    assert [(m["number"], m["turn"]) for e in found["excerpts"] for m in e["messages"]] == [(1, "t1"), (3, "t4")]
    assert found["total"] == 4
    assert (await find(api, "h", mode="turn", turnId="t2"))["excerpts"] == []


async def test_odd_characters_are_searched_and_shown(api: Api) -> None:
    await api.post_raw(
        "/api/sessions/o/messages",
        rb'{"messages":[{"role":"user","content":"nul \u0000 here"},{"role":"user","content":"lone \ud83d half"},'
        rb'{"role":"user","content":"kelvin \u212a, \ufb01sh, \u0130stanbul"}]}',
    )
    for query, number in (("NUL", 1), ("half", 2), ("kelvin k", 3), ("FISH", 3)):
        found = await find(api, "o", mode="search", query=query, before=0, after=0)
        assert [m["number"] for e in found["excerpts"] for m in e["messages"]] == [number], query
    assert "\x00" not in (await find(api, "o", mode="head"))["text"]


async def test_search_answer_names_omitted_results(api: Api) -> None:
    await api.append("b", *({"role": "user", "content": f"same {n}"} for n in range(1, 1501)))
    found = await find(api, "b", mode="search", query="same", before=0, after=0)
    shown = [m["number"] for e in found["excerpts"] for m in e["messages"]]
    assert shown == list(range(1301, 1501))
    assert found["truncated"]
    assert found["text"].splitlines()[-1] == (
        "--- not everything is shown: the newest 200 matches; there are older ones ---"
    )
    wide = await find(api, "b", mode="search", query="same 7", before=1000, after=1000)
    assert sum(len(e["messages"]) for e in wide["excerpts"]) == 1000
    assert "an answer holds at most 1000 messages" in wide["text"]
    await api.append("c", *({"role": "user", "content": "y" * 100_000} for _ in range(30)))
    clipped = await find(api, "c", mode="tail", last=30)
    assert len(clipped["text"]) < 450_000
    assert "[... 80000 more characters]" in clipped["text"]
    assert "30 long messages are cut short" in clipped["text"]


async def test_pages_and_segments_agree_with_a_plain_search(api: Api, database) -> None:
    """Across the borders of pages and segments, with hidden and removed messages among them."""
    count = pages.PAGE * pages.SEGMENT + pages.PAGE * 2 + 5
    texts = [f"message {n} {'needle' if n % 700 == 3 else ''} w{n % 97}" for n in range(1, count + 1)]
    for start in range(0, count, 1000):
        await api.append("p", *({"role": "user", "content": text} for text in texts[start : start + 1000]))

    async def numbers(query: str) -> list[int]:
        found = await find(api, "p", mode="search", query=query, before=0, after=0)
        return [m["seq"] for e in found["excerpts"] for m in e["messages"]]

    def expected(query: str, gone: frozenset[int] = frozenset()) -> list[int]:
        return [n for n, text in enumerate(texts, 1) if query in text and n not in gone][-200:]

    queries = ("needle", "edl", "message 4096 ", "message 129 ", "w13", "4095", f"message {count}", "zzz", "  w5")
    for _ in range(2):
        for query in queries:
            assert await numbers(query) == expected(query), query
    await api.http.delete("/api/sessions/p/turns/t703")
    await api.http.post("/api/sessions/p/turns/t4096/drop")
    gone = frozenset({703, 4096})
    for query in queries:
        assert await numbers(query) == expected(query, gone), query
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        assert await admin.fetchval("SELECT count(*) FROM search_pages") == count // pages.PAGE
        assert await admin.fetchval("SELECT count(*) FROM search_words") == 1
        assert await admin.fetchval("SELECT count(*) FROM search_pages WHERE strpos(text, 'message 703 ') > 0") == 0
    finally:
        await admin.close()


FILL = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, call, created_at, raw)
SELECT 'default', 'long', n, (n + 1) / 2, 100, n, CASE n % 2 WHEN 1 THEN 'user' ELSE 'assistant' END, 'live',
    'openai_chat', true, true, false, 0, now(), convert_to(json_build_object(
        'role', CASE n % 2 WHEN 1 THEN 'user' ELSE 'assistant' END,
        'content', format('%s %s %s', md5(n::text), repeat(md5((n % 5000)::text) || ' common words ', 12),
                          CASE WHEN n = 4321 THEN 'Xylophone' END))::text, 'UTF8')
FROM generate_series(1, 100000) AS n
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_rare_word_among_100_000_messages_is_found_quickly(api: Api, database) -> None:
    await api.http.post("/api/sessions", json={"id": "long"})
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        await admin.execute(FILL)
        await admin.execute("UPDATE sessions SET last_seq = 100000, turns = 50000")
        await admin.execute("ANALYZE messages")
    finally:
        await admin.close()
    found = await find(api, "long", mode="search", query="xylophone")
    assert [(e["first"], e["last"]) for e in found["excerpts"]] == [(4319, 4323)]
    times = []
    for _ in range(15):
        start = time.perf_counter()
        await find(api, "long", mode="search", query="XYLOPHONE")
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.1, times
    for options in ({"mode": "tail", "last": 5}, {"mode": "turn", "turnId": "t25000"}, {"mode": "head"}):
        start = time.perf_counter()
        await find(api, "long", **options)
        assert time.perf_counter() - start < 0.5


async def test_a_hit_inside_an_argument_is_shown(api: Api) -> None:
    arguments = {
        "path": "src/app.py",
        "mode": "w",
        "content": "def main():\n    " + "pass\n    " * 40 + "launch(port=8484)  # the needle\n" + "    pass\n" * 40,
        "options": {"encoding": "utf-8", "newline": "thistle"},
    }
    function = {"name": "write", "arguments": json.dumps(arguments)}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    await api.append("h", {"role": "user", "content": "write it"}, call)
    shown = {}
    for query in ("needle", "THISTLE", "src/app", "mode", '"mode": "w"', "write"):
        (excerpt,) = (await find(api, "h", mode="search", query=query, before=0, after=0))["excerpts"]
        shown[query] = excerpt["messages"][-1]["text"]
    for query, text in shown.items():
        assert query.casefold() in text.casefold(), text
        assert len(text) < 300
    assert shown["src/app"] == "[assistant t1] [tool: write({path: 'src/app.py', ...})]"
    assert shown["mode"] == "[assistant t1] [tool: write({path: 'src/app.py', mode: 'w', ...})]"
    assert shown["needle"].startswith("[assistant t1] [tool: write({path: 'src/app.py', ..., content: '...")


async def test_a_hit_far_inside_a_long_text_is_shown(api: Api) -> None:
    text = "x " * 30_000 + "the needle" + " y" * 30_000
    await api.append("l", {"role": "user", "content": text})
    found = await find(api, "l", mode="search", query="The Needle")
    (message,) = found["excerpts"][0]["messages"]
    assert "the needle" in message["text"]
    assert "characters before]" in message["text"]
    assert len(message["text"]) < 21_000
    assert found["truncated"]
