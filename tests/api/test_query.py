"""`query_db`: the agent's own SQL over its session (std::slop, "Historical Context Retrieval")."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import httpx
import pytest

from tersely.domain.errors import InvalidRequest
from tersely.sandbox.child import QueryLimits
from tersely.service.common.metrics import Metrics
from tersely.service.search.queries import Queries
from tersely.store.db import connection
from tersely.store.search.query_rows import Portions
from tests.api.conftest import Api, NewKey
from tests.conftest import Database

CALL = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Read a.py and mind the refactor plan."},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "print('hello')"},
    {"role": "assistant", "content": "It says hello."},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}]},
]


async def ask(api: Api, sql: str, session: str = "s", **headers: str) -> httpx.Response:
    return await api.post_raw(f"/api/sessions/{session}/query", json.dumps({"sql": sql}).encode(), **headers)


async def rows(api: Api, sql: str, session: str = "s") -> list[list[Any]]:
    answer = await ask(api, sql, session)
    assert answer.status_code == 200, answer.text
    found: list[list[Any]] = answer.json()["rows"]
    return found


async def refusal(api: Api, sql: str) -> str:
    answer = await ask(api, sql)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["field"] == "sql"
    detail: str = answer.json()["detail"]
    return detail


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


async def test_the_table_is_the_session(api: Api) -> None:
    await api.append("s", *TALK)
    answer = await ask(api, "SELECT id, turn, role, kind, status, content, tool_name FROM messages ORDER BY id")
    assert answer.json() == {
        "columns": ["id", "turn", "role", "kind", "status", "content", "tool_name"],
        "rows": [
            [1, 0, "system", "text", "live", "Be brief.", None],
            [2, 1, "user", "text", "live", "Read a.py and mind the refactor plan.", None],
            [3, 1, "assistant", "tool_call", "live", 'I look.\nread_file {"path": "a.py"}', "read_file"],
            [4, 1, "tool", "tool_result", "live", "print('hello')", "read_file"],
            [5, 1, "assistant", "text", "live", "It says hello.", None],
            [6, 2, "user", "media", "live", "", None],
        ],
        "truncated": False,
        "notes": [],
    }
    ((created_at, tokens),) = await rows(api, "SELECT created_at, tokens FROM messages WHERE id = 2")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", created_at)
    assert tokens > 0
    recent = "SELECT count(*) FROM messages WHERE created_at > datetime('now', '-1 hour') AND created_at < '2999'"
    assert await rows(api, recent) == [[6]]


async def test_the_document_s_own_query(api: Api) -> None:
    await api.append("s", *TALK)
    sql = """
    SELECT role, content FROM messages
    WHERE status != 'dropped' AND content LIKE '%refactor plan%'
    ORDER BY id DESC LIMIT 5;
    """
    assert await rows(api, sql) == [["user", "Read a.py and mind the refactor plan."]]


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("WITH t AS (SELECT count(*) AS n FROM messages GROUP BY role) SELECT max(n), count(*) FROM t", [[2, 4]]),
        ("SELECT group_concat(id, '-') FROM messages WHERE turn = 1", [["2-3-4-5"]]),
        ("SELECT json_extract(substr(content, instr(content, '{')), '$.path') FROM messages WHERE id = 3", [["a.py"]]),
        ("SELECT value FROM messages, json_each('[1, 2]') WHERE messages.id = 1", [[1], [2]]),
        ("SELECT row_number() OVER (ORDER BY id DESC) FROM messages LIMIT 1", [[1]]),
        ("SELECT a.id FROM messages a JOIN messages b ON a.turn = b.turn WHERE b.id = 6", [[6]]),
        ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 9) SELECT count(*) FROM r", [[9]]),
        ("SELECT count(*) FROM messages WHERE tool_name IS NULL", [[4]]),
        ("VALUES (1), (2)", [[1], [2]]),
        ("-- why\nSELECT /* ; */ ';' -- ;", [[";"]]),
        ("SELECT 1;  ", [[1]]),
    ],
)  # fmt: skip
async def test_queries_that_agents_send(api: Api, sql: str, expected: list[list[Any]]) -> None:
    await api.append("s", *TALK)
    assert await rows(api, sql) == expected


async def test_hidden_turns_are_marked_and_removed_ones_are_gone(api: Api) -> None:
    for number in range(1, 5):
        await api.append("s", message(f"question {number}"), message(f"answer {number}", "assistant"))
    by_turn = "SELECT turn, status, count(*) FROM messages GROUP BY turn, status ORDER BY turn"
    assert await rows(api, by_turn) == [[1, "live", 2], [2, "live", 2], [3, "live", 2], [4, "live", 2]]
    await api.http.post("/api/sessions/s/undo")
    await api.http.post("/api/sessions/s/turns/t2/drop")
    await api.http.delete("/api/sessions/s/turns/t1")
    assert await rows(api, by_turn) == [[2, "dropped", 2], [3, "live", 2], [4, "dropped", 2]]
    await api.append("s", message("question 5"))
    expected = [[2, "dropped", 2], [3, "live", 2], [4, "dropped", 2], [5, "live", 1]]
    assert await rows(api, by_turn) == expected


async def test_only_the_current_instructions_are_there(api: Api) -> None:
    await api.append("s", message("You are old.", "system"), message("hello"))
    instructions = "SELECT id, content FROM messages WHERE turn = 0"
    assert await rows(api, instructions) == [[1, "You are old."]]
    await api.append("s", message("You are new.", "system"), message("hello again"))
    assert await rows(api, instructions) == [[3, "You are new."]]


async def test_recreated_session_has_no_messages_of_the_old_one(api: Api) -> None:
    await api.append("s", message("old"))
    assert await rows(api, "SELECT content FROM messages") == [["old"]]
    await api.http.delete("/api/sessions/s")
    assert (await ask(api, "SELECT 1")).status_code == 404
    await api.append("s", message("new"))
    assert await rows(api, "SELECT content FROM messages") == [["new"]]


async def test_query_of_another_tenants_session_is_not_found(guarded: Api, new_tenant: NewKey) -> None:
    mine, theirs = await new_tenant("me"), await new_tenant("them")
    await guarded.append("s", message("mine"), **mine)
    await guarded.append("s", message("theirs"), **theirs)
    await guarded.append("only-theirs", message("theirs"), **theirs)
    everything = "SELECT content FROM messages"
    for _ in range(2):
        assert (await ask(guarded, everything, **mine)).json()["rows"] == [["mine"]]
        assert (await ask(guarded, everything, **theirs)).json()["rows"] == [["theirs"]]
    assert (await ask(guarded, everything, "only-theirs", **mine)).status_code == 404
    assert (await ask(guarded, "DROP TABLE messages", "only-theirs", **mine)).status_code == 404
    assert (await ask(guarded, everything)).status_code == 401


async def test_errors_help_to_correct_the_sql(api: Api) -> None:
    await api.append("s", message("hello"))
    columns = "id, turn, role, kind, status, content, tool_name, created_at, tokens"
    assert await refusal(api, "SELECT group_id FROM messages") == (
        f"there is no column group_id; the columns of messages are {columns}"
    )
    assert await refusal(api, 'SELECT id, "nosuch" FROM messages') == (
        f"there is no column nosuch; the columns of messages are {columns}; a text is written in single quotes"
    )
    assert "there is no column it's" in await refusal(api, """SELECT 'a"b', "it's" FROM messages -- "x" """)
    assert await refusal(api, "SELECT *\nFORM messages") == (
        'syntax error near "FORM" at character 10 (line 2, column 1); the dialect is SQLite\'s'
    )
    assert await refusal(api, "SELECT FORMA, x FROM FROM messages") == (
        'syntax error near "FROM" at character 22 (line 1, column 22); the dialect is SQLite\'s'
    )
    assert "at character 8 " in await refusal(api, "SELECT 'open")
    assert "ends too early" in await refusal(api, "SELECT (1")
    assert await refusal(api, "SELECT * FROM turns") == f"there is no table turns; the only one is messages({columns})"
    assert (await refusal(api, "SELECT printf('%d', 1)")).startswith(
        "the function printf is not available; there are abs,"
    )
    assert (await refusal(api, "SELECT nosuch(1)")).startswith("the function nosuch is not available; there are abs,")
    assert (await refusal(api, "SELECT 1; SELECT 2")).startswith("there are several statements")
    assert (await refusal(api, "DELETE FROM messages")).startswith("the SQL begins with 'DELETE': only one SELECT")
    assert (await refusal(api, "WITH x AS (SELECT 1) DELETE FROM messages")).startswith("this statement is not allowed")
    assert "parameters" in await refusal(api, "SELECT * FROM messages WHERE id = ?")
    assert "is empty" in await refusal(api, " \n-- nothing\n/* at all")
    assert "20000" in await refusal(api, f"SELECT '{'x' * 20_000}'")
    for unspeakable in ("SELECT '\x00'", "SELECT '\ud800'"):
        assert "U+0000" in await refusal(api, unspeakable)


async def test_names_may_be_quoted_in_every_way(api: Api) -> None:
    await api.append("s", message("hello"))
    assert await rows(api, """SELECT "content", [role], `id`, '"turn"', "M"."turn" FROM "messages" AS "M" """) == [
        ["hello", "user", 1, '"turn"', 1]
    ]
    assert await rows(api, """SELECT "a""b`c" FROM (SELECT 7 AS "a""b`c") /* "x" ' */ -- it's "y" """) == [[7]]
    assert await rows(api, """SELECT 'it''s "so"' || id FROM messages WHERE 1 /* open " """) == [['it\'s "so"1']]


async def test_the_limits_are_settings(api: Api, database: Database) -> None:
    await api.append("s", message("hello"))
    store = connection.Database(dsn=database.dsn)
    await store.open()
    metrics = Metrics()
    few = Queries(store, metrics, children=1, limits=QueryLimits(seconds=0.5, memory=64 * 1024 * 1024))
    try:
        numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r"
        start = time.monotonic()
        with pytest.raises(InvalidRequest, match=r"more than 0\.5 seconds"):
            await few.run("default", "s", f"{numbers}) SELECT count(*) FROM r")
        assert time.monotonic() - start < 1.5
        long = f"replace('{'x' * 2_000}', 'x', '{'y' * 2_000}') || n"
        with pytest.raises(InvalidRequest, match="more memory"):
            await few.run("default", "s", f"{numbers} LIMIT 40) SELECT count(DISTINCT {long}) FROM r")
        with pytest.raises(InvalidRequest):
            await few.run("default", "s", "SELECT nosuch FROM messages")
        assert (await few.run("default", "s", "SELECT id FROM messages")).rows == ((1,),)
        counted = {
            sample.labels["result"]: sample.value
            for family in metrics.queries.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }
        assert counted == {"too_long": 1, "too_large": 1, "error": 1, "ok": 1, "busy": 0}
    finally:
        await few.close()
        await store.close()


async def test_values_of_every_kind(api: Api) -> None:
    await api.append("s", message("hello"))
    answer = await ask(api, "SELECT 9223372036854775807, -9223372036854775808, 1.5, NULL, x'00ff', 9e999, -9e999, ''")
    assert answer.text.count("9223372036854775807") == 2
    assert answer.json()["rows"] == [
        [2**63 - 1, -(2**63), 1.5, None, "x'00ff'", "Infinity", "-Infinity", ""],
    ]
    odd = "SELECT CAST(x'ff41' AS TEXT), char(55296), char(0) || 'x', typeof(CAST(content AS BLOB)) FROM messages"
    ((broken, half, with_nul, kind),) = await rows(api, odd)
    assert broken == "\ufffdA"
    assert set(half) == {"\ufffd"}
    assert with_nul == "\0x"
    assert kind == "blob"
    assert (await ask(api, "SELECT 1 AS a, 2 AS a")).json()["columns"] == ["a", "a"]


async def test_texts_of_every_kind(api: Api) -> None:
    texts = ["žluťoučký 🐎 \u202e", "before\0after", "half \ud83d pair", "' OR 1=1; --", "", "\r\n\t\x7f"]
    for text in texts:
        await api.post_raw("/api/sessions/s/messages", json.dumps({"messages": [message(text)]}).encode())
    found = [text for (text,) in await rows(api, "SELECT content FROM messages ORDER BY id")]
    assert found == [re.sub("[\0\ud800-\udfff]", "\ufffd", text) for text in texts]
    # What stands behind a U+0000 is found too, which SQLite's functions would not see.
    assert await rows(api, "SELECT id FROM messages WHERE content LIKE '%after%'") == [[2]]
    assert await rows(api, "SELECT id FROM messages WHERE content LIKE '%🐎%'") == [[1]]


async def test_of_a_very_long_message_the_beginning_is_there(api: Api) -> None:
    functions = [{"name": f"{n}" * 5_000, "arguments": "{}"} for n in range(9)]
    calls = [{"id": f"c{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "done"} for n in range(9)]
    await api.append(
        "s", message("é" * 3_000_000), {"role": "assistant", "content": None, "tool_calls": calls}, *results
    )
    assert await rows(api, "SELECT length(content), substr(content, -2) FROM messages WHERE id = 1") == [
        [2 * 2**20, "éé"]
    ]
    names = await rows(
        api, "SELECT kind, length(tool_name) <= 1000, substr(tool_name, 1, 2) FROM messages WHERE id > 1"
    )
    assert names == [["tool_call", 1, "00"], *(["tool_result", 1, f"{n}{n}"] for n in range(9))]


async def test_an_answer_is_bounded_and_says_so(api: Api) -> None:
    await api.append("s", *(message(f"{number} " + "ž" * 700) for number in range(500)), message("é" * 100_000))
    answer = (await ask(api, "SELECT id FROM messages ORDER BY id")).json()
    assert [row[0] for row in answer["rows"]] == list(range(1, 201))
    assert answer["truncated"]
    assert "OFFSET" in answer["notes"][0]
    assert len(await rows(api, "SELECT content FROM messages")) < 200
    answer = (await ask(api, "SELECT content FROM messages WHERE id = 501")).json()
    assert answer["rows"] == [["é" * 32_768]]
    assert "substr" in answer["notes"][0]
    rest = await rows(api, "SELECT substr(content, 90001, 20000) FROM messages WHERE id = 501")
    assert rest == [["é" * 10_000]]
    wide = "SELECT " + ", ".join(["content"] * 60) + " FROM messages ORDER BY id DESC"
    answer = await ask(api, wide)
    assert answer.json()["truncated"]
    assert len(answer.content) < 300_000


async def test_of_a_long_session_the_newest_rows_are_held_and_the_answer_says_so(api: Api, database: Database) -> None:
    for number in range(0, 60, 20):
        await api.append("s", *(message(f"message {number + each}") for each in range(1, 21)))
    store = connection.Database(dsn=database.dsn)
    await store.open()
    few = Queries(store, Metrics(), most=Portions(size=10_000, rows=25, portion_size=200, portion_rows=4))
    try:
        counting = "SELECT min(id), max(id), count(*) FROM messages"
        result = await few.run("default", "s", counting)
        assert (result.rows, result.truncated) == (((36, 60, 25),), True)
        assert "before id 36" in result.notes[0]
        # A message that is named is found whatever its age, as the hint in a shortened result says.
        named = await few.run("default", "s", "SELECT content FROM messages WHERE id=7")
        assert named.rows == (("message 7",),)
        named = await few.run("default", "s", "SELECT content FROM messages WHERE id IN (3, 50) ORDER BY id")
        assert named.rows == (("message 3",), ("message 50",))
        for number in range(61, 71):
            await api.append("s", message(f"message {number}"))
            result = await few.run("default", "s", "SELECT max(id), min(content) <> '' FROM messages WHERE id > 36")
            assert result.rows == ((number, 1),)
        by_size = Queries(store, Metrics(), most=Portions(size=500, rows=1000, portion_size=100, portion_rows=100))
        ((first, last, count),) = (await by_size.run("default", "s", counting)).rows
        assert isinstance(first, int)
        assert isinstance(count, int)
        assert last == 70
        assert 5 < count == 70 - first + 1 < 20
        await by_size.close()
    finally:
        await few.close()
        await store.close()


async def test_a_query_is_not_stored_and_changes_nothing(api: Api) -> None:
    await api.append("s", *TALK)
    before = (await api.http.get("/api/sessions/s")).json()
    await asyncio.gather(*(ask(api, "SELECT count(*) FROM messages") for _ in range(5)))
    assert (await api.http.get("/api/sessions/s")).json() == before
