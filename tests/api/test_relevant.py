"""Mode ``relevant`` over REST: what comes, what does not, long sessions, removal, tenants, and how fast it is."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import asyncpg
import pytest

from tersely.domain.search.excerpts import RelevanceSearch
from tersely.service.common.auth import DEFAULT_TENANT
from tersely.service.common.metrics import Metrics
from tersely.service.search.session_search import Searcher
from tersely.store.search import pages as pages
from tersely.store.search import term_pages
from tests.api.conftest import Api, NewKey
from tests.conftest import Database
from tests.support.stores import open_store

ASKED = {"mode": "relevant", "before": 0, "after": 0, "first": 1}


async def find(api: Api, session: str, query: str, *, headers: dict[str, str] | None = None, **options: object) -> Any:
    body = {**ASKED, "query": query, **options}
    answer = await api.http.post(f"/api/sessions/{session}/search", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def seqs(found: Any) -> list[int]:
    return [message["seq"] for excerpt in found["excerpts"] for message in excerpt["messages"]]


async def talk(api: Api) -> None:
    await api.append(
        "s",
        {"role": "system", "content": "You love the dentist."},
        {"role": "user", "content": "Book me a dentist appointment", "name": "Caroline"},
        {"role": "assistant", "content": "Main Street, Tuesday at nine."},
        {"role": "user", "content": "Now the holidays: which islands are warm in March?"},
        {"role": "assistant", "content": "Madeira is mild."},
        {"role": "user", "content": "continue"},
        {"role": "assistant", "content": "Fix maxRetries in src/http_client.py first."},
    )


@pytest.mark.parametrize(
    ("query", "seq"),
    [
        ("When are my appointments?", 2),
        ("what did Caroline want", 2),
        ("warm island holidays", 4),
        ("http client retries", 7),
        ("HTTP_CLIENT.PY", 7),
    ],
)
async def test_the_most_relevant_message_comes(api: Api, query: str, seq: int) -> None:
    await talk(api)
    assert seqs(await find(api, "s", query)) == [seq]


async def test_matches_are_marked_among_their_neighbours(api: Api) -> None:
    await talk(api)
    found = await find(api, "s", "dentist", first=2, after=1)
    assert found["text"] == (
        "--- messages 1-3 of 6 ---\n"
        "[user t1, best match] Book me a dentist appointment\n"
        "[assistant t1, match 2] Main Street, Tuesday at nine.\n"
        "[user t2] Now the holidays: which islands are warm in March?"
    )
    assert (found["total"], found["truncated"]) == (6, False)
    assert [message["rank"] for message in found["excerpts"][0]["messages"]] == [1, 2, None]


async def test_neighbours_come_only_where_they_are_asked_for(api: Api) -> None:
    await talk(api)
    body = {"mode": "relevant", "query": "which islands are warm?", "first": 1}
    found = (await api.http.post("/api/sessions/s/search", json=body)).json()
    assert found["text"] == (
        "--- messages 3-3 of 6 ---\n[user t2, best match] Now the holidays: which islands are warm in March?"
    )
    called = await api.http.post("/api/sessions/s/tools/context_search", json={"arguments": body})
    assert called.json()["text"] == found["text"]


@pytest.mark.parametrize("query", ["continue", "please go on", "next?", "zebra", "..."])
async def test_small_talk_and_unknown_words_find_nothing(api: Api, query: str) -> None:
    await talk(api)
    assert (await find(api, "s", query, first=10))["text"] == "No messages found."


@pytest.mark.parametrize(
    ("options", "field"),
    [({"query": None}, "query"), ({"query": " "}, "query"), ({"first": -1}, "first"), ({"before": "1"}, "before")],
)
async def test_bad_arguments_are_named(api: Api, options: dict[str, object], field: str) -> None:
    await talk(api)
    refused = await api.http.post("/api/sessions/s/search", json={**ASKED, "query": "dentist", **options})
    assert (refused.status_code, refused.json()["field"]) == (422, field)


async def test_hidden_and_removed_messages_neither_come_nor_come_back(api: Api, database) -> None:
    """Pages are made, then a message is removed for good: nothing of it is left in any of them."""
    count = pages.PAGE * 2 + 9
    texts = [f"message {n} about topic{n % 50}" + (" unicorn" if n in (40, 200) else "") for n in range(1, count + 1)]
    await api.append("h", *({"role": "user", "content": text} for text in texts))
    assert set(seqs(await find(api, "h", "unicorns", first=2))) == {40, 200}
    await api.http.post("/api/sessions/h/turns/t200/drop")
    assert seqs(await find(api, "h", "unicorns")) == [40]
    await api.http.delete("/api/sessions/h/turns/t40")
    assert (await find(api, "h", "unicorns"))["excerpts"] == []
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        stored = await admin.fetch("SELECT page, position('unicorn'::bytea IN terms) AS at FROM term_pages ORDER BY 1")
        assert [(row["page"], row["at"] > 0) for row in stored] == [(0, False), (1, True)]
    finally:
        await admin.close()


async def test_merged_pages_hold_what_single_ones_held(api: Api, database: Database) -> None:
    """Pages are merged; then a message is removed for good, and they are made and merged again: each time a worker that
    has read nothing yet finds what is there.
    """
    count = pages.PAGE * (term_pages.MERGED + 1) + 9
    told = {40: "walrus", 5_000: "unicorn", count: "unicorn"}
    texts = [f"message {n} about topic{n % 50} {told.get(n, '')}" for n in range(1, count + 1)]
    for start in range(0, count, 1_000):
        await api.append("h", *({"role": "user", "content": text} for text in texts[start : start + 1_000]))
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        async with open_store(database) as store:
            for wanted in ([5_000, count], [count]):
                assert sorted(await _ranked(Searcher(store, Metrics()), "unicorns", len(wanted))) == wanted
                await Searcher(store, Metrics()).build_pages(DEFAULT_TENANT, "h")
                stored = await admin.fetch("SELECT page, pages FROM term_pages ORDER BY 1")
                assert [tuple(row) for row in stored] == [(0, term_pages.MERGED), (term_pages.MERGED, 1)]
                fresh = Searcher(store, Metrics())
                assert sorted(await _ranked(fresh, "unicorns", len(wanted))) == wanted
                assert await _ranked(fresh, "the walrus", 1) == [40]
                await api.http.delete("/api/sessions/h/turns/t5000")
                at = await admin.fetch("SELECT position('unicorn'::bytea IN terms) AS at FROM term_pages")
                assert not any(row["at"] for row in at)
    finally:
        await admin.close()


async def _ranked(searcher: Searcher, query: str, first: int) -> list[int]:
    found = await searcher.search(DEFAULT_TENANT, "h", RelevanceSearch(query=query, first=first))
    return [seq for excerpt in found.excerpts for seq in excerpt.seqs]


async def test_an_appended_message_is_found_at_once(api: Api) -> None:
    for start in range(1, pages.PAGE * 3, 50):
        texts = [f"filler number {n}" for n in range(start, start + 50)]
        await api.append(
            "g", *({"role": "user", "content": text} for text in texts), {"role": "user", "content": f"pin{start}"}
        )
        last = (await api.http.get("/api/sessions/g")).json()["messages"]
        assert seqs(await find(api, "g", f"pin{start}")) == [last]
    assert seqs(await find(api, "g", "pin1")) == [51]


async def test_a_session_of_the_same_name_is_another_one(api: Api, guarded: Api, new_tenant: NewKey) -> None:
    await talk(api)
    assert seqs(await find(api, "s", "dentist")) == [2]
    await api.http.delete("/api/sessions/s")
    await api.append("s", {"role": "user", "content": "dragons"}, {"role": "assistant", "content": "the dentist"})
    assert seqs(await find(api, "s", "dentist")) == [2]
    assert (await find(api, "s", "appointment"))["excerpts"] == []
    one, other = await new_tenant("north"), await new_tenant("south")
    for headers, word in ((one, "walrus"), (other, "penguin")):
        body = {"messages": [{"role": "user", "content": word}]}
        await guarded.http.post("/api/sessions/x/messages", json=body, headers=headers)
    assert seqs(await find(guarded, "x", "walrus", headers=one)) == [1]
    assert seqs(await find(guarded, "x", "walrus", headers=other)) == []


FILL = """
INSERT INTO messages (tenant_id, session_id, seq, turn, tokens, place, role, status, dialect, client_visible,
    model_visible, pinned, call, created_at, raw)
SELECT 'default', 'long', seq, (seq + 1) / 2, 100, seq, 'user', 'live', 'openai_chat', true, true, false, 0, now(),
    convert_to(json_build_object('role', 'user', 'content', text)::text, 'UTF8')
FROM unnest($1::bigint[], $2::text[]) AS u (seq, text)
"""


def zipf_texts(count: int) -> list[str]:
    """Words as frequent as words are: a few stand in most messages, most in few."""
    rng = random.Random(1)
    texts = [" ".join(f"word{int(20_000 ** rng.random())}" for _ in range(40)) for _ in range(count)]
    texts[4320] += " Xylophone"
    return texts


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_20_000_messages_are_ranked_quickly(api: Api, database) -> None:
    await api.http.post("/api/sessions", json={"id": "long"})
    admin = await asyncpg.connect(database.admin_dsn)
    try:
        await admin.execute(FILL, list(range(1, 20_001)), zipf_texts(20_000))
        await admin.execute("UPDATE sessions SET last_seq = 20000, turns = 10000")
        await admin.execute("ANALYZE messages")
    finally:
        await admin.close()
    assert seqs(await find(api, "long", "xylophones")) == [4321]
    times = []
    for n in range(5):
        start = time.perf_counter()
        assert seqs(await find(api, "long", f"the xylophone, word{n + 50} and word{n * 300}, word3"))
        times.append(time.perf_counter() - start)
    assert statistics.median(times) < 0.5, times


async def test_a_match_inside_a_long_argument_is_shown(api: Api) -> None:
    arguments = json.dumps({"path": "a.py", "content": "left " * 500 + "heron42 " + "right " * 500})
    function = {"name": "write", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    await api.append(
        "long", {"role": "user", "content": "go"}, {"role": "assistant", "content": None, "tool_calls": [call]}
    )
    found = await api.http.post("/api/sessions/long/search", json={"mode": "relevant", "query": "heron42"})
    assert "heron42" in found.json()["text"]
