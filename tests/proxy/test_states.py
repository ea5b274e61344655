"""State blocks: taken out of replies, kept with them, given back at the start of an epoch."""

from __future__ import annotations

import json

import pytest

from app.upstream.scripted import ScriptedReply
from tests.proxy.harness import Model, Service, body_of, look, post

STATES = "SELECT seq, source, convert_from(text, 'UTF8') AS text FROM states WHERE session_id = $1 ORDER BY seq"
WINDOW = {"X_Tersely_Strategy": "window", "X_Tersely_Epoch": "every_request"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def says(text: str) -> ScriptedReply:
    return ScriptedReply(message={"role": "assistant", "content": text})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_state_is_kept_with_its_reply_and_given_back(service: Service, model: Model, stream: bool) -> None:
    key = model.script(
        f"state-{stream}",
        says("First.\n\n### STATE\nGoal: one"),
        says("Second.\n\n### STATE\nGoal: two\n"),
        says("Third."),
    )
    history = [user(key)]
    for text in ("First.", "Second.", "Third."):
        answered = await post(service, body_of(*history, user=key, stream=stream), X_Tersely_Session=key, **WINDOW)
        if stream:
            assert b"STATE" not in answered.body
        else:
            assert answered.json["choices"][0]["message"]["content"] == text
        history += [{"role": "assistant", "content": text}, user(f"{key} go on")]
    rows = await look(service, STATES, key)
    assert [(row["seq"], row["source"], row["text"]) for row in rows] == [
        (2, "model", "Goal: one"),
        (4, "model", "Goal: two"),
    ]
    sent = json.dumps(model.last.request)
    assert "End every reply" in sent
    assert "Context -- State" in sent
    assert "Goal: two" in sent


async def test_a_state_whose_reply_was_regenerated_no_longer_counts(service: Service, model: Model) -> None:
    key = model.script(
        "state-again",
        says("First.\n\n### STATE\nGoal: one"),
        says("Wrong.\n\n### STATE\nGoal: wrong"),
        says("Right.\n\n### STATE\nGoal: right"),
        says("Done."),
    )
    history = [user(key), {"role": "assistant", "content": "First."}, user("next")]
    for messages in (history[:1], history, history):
        await post(service, body_of(*messages, user=key), X_Tersely_Session=key, **WINDOW)
    sent = json.dumps(model.requests(key)[-1].request)
    assert "Goal: one" in sent
    assert "Goal: wrong" not in sent
    followed = [*history, {"role": "assistant", "content": "Right."}, user("last")]
    await post(service, body_of(*followed, user=key), X_Tersely_Session=key, **WINDOW)
    sent = json.dumps(model.requests(key)[-1].request)
    assert "Goal: right" in sent
    assert "Goal: wrong" not in sent


async def test_a_state_that_broke_off_is_none(service: Service, model: Model) -> None:
    text = "First.\n\n### STATE\nGoal: half of it"
    key = model.script(
        "state-broken",
        says("Zero.\n\n### STATE\nGoal: whole"),
        ScriptedReply(
            message={"role": "assistant", "content": text},
            pieces=(text[:20], text[20:]),
            break_after=3,
            break_with="error",
        ),
    )
    await post(service, body_of(user("a"), user=key), X_Tersely_Session=key, **WINDOW)
    history = [user("a"), {"role": "assistant", "content": "Zero."}, user("b")]
    answered = await post(service, body_of(*history, user=key, stream=True), X_Tersely_Session=key, **WINDOW)
    assert b"STATE" not in answered.body
    assert [row["text"] for row in await look(service, STATES, key)] == ["Goal: whole"]


async def test_a_block_for_another_strategy_is_text(service: Service, model: Model) -> None:
    text = "First.\n\n### STATE\nGoal: one"
    key = model.script("state-slim", says(text))
    answered = await post(service, body_of(user(key), user=key), X_Tersely_Session=key)
    assert answered.json["choices"][0]["message"]["content"] == text
    assert await look(service, STATES, key) == []
