"""Hands on single messages: pinned, marked important; and the context as text for people."""

from __future__ import annotations

import json

import pytest

from tests.api.conftest import Api, NewKey
from tests.support.chat_messages import assistant, user


async def context(api: Api, session: str = "s", **options: object):
    answer = await api.http.post(f"/api/sessions/{session}/context", json=options)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def long_session(api: Api, strategy: object) -> None:
    """A session of ten turns that has been cut, so that its first messages are in no context."""
    await api.http.post("/api/sessions", json={"id": "s", "strategy": strategy, "epoch": {"high": 3_000, "low": 1_200}})
    made = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ports"}'}}
    await api.append(
        "s",
        user("t1 The first rule: never touch port 8484."),
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "port table of old"},
        assistant("Understood."),
    )
    for number in range(2, 11):
        await api.append("s", user(f"t{number} " + "filler words " * 180), assistant(f"done {number}"))


async def test_a_pinned_message_comes_back_and_stays(api: Api) -> None:
    await long_session(api, "slim")
    before = await context(api)
    assert before["report"]["epoch"]["cut"] > 4
    assert "never touch port" not in json.dumps(before["messages"])
    version = (await api.http.get("/api/sessions/s")).json()["updated_at"]
    pinned = await api.http.post("/api/sessions/s/messages/3/pin")
    assert pinned.status_code == 200
    assert (pinned.json()["seq"], pinned.json()["pinned"], pinned.json()["priority"]) == (3, True, 50)
    assert (await api.http.get("/api/sessions/s")).json()["updated_at"] > version
    after = await context(api)
    # The result, with the call that it answers, and nothing else of that turn.
    text = json.dumps(after["messages"])
    assert "port table of old" in text
    assert '"c1"' in text
    assert assistant("Understood.") not in after["messages"]
    assert after["report"]["epoch"]["number"] == before["report"]["epoch"]["number"] + 1
    await api.append("s", user("t11 " + "more filler " * 400), assistant("done"))
    assert "port table of old" in json.dumps((await context(api))["messages"])
    assert (await api.http.delete("/api/sessions/s/messages/3/pin")).json()["pinned"] is False
    assert "port table of old" not in json.dumps((await context(api))["messages"])


@pytest.mark.parametrize("way", ["drop", "hide"])
@pytest.mark.parametrize("strategy", ["slim", "window", "trim", "compact", "tiered"])
async def test_a_pin_shows_no_hidden_message(api: Api, strategy: str, way: str) -> None:
    limits = {"trim": {"max_context_turns": 4}, "compact": {"max_tokens": 3_000}, "tiered": {"total_budget": 3_000}}
    await long_session(api, {"name": strategy, **limits.get(strategy, {})})
    assert (await context(api))["report"]["epoch"]["cut"] > 4
    if way == "drop":
        assert (await api.http.post("/api/sessions/s/turns/t1/drop")).status_code == 200
    else:
        assert (await api.http.patch("/api/sessions/s/messages/1", json={"model_visible": False})).status_code == 200
    assert (await api.http.post("/api/sessions/s/messages/1/pin")).json()["pinned"] is True
    await api.append("s", user("and now?"))
    assert "never touch port" not in json.dumps((await context(api))["messages"])
    if way == "hide":
        assert (await api.http.patch("/api/sessions/s/messages/1", json={"model_visible": True})).status_code == 200
        assert "t1 The first rule: never touch port 8484." in json.dumps((await context(api))["messages"])


async def test_priorities_are_set_and_listed(api: Api) -> None:
    await long_session(api, "slim")
    assert (await api.http.get("/api/sessions/s/messages?limit=1")).json()["items"][0]["priority"] == 50
    marked = await api.http.put("/api/sessions/s/messages/5/priority", json={"priority": 90})
    assert marked.json()["priority"] == 90
    assert (await context(api))["report"]["epoch"]["reason"] == "edit"
    for wrong in (-1, 101, "high", None):
        assert (await api.http.put("/api/sessions/s/messages/5/priority", json={"priority": wrong})).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/api/sessions/s/messages/99/pin", 404),
        ("POST", "/api/sessions/none/messages/1/pin", 404),
        ("DELETE", "/api/sessions/s/messages/0/pin", 422),
        ("POST", "/api/sessions/s/messages/first/pin", 422),
    ],
)
async def test_an_unknown_message_cannot_be_pinned(api: Api, method: str, path: str, status: int) -> None:
    await api.append("s", user("hi"))
    assert (await api.http.request(method, path)).status_code == status


async def test_a_removed_message_has_no_marks(api: Api) -> None:
    await api.append("s", user("hi"), assistant("ho"))
    await api.http.delete("/api/sessions/s/turns/t1")
    assert (await api.http.post("/api/sessions/s/messages/1/pin")).status_code == 409
    assert (await api.http.put("/api/sessions/s/messages/1/priority", json={"priority": 90})).status_code == 409


async def test_another_tenants_messages_cannot_be_pinned(guarded: Api, new_tenant: NewKey) -> None:
    north, south = await new_tenant("north"), await new_tenant("south")
    await guarded.append("s", user("hi"), **north)
    path = "/api/sessions/s/messages/1"
    assert (await guarded.http.post(f"{path}/pin", headers=south)).status_code == 404
    assert (await guarded.http.delete(f"{path}/pin", headers=south)).status_code == 404
    assert (await guarded.http.put(f"{path}/priority", json={"priority": 9}, headers=south)).status_code == 404


@pytest.mark.parametrize("headers", [{}, {"accept": "text/plain"}])
async def test_the_context_as_text(api: Api, headers: dict[str, str]) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "ports"}'}}
    await api.append(
        "s",
        {"role": "system", "content": "Be brief."},
        user("Which ports?"),
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "8484"},
    )
    body = {"strategy": "full"} if headers else {"strategy": "full", "format": "text"}
    answer = await api.http.post("/api/sessions/s/context", json=body, headers=headers)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    title, _, rest = answer.text.partition("\n\n")
    assert title.startswith("strategy full, epoch 1 (")
    assert rest == (
        "--- system ---\nBe brief.\n\n--- user ---\nWhich ports?\n\n"
        '--- assistant ---\n[call c1] look {"at": "ports"}\n\n--- tool ---\n[result of c1] 8484\n'
    )
