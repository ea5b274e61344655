"""``GET /api/sessions/{id}/events`` as server-sent events."""

from __future__ import annotations

import json

import asyncpg

from tersely.api.rest.stats import write_stream
from tersely.composition.clock import clock
from tersely.service.sessions.event_stream import Cursor, EventStream
from tersely.store.db import connection
from tersely.store.ops import events
from tests.api.conftest import Api
from tests.conftest import Database

EPOCH = """
INSERT INTO epochs (tenant_id, session_id, number, cut, reason, head_tokens, tokens_before, tokens_after, created_at,
    plan)
VALUES ('default', 's', $1, 10, 'high_watermark', 5, 100, 50, now(), '{}')
"""


def read(block: bytes) -> tuple[str, str, dict]:
    fields = dict(line.split(": ", 1) for line in block.decode().strip().split("\n"))
    return fields["id"], fields["event"], json.loads(fields["data"])


async def test_event_stream_follows_the_session_until_its_deletion(api: Api, database: Database) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    admin = await asyncpg.connect(database.admin_dsn)
    store = connection.Database(dsn=database.dsn)
    await store.open()
    try:
        await admin.execute(EPOCH, 1)
        stream = write_stream(EventStream(store, pause=0.01).follow("default", "s", Cursor()))
        place, name, data = read(await anext(stream))
        assert (place, name, data["type"], data["number"], data["reason"]) == (
            "1-0", "epoch", "epoch", 1, "high_watermark",
        )  # fmt: skip
        assert await anext(stream) == b": quiet\n\n"

        async with store.transaction("default") as writing:
            await events.add(writing, "default", "s", "compaction", {"result": "made"}, clock())
        blocks = [block async for block in until_told(stream)]
        assert read(blocks[-1])[:2] == ("1-1", "compaction")
        await admin.execute(EPOCH, 2)
        blocks = [block async for block in until_told(stream)]
        assert read(blocks[-1])[:2] == ("2-1", "epoch")

        again = write_stream(EventStream(store).follow("default", "s", Cursor.read("1-1", field="Last-Event-ID")))
        assert read(await anext(again))[0] == "2-1"

        await api.http.delete("/api/sessions/s")
        assert [block async for block in stream if block != b": quiet\n\n"] == []
    finally:
        await store.close()
        await admin.close()


async def until_told(stream):
    async for block in stream:
        yield block
        if block != b": quiet\n\n":
            return


async def test_an_event_stream_of_an_unknown_session_is_refused_at_once(api: Api) -> None:
    accept = {"accept": "text/event-stream"}
    assert (await api.http.get("/api/sessions/none/events", headers=accept)).status_code == 404
    await api.http.post("/api/sessions", json={"id": "s"})
    refused = await api.http.get("/api/sessions/s/events", headers={**accept, "last-event-id": "what"})
    assert refused.status_code == 422
    assert "Last-Event-ID" in refused.json()["detail"]
