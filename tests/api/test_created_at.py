"""Messages appended with their own times: an old conversation keeps its ages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.api.conftest import Api

OLD = datetime(2024, 1, 15, 10, 30, tzinfo=UTC)


def write(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


async def append(api: Api, session: str, messages: list[dict[str, str]], times: object, **headers: str):
    body = {"messages": messages, "created_at": times}
    return await api.http.post(f"/api/sessions/{session}/messages", json=body, headers=headers)


def conversation(turns: int, words: int = 2) -> list[dict[str, str]]:
    return [
        {"role": role, "content": f"{role} speaks of lake{turn} " + "and of the boat " * words}
        for turn in range(1, turns + 1)
        for role in ("user", "assistant")
    ]


async def test_each_message_keeps_its_time_in_every_view(api: Api) -> None:
    times = ["2024-01-15T10:30:00Z", "2024-01-15t12:30:09.25+02:00"]
    done = await append(api, "old", conversation(1), times)
    assert done.status_code == 201, done.text
    for view in ("client", "model", "all"):
        listed = (await api.http.get("/api/sessions/old/messages", params={"view": view})).json()["items"]
        assert [item["created_at"] for item in listed] == ["2024-01-15T10:30:00Z", "2024-01-15T10:30:09.250000Z"]
    (turn,) = (await api.http.get("/api/sessions/old/turns")).json()["items"]
    assert turn["created_at"] == "2024-01-15T10:30:00Z"
    exported = (await api.http.get("/api/sessions/old/export")).json()
    assert [item["ts"] for item in exported["context"]] == [
        "2024-01-15T10:30:00+00:00",
        "2024-01-15T10:30:09.250000+00:00",
    ]
    assert exported["terse"][0]["ts"] == "2024-01-15T10:30:09.250000+00:00"
    query = {"sql": "SELECT created_at FROM messages ORDER BY id"}
    rows = (await api.http.post("/api/sessions/old/query", json=query)).json()["rows"]
    assert all(row[0].startswith("2024-01-15") for row in rows)
    session = (await api.http.get("/api/sessions/old")).json()
    assert datetime.now(UTC) - datetime.fromisoformat(session["updated_at"]) < timedelta(minutes=1)


async def test_messages_without_times_are_from_now(api: Api) -> None:
    for times in (None, [write(OLD)] * 2):
        await append(api, "mixed", conversation(1), times)
    items = (await api.http.get("/api/sessions/mixed/messages")).json()["items"]
    now = datetime.now(UTC)
    assert all(now - datetime.fromisoformat(item["created_at"]) < timedelta(minutes=1) for item in items[:2])
    assert [item["created_at"] for item in items[2:]] == [write(OLD)] * 2


@pytest.mark.parametrize(
    ("times", "field"),
    [
        (["2024-01-15T10:30:00Z"], "created_at"),
        (["2024-01-15T10:30:00Z"] * 3, "created_at"),
        ([], "created_at"),
        (["2024-01-15T10:30:00Z", "2024-01-15T10:30:00"], "created_at[1]"),  # no zone
        (["2024-01-15", "2024-01-15T10:30:00Z"], "created_at[0]"),
        (["2024-01-15T10:30:00Z", "yesterday"], "created_at[1]"),
        (["2024-01-15T10:30:00Z", "2024-13-15T10:30:00Z"], "created_at[1]"),
        (["2024-01-15T10:30:00Z", "0001-01-01T00:00:00+10:00"], "created_at[1]"),
        (["2024-01-15T10:30:00Z", "1969-12-31T23:59:59Z"], "created_at[1]"),
        (["2024-01-15T10:30:00Z", "9999-12-31T23:59:59-10:00"], "created_at[1]"),
        (["2024-01-15T10:30:00Z", 1705314600], "created_at[1]"),
        (["2024-01-15T10:30:00Z", None], "created_at[1]"),
    ],
)
async def test_a_wrong_time_is_refused_with_its_index(api: Api, times: object, field: str) -> None:
    answer = await append(api, "wrong", conversation(1), times)
    assert answer.status_code == 422, answer.text
    assert (answer.json()["field"], field in answer.json()["detail"]) == (field, True)
    assert (await api.http.get("/api/sessions/wrong")).status_code == 404


async def test_a_time_in_the_future_is_refused_beyond_a_clocks_error(api: Api) -> None:
    now = datetime.now(UTC)
    slightly, clearly = (write(now + timedelta(minutes=minutes)) for minutes in (4, 6))
    assert (await append(api, "ahead", conversation(1), [slightly, slightly])).status_code == 201
    answer = await append(api, "ahead", conversation(1), [slightly, clearly])
    assert (answer.status_code, answer.json()["field"]) == (422, "created_at[1]")


async def test_times_need_not_ascend_and_the_order_of_the_messages_stays(api: Api) -> None:
    times = [write(OLD + timedelta(hours=hours)) for hours in (3, 1)]
    assert (await append(api, "back", conversation(1), times)).status_code == 201
    items = (await api.http.get("/api/sessions/back/messages")).json()["items"]
    assert [(item["seq"], item["created_at"]) for item in items] == [(1, times[0]), (2, times[1])]


async def test_a_key_covers_the_times(api: Api) -> None:
    times = [write(OLD)] * 2
    key = {"Idempotency-Key": "k"}
    first = await append(api, "once", conversation(1), times, **key)
    again = await append(api, "once", conversation(1), ["2024-01-15T12:30:00+02:00"] * 2, **key)
    assert (first.status_code, again.status_code, again.json()) == (201, 201, first.json())
    other = await append(api, "once", conversation(1), [write(OLD), write(OLD + timedelta(1))], **key)
    assert other.status_code == 409


async def test_strategies_go_by_the_ages(api: Api) -> None:
    """Under `tiered` only what was said in the last five minutes is working memory."""
    now = datetime.now(UTC)
    messages = conversation(6)
    times = [write(OLD)] * 10 + [write(now)] * 2
    await append(api, "aged", messages, times)
    await append(api, "fresh", messages, None)
    build = {"strategy": "tiered", "epoch": "every_request", "messages": [{"role": "user", "content": "of lake6?"}]}
    kept = {}
    for session in ("aged", "fresh"):
        made = (await api.http.post(f"/api/sessions/{session}/context", json=build)).json()
        layers = {layer["name"]: layer["tokens"] for layer in made["report"]["layers"]}
        kept[session] = layers["tail"]
    assert kept["fresh"] > 2 * kept["aged"]
    figures = {}
    for session in ("aged", "fresh"):
        await api.http.patch(f"/api/sessions/{session}", json={"strategy": "tiered", "epoch": "every_request"})
        stats = (await api.http.get(f"/api/sessions/{session}/stats")).json()
        figures[session] = {level["name"]: level["tokens"] for level in stats["tiered"]["levels"]}["working"]
    assert figures["fresh"] > 2 * figures["aged"]


@pytest.mark.parametrize("verb", ["clear", "compact"])
async def test_daily_memory_files_a_message_under_its_given_day(api: Api, verb: str) -> None:
    """A summary goes into the memory of the day on which its messages were written."""
    await api.http.post("/api/sessions", json={"id": "old", "strategy": "trim"})
    await append(api, "old", conversation(4), [write(OLD)] * 8)
    done = await api.http.post(f"/api/sessions/old/{verb}")
    assert done.status_code == 200, done.text
    items = (await api.http.get("/api/memory?session=old")).json()["items"]
    assert [(item["day"], item["created_at"]) for item in items] == [("2024-01-15", "2024-01-15T10:30:00Z")]
    assert (await api.http.get("/api/memory?day=2024-01-15")).json()["items"] == items


@pytest.mark.parametrize(
    "time",
    [
        "9999-12-31T23:59:59-23:59",
        "9999-12-31T23:59:59Z",
        "0001-01-01T00:00:00+23:59",
        "0001-01-01T00:00:00Z",
        "1969-12-31T23:59:59",
        -62_135_596_800,
        253_402_300_799_000,
    ],
)
async def test_imports_refuse_times_that_no_zone_can_write(api: Api, time: object) -> None:
    message = {"role": "user", "content": "hi"}
    entry = {"ts": time, "turnId": "t1", "summary": "greeted", "source": "model"}
    for body, field in (
        ({"context": [{**message, "ts": time}]}, "context[0].ts"),
        ({"context": [message], "terse": [entry]}, "terse[0].ts"),
    ):
        refused = await api.http.post("/api/sessions/import", json={"id": "old", **body})
        assert refused.status_code == 422, refused.text
        assert refused.json()["field"] == field
    if isinstance(time, str):
        await api.append("s", message)
        document = (await api.http.get("/api/sessions/s/export")).json()
        document["tersely"]["messages"][0]["created_at"] = time
        refused = await api.http.post("/api/sessions/import", json={**document, "id": "old"})
        assert refused.status_code == 422, refused.text
        assert refused.json()["field"] == "tersely.messages[0].created_at"
    assert (await api.http.get("/api/sessions/old")).status_code == 404
