"""State blocks: taken out of replies, kept with them, given back at the start of an epoch."""

from __future__ import annotations

import json

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.chat_messages import user
from tests.support.dialect_wires import WIRES
from tests.support.http import body_of, post
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.upstreams import Model

STATES = "SELECT seq, source, convert_from(text, 'UTF8') AS text FROM states WHERE session_id = $1 ORDER BY seq"
WINDOW = {"X_Tersely_Strategy": "window", "X_Tersely_Epoch": "every_request"}


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
    rows = await query(service, STATES, key)
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


async def test_incomplete_state_block_is_ignored(service: Service, model: Model) -> None:
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
    assert [row["text"] for row in await query(service, STATES, key)] == ["Goal: whole"]


async def test_a_block_for_another_strategy_is_text(service: Service, model: Model) -> None:
    text = "First.\n\n### STATE\nGoal: one"
    key = model.script("state-slim", says(text))
    answered = await post(service, body_of(user(key), user=key), X_Tersely_Session=key)
    assert answered.json["choices"][0]["message"]["content"] == text
    assert await query(service, STATES, key) == []


BLOCKS = ["First.\n\n### STATE\nGoal: one", "Second.", "Third.\n\n### STATE\nGoal: two\n\n# Notes\nNo state."]


async def spoken(service: Service, model: Model, key: str, strategy: str) -> list[dict[str, str]]:
    """A conversation in whose replies states stand as text."""
    history: list[dict[str, str]] = []
    for text in BLOCKS:
        model.script(key, says(text))
        history.append(user(f"{key} go on"))
        answered = await post(service, body_of(*history, user=key), X_Tersely_Session=key, X_Tersely_Strategy=strategy)
        assert answered.json["choices"][0]["message"]["content"] == text
        history.append({"role": "assistant", "content": text})
    assert await query(service, STATES, key) == []
    return history


def taken(service: Service, session: str) -> list[str]:
    url = f"{service.url}/api/sessions/{session}/state"
    assert httpx.get(url).json()["text"] == "Goal: two"
    items = httpx.get(f"{url}/history").json()["items"]
    assert {item["source"] for item in items} == {"model"}
    return [item["text"] for item in items]


@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("strategy", ["full", "slim", "trim"])
async def test_states_from_before_a_session_became_one_of_window_are_taken(
    service: Service, model: Model, key: str, strategy: str, is_delta: bool
) -> None:
    history = await spoken(service, model, key, strategy)
    request_messages = [user("What next?")] if is_delta else [*history, user("What next?")]
    model.script(key, says("Fourth."))
    narrow = '{"name": "window", "context_size": 1}'
    headers = {**WINDOW, "X_Tersely_Strategy": narrow}
    await post(service, body_of(*request_messages, user=key), X_Tersely_Session=key, **headers)
    sent = [str(message["content"]) for message in (model.requests(key)[-1].request or {})["messages"]]
    assert any("Context -- State" in text and "Goal: two" in text and "No state." not in text for text in sent)
    assert taken(service, key) == ["Goal: one", "Goal: two"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", WIRES)
async def test_states_from_before_window_are_taken_in_every_dialect(
    service: Service, model: Model, key: str, dialect: str, stream: bool
) -> None:
    wire = WIRES[dialect]
    history = [message for text in BLOCKS for message in (("user", f"{key} go on"), ("assistant", text))]
    before = await wire.send(service, [*history, ("user", "And?")], X_Tersely_Session=key, X_Tersely_Strategy="full")
    assert before.status == 200, before.body
    assert await query(service, STATES, key) == []
    after = await wire.send(service, "What next?", stream=stream, X_Tersely_Session=key, **WINDOW)
    assert after.status == 200, after.body
    assert b"Goal: two" in model.last.body
    assert taken(service, key) == ["Goal: one", "Goal: two"]


async def test_states_are_taken_when_the_operator_sets_window(
    service: Service, store: Database, model: Model, key: str
) -> None:
    await spoken(service, model, key, "slim")
    with serve(store, model.url, strategy="window", epoch="every_request") as restarted:
        model.script(key, says("Fourth."))
        answered = await post(restarted, body_of(user("What next?"), user=key), X_Tersely_Session=key)
        assert answered.status == 200, answered.body
        assert "Goal: two" in str((model.requests(key)[-1].request or {})["messages"])
        assert taken(restarted, key) == ["Goal: one", "Goal: two"]


async def test_states_are_taken_when_the_owner_sets_window(service: Service, model: Model, key: str) -> None:
    await spoken(service, model, key, "slim")
    httpx.patch(f"{service.url}/api/sessions/{key}", json={"strategy": "window"}).raise_for_status()
    assert taken(service, key) == ["Goal: one", "Goal: two"]
    built = httpx.post(f"{service.url}/api/sessions/{key}/context", json={"epoch": "every_request"}).json()
    assert any("Goal: two" in str(message["content"]) for message in built["messages"][:2])


async def test_states_of_a_history_that_a_first_call_brings_are_taken(service: Service, model: Model, key: str) -> None:
    history = [message for text in BLOCKS for message in (user("go on"), {"role": "assistant", "content": text})]
    model.script(key, says("Fourth."))
    await post(service, body_of(*history, user("next"), user=key), X_Tersely_Session=key, **WINDOW)
    assert taken(service, key) == ["Goal: one", "Goal: two"]


async def test_a_state_that_was_set_later_is_not_replaced_by_one_that_is_taken(
    service: Service, model: Model, key: str
) -> None:
    await spoken(service, model, key, "slim")
    url = f"{service.url}/api/sessions/{key}"
    httpx.post(f"{url}/messages", json={"messages": [user("more"), says("Fine.").message]}).raise_for_status()
    httpx.put(f"{url}/state", json={"text": "Goal: mine"}).raise_for_status()
    httpx.patch(url, json={"strategy": "window"}).raise_for_status()
    assert httpx.get(f"{url}/state").json()["text"] == "Goal: mine"
    model.script(key, says("Fifth."))
    await post(service, body_of(user("again"), user=key), X_Tersely_Session=key, **WINDOW)
    assert "Goal: mine" in json.dumps(model.requests(key)[-1].request)
