"""Compacting and rebuilding the state at somebody's word."""

from __future__ import annotations

import pytest

from app.domain.errors import NotFound
from app.service.compactions import Compactions, Means
from app.store import states
from app.upstream.scripted import ScriptedReply

MEANS = Means(strategy="compact")
STATE = "### STATE\nGoal: alpha\nContext: src/alpha_1.py\nResolved: none\nTechnical Anchors: 8484"


def say(host, text):
    host.model.script = lambda _received: ScriptedReply(message={"content": text})


@pytest.fixture
async def compactions(pool, start, clock):
    return Compactions(pool, await start(), clock=clock)


async def test_everything_before_the_last_turn_becomes_a_checkpoint_and_the_next_context_an_epoch(
    fill, compactions, host, admin
):
    await fill(turns=4)
    say(host, "## Goals\n- alpha")
    done = await compactions.compact("north", "s1", MEANS)
    assert done.result == "model"
    assert (done.summary.first_seq, done.summary.last_seq) == (1, 6)
    assert await admin.fetchval("SELECT edited FROM sessions")
    assert (await compactions.compact("north", "s1", MEANS)).result == "done"
    assert len(host.model.received) == 1
    assert (await compactions.compact("north", "s1", MEANS, last_seq=8)).summary.last_seq == 8


async def test_the_last_turn_is_that_which_is_left(fill, compactions, host, admin):
    await fill(turns=4)
    say(host, "## Goals\n- alpha")
    await admin.execute("UPDATE messages SET status = 'undone' WHERE turn = 4")
    assert (await compactions.compact("north", "s1", MEANS)).summary.last_seq == 4


async def test_a_single_turn_is_left_alone(fill, compactions, host):
    await fill(turns=1)
    assert (await compactions.compact("north", "s1", MEANS)).result == "empty"
    assert not host.model.received


async def test_the_state_is_made_anew_from_the_window(fill, compactions, pool, host, admin):
    await fill(turns=4)
    await admin.execute("UPDATE sessions SET cut = 3")
    say(host, f"<think>hm</think>{STATE}")
    made = await compactions.rebuild_state("north", "s1", MEANS)
    assert made is not None
    assert made.source == "rebuilt"
    assert made.text == STATE.removeprefix("### STATE\n")
    asked = host.model.received[0].request["messages"][1]["content"]
    assert "alpha user 1" not in asked
    assert "alpha user 2" in asked
    say(host, STATE.replace("alpha", "beta"))
    await compactions.rebuild_state("north", "s1", MEANS)
    assert "Goal: alpha" in host.model.received[1].request["messages"][1]["content"], "the state so far"
    async with pool.transaction("north") as connection:
        state = await states.newest(connection, "north", "s1")
    assert state is not None
    assert state.text.startswith("Goal: beta")


async def test_without_a_model_the_state_is_made_all_the_same(fill, pool, start, clock, admin):
    await fill(turns=2)
    await admin.execute("UPDATE messages SET tokens = 3")
    made = await Compactions(pool, await start(model=None), clock=clock).rebuild_state("north", "s1", MEANS)
    assert made is not None
    assert made.text.startswith("Goal: alpha user 2")


async def test_the_model_is_that_of_the_last_call(fill, pool, start, host, clock, admin):
    await fill(turns=2)
    await admin.execute(
        "INSERT INTO calls (tenant_id, session_id, number, turn, model, strategy, epoch, cut, last_seq, tokens_before, "
        "tokens_after, created_at) VALUES ('north', 's1', 1, 1, 'theirs', 'slim', 0, 1, 1, 1, 1, now())"
    )
    say(host, STATE)
    await Compactions(pool, await start(model="session"), clock=clock).rebuild_state("north", "s1", MEANS)
    assert host.model.received[0].request["model"] == "theirs"


async def test_other_peoples_sessions_are_not_there(fill, compactions):
    await fill()
    for verb in (compactions.compact, compactions.rebuild_state):
        with pytest.raises(NotFound):
            await verb("south", "s1", MEANS)
