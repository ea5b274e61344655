"""The summarizer on a real database, in front of a scripted model: what it stores, and what it does in trouble."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tersely.domain.errors import NotFound
from tersely.fakellm.scripted import ScriptedReply
from tersely.hosts import summarizer_host
from tersely.server.run import log_as_json
from tersely.service.summaries import summarizer as module
from tersely.service.summaries.jobs import Job, credentials_of
from tersely.service.summaries.models import SESSION
from tersely.settings import Settings
from tersely.store.db import leases
from tersely.store.notes import daily_memory as memory
from tersely.store.notes import summaries
from tersely.store.ops import breakers, events
from tests.builders import assistant, user
from tests.strategies.histories import place

GOOD = "## Goals\n- alpha\n## Done\n- everything"


def job(**values):
    given = {"tenant": "north", "session_id": "s1", "purpose": "checkpoint", "first_seq": 1, "last_seq": 8}
    return Job(**{**given, "strategy": "compact", "model": "session-model", **values})


def say(host, *texts, **values):
    """Answer like this from now on, the last one for good."""
    left = list(texts)

    def script(_received):
        text = left.pop(0) if len(left) > 1 else left[0]
        return ScriptedReply(message={"content": text}, **values)

    host.model.script = script


def fail(host, status=500):
    host.model.script = lambda _received: ScriptedReply(status=status, body=b'{"error":{"message":"no"}}')


def counted(summarizer, result):
    return summarizer._metrics.compactions.labels("compact", result)._value.get()


async def newest(pool, purpose="checkpoint", **values):
    async with pool.transaction(values.pop("tenant", "north")) as connection:
        return await summaries.newest(connection, values.pop("tenant", "north"), "s1", [purpose], **values)


async def compaction_events(pool):
    async with pool.transaction("north") as connection:
        return await events.after(connection, "north", "s1", 0, limit=100)


async def until_done(summarizer):
    async with asyncio.timeout(20):
        while summarizer.pending:
            await asyncio.sleep(0.01)


async def test_models_summary_is_stored_with_its_range(fill, pool, host, start, clock):
    await fill()
    say(host, GOOD)
    summarizer = await start(key="the-key")
    done = await summarizer.run_now(job())

    assert (done.result, done.tokens_before, done.error) == ("model", 1_600, "")
    (summary,) = await newest(pool)
    assert summary == done.summary
    assert (summary.text, summary.first_seq, summary.last_seq, summary.source) == (GOOD, 1, 8, "model")
    assert summary.created_at == clock.now
    (request,) = host.model.received
    assert request.headers["Authorization"] == "Bearer the-key"
    assert request.request is not None
    assert "tools" not in request.request
    assert [message["role"] for message in request.request["messages"]] == ["system", "user"]
    assert "alpha user 4" in request.request["messages"][1]["content"]
    assert "alpha user 5" not in request.request["messages"][1]["content"]
    begun, ended = await compaction_events(pool)
    assert (begun.kind, ended.kind) == ("compaction_start", "compaction_end")
    assert (ended.body["tokens_before"], ended.body["tokens_after"]) == (1_600, summary.tokens)
    assert "error" not in ended.body
    assert counted(summarizer, "model") == 1


async def test_summary_is_written_once_in_the_background(fill, pool, host, start):
    await fill()
    say(host, GOOD)
    summarizer = await start()
    assert summarizer.submit(job())
    assert not summarizer.submit(job()), "it is under way"
    assert summarizer.submit(job(last_seq=10))
    await until_done(summarizer)
    assert summarizer.submit(job())
    await until_done(summarizer)

    assert [summary.last_seq for summary in await newest(pool, limit=9)] == [8, 10]
    assert len(host.model.received) == 2
    assert "## Goals\n- alpha" in host.model.received[1].request["messages"][1]["content"], "the first was taken up"
    assert "alpha user 4" not in host.model.received[1].request["messages"][1]["content"]


async def test_a_full_queue_says_so(fill, start):
    summarizer = await start()
    await summarizer.close()
    summarizer._room, summarizer._room_each = 3, 2
    assert [summarizer.submit(job(last_seq=seq)) for seq in (2, 4, 6)] == [True, True, False]
    assert [summarizer.submit(job(session_id=name)) for name in ("s2", "s3")] == [True, False]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (ScriptedReply(message={"content": ""}), "empty"),
        (ScriptedReply(message={"content": "<think>hm</think>"}), "empty"),
        (ScriptedReply(message={"content": "word " * 4_000}), "too long"),
        (ScriptedReply(message={"content": "one line"}, finish_reason="length"), "cut off"),
        (ScriptedReply(status=500, body=b"oops"), "status 500"),
        (ScriptedReply(status=401, body=b"{}"), "status 401"),
        (ScriptedReply(status=200, body=b"<html>"), "no reply"),
        (ScriptedReply(status=200, body=b'{"choices":[]}'), "no reply"),
        (
            ScriptedReply(
                message={
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}],
                }
            ),
            "a tool call",
        ),
    ],
)
async def test_an_unusable_summary_is_replaced_by_an_extract(fill, pool, host, start, reply, error):
    await fill()
    host.model.script = lambda _received: reply
    done = await (await start()).run_now(job())
    assert (done.result, done.error) == ("extractive", error)
    (summary,) = await newest(pool)
    assert summary.source == "extractive"
    assert "src/alpha_1.py" in summary.text
    assert (await compaction_events(pool))[-1].body["error"] == error


async def test_a_model_that_takes_too_long_is_not_waited_for(fill, pool, host, start):
    await fill()
    say(host, GOOD, first_delay=5)
    done = await (await start(timeout=0.2)).run_now(job())
    assert (done.result, done.error) == ("extractive", "no answer in time")


async def test_a_host_that_is_not_there_is_no_harm(fill, host, start):
    await fill()
    summarizer = await start()
    upstream = summarizer._summary_writer._models._own.upstream
    upstream._base = "http://127.0.0.1:9/v1"
    await upstream.open()
    done = await summarizer.run_now(job())
    assert (done.result, done.error) == ("extractive", "the host cannot be reached")


async def test_after_repeated_failures_no_replica_asks_until_the_pause_is_over(fill, pool, host, start, clock):
    await fill(turns=40)
    fail(host)
    one, other = await start(name="one"), await start(name="other")
    for number, summarizer in enumerate((one, other, one, other, one), start=1):
        await summarizer.run_now(job(purpose="task", first_seq=number, last_seq=number + 3))
    assert len(host.model.received) == breakers.THRESHOLD

    clock.forward(seconds=61)
    await other.run_now(job(purpose="task", first_seq=11, last_seq=14))
    assert len(host.model.received) == breakers.THRESHOLD + 1, "one trial"
    clock.forward(seconds=61)
    await one.run_now(job(purpose="task", first_seq=21, last_seq=24))
    assert len(host.model.received) == breakers.THRESHOLD + 1, "the second pause is longer"
    clock.forward(seconds=61)
    say(host, "- all good")
    done = await one.run_now(job(purpose="task", first_seq=31, last_seq=34))
    assert done.result == "model"
    async with pool.transaction("north") as connection:
        assert not await breakers.is_open(connection, "north", "scripted", clock.now)
        assert await connection.fetchval("SELECT count(*) FROM breakers WHERE tenant_id = 'north'") == 0


async def test_summarizer_without_a_model_sends_no_request(fill, host, start):
    await fill()
    done = await (await start(model=None)).run_now(job())
    assert (done.result, done.error) == ("extractive", "")
    assert not host.model.received


async def test_summary_by_the_sessions_model_needs_the_callers_key(fill, pool, host, start):
    await fill()
    say(host, GOOD)
    summarizer = await start(own=False, model=SESSION)
    without = await summarizer.run_now(job())
    assert (without.result, "no key" in without.error) == ("extractive", True)
    headers = [("authorization", "Bearer mine"), ("cookie", "c"), ("x-api-key", "tsk_1")]
    mine = credentials_of(headers, drop=frozenset({"x-api-key"}))
    assert mine == (("authorization", "Bearer mine"),)
    done = await summarizer.run_now(job(credentials=mine, is_forced=True))
    assert done.result == "model"
    (request,) = host.model.received
    assert request.headers["Authorization"] == "Bearer mine"
    assert request.request["model"] == "session-model"
    assert "mine" not in repr(job(credentials=mine))


@pytest.mark.parametrize(
    ("settings", "address", "key"),
    [
        ({}, None, None),
        ({"summarizer_model": "m"}, None, None),
        ({"summarizer_api_key": "k"}, "https://host/v1", "k"),
        ({"summarizer_base_url": "http://own/v1/"}, "http://own/v1", None),
        (
            {"summarizer_base_url": "http://own/v1", "summarizer_api_key": "k", "openai_api_key": "o"},
            "http://own/v1",
            "k",
        ),
    ],
)
def test_a_host_of_its_own_comes_from_the_settings(settings, address, key):
    made = summarizer_host(Settings(_env_file=None, **settings), "https://host/v1")
    assert (made and made.upstream._base, made and made.api_key) == (address, key)
    assert "'k'" not in repr(made)


# Ranges, pieces, purposes


async def test_a_long_range_is_summarised_in_pieces(fill, pool, host, start):
    await fill(turns=40)
    say(host, "- piece one", "- pieces one and two", "- more", "- all of it")
    done = await (await start(window=4_000)).run_now(job(last_seq=80))
    assert done.result == "model"
    assert len(host.model.received) > 4
    assert "- pieces one and two" in host.model.received[2].request["messages"][1]["content"]
    assert done.summary.text == "- all of it"


async def test_of_a_very_long_range_the_beginning_is_condensed_without_a_model(fill, host, start, monkeypatch):
    monkeypatch.setattr("tersely.service.summaries.writing.MAX_RECORDS", 2)
    await fill(turns=40)
    say(host, "- all of it")
    done = await (await start(window=4_000)).run_now(job(last_seq=80))
    assert done.result == "model"
    assert len(host.model.received) <= 3
    assert "alpha user 1: see src/alpha_1.py" in host.model.received[0].request["messages"][1]["content"]


async def test_trimmed_turns_go_into_the_days_memory(fill, pool, host, start, clock):
    """CowAgent, "Turn Trimming"."""
    await fill()
    say(host, "- the user wanted alpha")
    await (await start()).run_now(job(purpose="trim", first_seq=1, last_seq=4))
    async with pool.transaction("north") as connection:
        (entry,) = await memory.of_day(connection, "north", clock.now.date())
        assert (entry.session_id, entry.first_seq, entry.last_seq) == ("s1", 1, 4)
        assert entry.text == "- the user wanted alpha"
    async with pool.transaction("south") as connection:
        assert await memory.of_day(connection, "south", clock.now.date()) == []


async def test_a_result_is_summarised_with_its_call(fill, pool, host, start):
    await fill()
    say(host, "it printed alpha")
    await (await start()).run_now(job(purpose="tool_result", first_seq=4, last_seq=4, earlier='read {"path":"a.py"}'))
    assert 'read {"path":"a.py"}' in host.model.received[0].request["messages"][1]["content"]
    assert (await newest(pool, "tool_result"))[0].text == "it printed alpha"


async def test_messages_at_hand_are_not_loaded_unless_history_was_edited(fill, pool, host, start, admin):
    await fill()
    say(host, GOOD)
    marked = place(user("at hand"), assistant("x" * 2_000))
    summarizer = await start()
    await summarizer.run_now(job(last_seq=2, entries=marked, edits=0))
    assert "at hand" in host.model.received[-1].request["messages"][1]["content"]
    await admin.execute("UPDATE sessions SET edits = 1")
    await summarizer.run_now(job(last_seq=2, entries=marked, edits=0, is_forced=True))
    assert "at hand" not in host.model.received[-1].request["messages"][1]["content"]


# What counts, and what does not any more


async def test_summary_of_undone_messages_is_ignored(fill, pool, host, start, admin):
    await fill()
    say(host, GOOD)
    summarizer = await start()
    await summarizer.run_now(job(last_seq=4))
    await summarizer.run_now(job(last_seq=8))
    hide = "UPDATE messages SET status = $1 WHERE seq = 8"
    await admin.execute(hide, "undone")
    assert [summary.last_seq for summary in await newest(pool, limit=9)] == [4]
    await admin.execute(hide, "live")
    assert [summary.last_seq for summary in await newest(pool, limit=9)] == [4, 8]
    await admin.execute("UPDATE messages SET status = 'dropped' WHERE seq = 10")
    assert [summary.last_seq for summary in await newest(pool, limit=9)] == [4, 8], "edits elsewhere do not touch it"
    assert [summary.last_seq for summary in await newest(pool, up_to=7, limit=9)] == [4]


async def test_summary_of_a_range_that_changes_meanwhile_is_not_stored(fill, pool, host, start, admin):
    await fill()

    async def script(_received):
        await admin.execute("UPDATE messages SET status = 'superseded' WHERE seq = 3")
        return ScriptedReply(message={"content": GOOD})

    host.model.script = script
    done = await (await start()).run_now(job())
    assert (done.result, done.summary) == ("stale", None)
    assert await newest(pool) == []


async def test_a_range_that_cannot_be_shortened_is_retried_only_after_a_change(fill, pool, host, start, admin):
    await fill()
    await admin.execute("UPDATE messages SET tokens = 2")
    say(host, GOOD)
    summarizer = await start()
    for result in ("unchanged", "done", "done"):
        assert (await summarizer.run_now(job(last_seq=2))).result == result
    assert await newest(pool) == []
    assert len(await compaction_events(pool)) == 2
    assert not host.model.received, "there is nothing to be gained"
    await admin.execute("UPDATE messages SET status = 'dropped' WHERE seq = 1")
    assert (await summarizer.run_now(job(last_seq=2))).result == "unchanged"


async def test_a_long_summary_of_a_short_range_is_no_fault_of_the_models(fill, host, start, admin):
    await fill()
    await admin.execute("UPDATE messages SET tokens = 30")
    say(host, "- many words " * 20)
    done = await (await start()).run_now(job(last_seq=2))
    assert (done.result, done.error) == ("extractive", "not shorter")
    assert done.tokens_after <= 30
    assert await admin.fetchval("SELECT count(*) FROM breakers WHERE tenant_id = 'north'") == 0


async def test_a_range_without_messages_is_empty(fill, start):
    await fill()
    summarizer = await start()
    assert (await summarizer.run_now(job(first_seq=90, last_seq=99))).result == "empty"
    with pytest.raises(NotFound):
        await summarizer.run_now(job(session_id="nobody"))


# Replicas


async def test_while_another_holds_the_session_nothing_is_done_until_its_lease_runs_out(
    fill, pool, host, start, clock, monkeypatch
):
    monkeypatch.setattr(module, "PATIENCE", 0)
    await fill()
    say(host, GOOD)
    async with pool.transaction("north") as connection:
        until = clock.now + module.LEASE_MARGIN
        assert await leases.take(connection, "north", "s1", "elsewhere", until=until, now=clock.now)
        assert not await leases.take(connection, "north", "s1", "here", until=until, now=clock.now)
    summarizer = await start()
    assert (await summarizer.run_now(job())).result == "held"
    assert not host.model.received
    clock.forward(seconds=31)
    assert (await summarizer.run_now(job())).result == "model"


async def test_two_replicas_that_race_make_one_summary(fill, pool, host, start):
    await fill()
    say(host, GOOD, first_delay=0.2)
    one, other = await start(name="one"), await start(name="other")
    one._monotonic = other._monotonic = asyncio.get_running_loop().time
    done = await asyncio.gather(one.run_now(job()), other.run_now(job()))
    assert sorted(each.result for each in done) == ["done", "model"]
    assert done[0].summary == done[1].summary
    assert len(host.model.received) == 1
    assert len(await newest(pool, limit=9)) == 1


async def test_job_without_its_lease_stores_nothing(fill, pool, host, start, admin):
    await fill()

    async def script(_received):
        await admin.execute("UPDATE leases SET holder = 'elsewhere'")
        return ScriptedReply(message={"content": GOOD})

    host.model.script = script
    assert (await (await start()).run_now(job())).result == "stale"
    assert await newest(pool) == []
    assert await admin.fetchval("SELECT holder FROM leases") == "elsewhere"


async def test_job_without_its_lease_stops_calling_the_model(fill, pool, host, start, admin):
    await fill(turns=40)

    async def script(_received):
        await admin.execute("UPDATE leases SET holder = 'elsewhere'")
        return ScriptedReply(message={"content": GOOD})

    host.model.script = script
    assert (await (await start(window=4_000)).run_now(job(last_seq=80))).result == "stale"
    assert len(host.model.received) == 1
    assert (await compaction_events(pool))[-1].body["result"] == "stale"


async def test_stopping_gives_up_and_gives_back(fill, pool, host, start, admin):
    await fill()
    say(host, GOOD, first_delay=30)
    summarizer = await start()
    summarizer.submit(job())
    async with asyncio.timeout(10):
        while not host.model.received:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(3):
        await summarizer.close()
    assert await admin.fetchval("SELECT count(*) FROM leases") == 0
    assert await newest(pool) == []
    ended = (await compaction_events(pool))[-1]
    assert (ended.body["result"], ended.body["error"]) == ("failed", "CancelledError")
    say(host, GOOD)
    assert (await (await start()).run_now(job())).result == "model"


async def test_the_job_of_a_killed_process_is_taken_over(fill, database, pool, host, start, clock, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0)
    await fill()
    say(host, GOOD, first_delay=60)
    script = Path(__file__).parent / "summarizer_process.py"
    process = subprocess.Popen(
        [sys.executable, str(script), database.dsn, host.base_url],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "."},
    )
    try:
        async with asyncio.timeout(30):
            while not host.model.received:
                await asyncio.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    say(host, GOOD)
    summarizer = await start()
    assert (await summarizer.run_now(job())).result == "held"
    clock.forward(seconds=91)
    assert (await summarizer.run_now(job())).result == "model"
    assert len(await newest(pool, limit=9)) == 1
    assert [event.kind for event in await compaction_events(pool)] == [
        "compaction_start",
        "compaction_start",
        "compaction_end",
    ]


# Tenants, and what is said about it all


async def test_tenants_see_nothing_of_each_other(fill, pool, host, start):
    await fill()
    await fill(tenant="south", word="beta")
    say(host, GOOD)
    summarizer = await start()
    await summarizer.run_now(job())
    assert await newest(pool, tenant="south") == []
    await summarizer.run_now(job(tenant="south"))
    assert "alpha" not in host.model.received[1].request["messages"][1]["content"]
    async with pool.transaction("south") as connection:
        for table in ("summaries", "events", "leases", "breakers", "memory"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table} WHERE tenant_id = 'north'") == 0
        assert await summaries.newest(connection, "north", "s1", ["checkpoint"]) == []


async def test_neither_keys_nor_content_are_logged_or_shown(fill, pool, host, start, monkeypatch, admin):
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    log_as_json("debug")
    try:
        await fill(word="marker77")
        host.model.script = lambda _received: ScriptedReply(status=500, body=b"marker77")
        summarizer = await start(own=False, model=SESSION)
        credentials = (("authorization", "Bearer sk-marker77"),)
        for last in (2, 4, 6, 8):
            summarizer.submit(job(last_seq=last, credentials=credentials))
        await until_done(summarizer)
        monkeypatch.setattr(summarizer._summary_writer, "write", _explode)
        summarizer.submit(job(last_seq=10, credentials=credentials))
        await until_done(summarizer)
    finally:
        root.handlers[:], root.level = before
    assert "a summary was not made: ValueError" in written.getvalue(), "there is something to look at"
    assert "is paused" in written.getvalue()
    assert "marker77" not in written.getvalue()
    assert "marker77" not in json.dumps([event.body for event in await compaction_events(pool)])
    for table in ("summaries", "memory", "leases", "breakers", "events"):
        for row in await admin.fetch(f"SELECT * FROM {table}"):
            assert "sk-marker77" not in repr(row)


async def _explode(*_args, **_values):
    raise ValueError("marker77")
