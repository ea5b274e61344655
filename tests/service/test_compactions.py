"""Compacting and rebuilding the state at somebody's word."""

from __future__ import annotations

import pytest

from tersely.domain.errors import Conflict, NotFound
from tersely.fakellm.scripted import ScriptedReply
from tersely.service.common.calibrations import Calibrations
from tersely.service.common.metrics import Metrics
from tersely.service.context.context_configs import ContextConfigs
from tersely.service.context.retrieval import Retriever
from tersely.service.search.session_search import Searcher
from tersely.service.sessions.compactions import CompactionOptions, Compactions
from tersely.service.sessions.epochs import EpochStarter
from tersely.service.summaries.memory_updates import MemoryUpdates
from tersely.service.summaries.prefetcher import SummaryPrefetcher
from tersely.store.history import sessions
from tersely.store.notes import states

MEANS = CompactionOptions()
STATE = "### STATE\nGoal: alpha\nContext: src/alpha_1.py\nResolved: none\nTechnical Anchors: 8484"


def say(host, text):
    host.model.script = lambda _received: ScriptedReply(message={"content": text})


def compactions_with(pool, summarizer, clock, strategy="compact"):
    configs = ContextConfigs(strategy=strategy, epoch="auto", references=None, instructions=True, derive_terse=True)
    metrics = Metrics()
    epoch_starter = EpochStarter(
        pool,
        configs,
        Calibrations(),
        Retriever(pool, Searcher(pool, metrics)),
        SummaryPrefetcher(summarizer),
        metrics,
        clock=clock,
    )
    return Compactions(
        pool, configs, summarizer, epoch_starter, MemoryUpdates(pool, summarizer, clock=clock), clock=clock
    )


@pytest.fixture
async def compactions(pool, start, clock):
    return compactions_with(pool, await start(), clock)


async def test_everything_before_the_last_turn_becomes_a_checkpoint_and_an_epoch_starts(fill, compactions, host, admin):
    await fill(turns=4)
    say(host, "## Goals\n- alpha")
    done = await compactions.compact("north", "s1", MEANS)
    assert done.summary.result == "model"
    assert (done.summary.summary.first_seq, done.summary.summary.last_seq) == (1, 6)
    assert done.report.reason == "compact"
    assert await admin.fetchval("SELECT epoch FROM sessions") == done.report.epoch
    again = await compactions.compact("north", "s1", MEANS)
    assert again.summary.result == "done"
    assert again.summary.tokens_before == done.summary.tokens_before > 0
    assert again.summary.tokens_after == done.summary.tokens_after > 0
    assert again.report.tokens_before == done.report.tokens_before > 0
    assert len(host.model.received) == 1


async def test_a_failed_compaction_saves_nothing(fill, compactions, admin):
    await fill(turns=2)
    await admin.execute("UPDATE messages SET tokens = 2")
    for result in ("unchanged", "done"):
        summary = (await compactions.compact("north", "s1", MEANS)).summary
        assert (summary.result, summary.tokens_before, summary.tokens_after) == (result, 4, 4)


async def test_the_last_turn_is_that_which_is_left(fill, compactions, host, admin):
    await fill(turns=4)
    say(host, "## Goals\n- alpha")
    await admin.execute("UPDATE messages SET status = 'undone' WHERE turn = 4")
    assert (await compactions.compact("north", "s1", MEANS)).summary.summary.last_seq == 4


async def test_a_single_turn_is_not_summarised(fill, compactions, host):
    await fill(turns=1)
    done = await compactions.compact("north", "s1", MEANS)
    assert done.summary is None
    assert not host.model.received


async def test_a_strategy_without_summaries_is_cut_all_the_same(fill, pool, start, clock, host):
    await fill(turns=4)
    done = await compactions_with(pool, await start(), clock, "slim").compact("north", "s1", MEANS)
    assert done.summary is None
    assert done.report.reason == "compact"
    assert not host.model.received


async def test_cleared_context_is_empty_and_has_no_state(fill, compactions, pool, admin):
    await fill(turns=4)
    report = await compactions.clear("north", "s1", MEANS)
    assert (report.reason, report.cut, report.tokens_after) == ("clear", 9, 0)
    async with pool.transaction("north") as connection:
        session = await sessions.get(connection, "north", "s1")
        assert session is not None
        assert session.cleared_at == 9
        state = await states.newest(connection, "north", "s1")
    assert state is not None
    assert state.text == ""
    assert await admin.fetchval("SELECT count(*) FROM messages WHERE status = 'live'") == 8


async def test_state_is_rebuilt_from_the_window(fill, compactions, pool, host, admin):
    await fill(turns=4)
    await admin.execute("UPDATE sessions SET cut = 3")
    say(host, f"<think>hm</think>{STATE}")
    made = await compactions.rebuild_state("north", "s1", MEANS)
    assert made is not None
    assert made.source == "rebuilt"
    assert made.text == STATE.removeprefix("### STATE\n")
    question = host.model.received[0].request["messages"][1]["content"]
    assert "alpha user 1" not in question
    assert "alpha user 2" in question
    say(host, STATE.replace("alpha", "beta"))
    await compactions.rebuild_state("north", "s1", MEANS)
    assert "Goal: alpha" in host.model.received[1].request["messages"][1]["content"], "the state so far"
    async with pool.transaction("north") as connection:
        state = await states.newest(connection, "north", "s1")
    assert state is not None
    assert state.text.startswith("Goal: beta")


async def test_without_a_model_no_state_is_made(fill, pool, start, clock, admin):
    await fill(turns=2)
    await admin.execute("UPDATE messages SET tokens = 3")
    with pytest.raises(Conflict, match="TERSELY_SUMMARIZER_MODEL"):
        await compactions_with(pool, await start(model=None), clock).rebuild_state("north", "s1", MEANS)
    assert await admin.fetchval("SELECT count(*) FROM states") == 0


async def test_the_model_is_that_of_the_last_call(fill, pool, start, host, clock, admin):
    await fill(turns=2)
    await admin.execute(
        "INSERT INTO calls (tenant_id, session_id, number, turn, model, strategy, epoch, cut, last_seq, tokens_before, "
        "tokens_after, created_at) VALUES ('north', 's1', 1, 1, 'theirs', 'slim', 0, 1, 1, 1, 1, now())"
    )
    say(host, STATE)
    await compactions_with(pool, await start(model="session"), clock).rebuild_state("north", "s1", MEANS)
    assert host.model.received[0].request["model"] == "theirs"


async def test_other_peoples_sessions_are_not_there(fill, compactions):
    await fill()
    for verb in (compactions.compact, compactions.rebuild_state):
        with pytest.raises(NotFound):
            await verb("south", "s1", MEANS)
    with pytest.raises(NotFound):
        await compactions.clear("south", "s1", MEANS)
