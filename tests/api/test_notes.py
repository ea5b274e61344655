"""State block and scratchpad over REST."""

from __future__ import annotations

import pytest

from tersely.domain.text.state import MAX_BLOCK
from tersely.service.sessions.notes import MAX_SCRATCHPAD
from tests.api.conftest import Api

USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}


async def put(api: Api, what: str, text: str):
    return await api.http.put(f"/api/sessions/s/{what}", json={"text": text})


async def get(api: Api, what: str):
    return (await api.http.get(f"/api/sessions/s/{what}")).json()


async def test_a_state_counts_from_the_last_message_on(api: Api) -> None:
    await api.append("s", USER, REPLY)
    assert await get(api, "state") == {"text": "", "seq": 0, "source": None, "created_at": None}
    written = (await put(api, "state", "\n### STATE\nGoal: x\n  - y\n\n")).json()
    assert (written["text"], written["seq"], written["source"]) == ("Goal: x\n  - y", 2, "client")
    assert await get(api, "state") == written
    await api.append("s", USER, REPLY)
    await put(api, "state", "Goal: z")
    assert (await get(api, "state"))["seq"] == 4
    # A state goes with its message: undone, the one before it is the newest again.
    await api.http.post("/api/sessions/s/undo")
    assert await get(api, "state") == written
    await put(api, "state", "Goal: new")
    now = await get(api, "state")
    assert (now["text"], now["seq"]) == ("Goal: new", 2)
    await put(api, "state", "")
    assert (await get(api, "state"))["text"] == ""
    past = await get(api, "state/history")
    assert [(each["seq"], each["text"], each["live"]) for each in past["items"]] == [
        (2, "Goal: x\n  - y", True),
        (2, "Goal: new", True),
        (2, "", True),
        (4, "Goal: z", False),
    ]
    first = await get(api, "state/history?limit=3")
    rest = await get(api, f"state/history?after={first['next']}")
    assert first["items"] + rest["items"] == past["items"]
    assert rest["next"] is None


async def test_a_state_before_the_first_message(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s"})
    await put(api, "state", "Goal: x")
    assert (await get(api, "state"))["seq"] == 0
    await api.append("s", USER, REPLY)
    assert (await get(api, "state"))["text"] == "Goal: x"


async def test_a_removed_turn_takes_its_states_along(api: Api) -> None:
    await api.append("s", USER, REPLY)
    await put(api, "state", "Goal: secret")
    assert (await api.http.delete("/api/sessions/s/turns/t1")).status_code == 204
    assert (await get(api, "state"))["text"] == ""
    assert await get(api, "state/history") == {"items": [], "next": None}


async def test_the_scratchpad_is_read_and_written(api: Api) -> None:
    await api.append("s", USER)
    assert await get(api, "scratchpad") == {"text": "", "updated_at": None}
    for added, text in (("- a", "- a"), ("- b\n", "- a\n- b\n"), ("- c", "- a\n- b\n- c")):
        answer = await api.http.post("/api/sessions/s/scratchpad/append", json={"text": added})
        assert answer.json()["text"] == text
    assert (await get(api, "scratchpad"))["text"] == "- a\n- b\n- c"
    assert (await put(api, "scratchpad", "new \u0000 é")).json()["text"] == "new \u0000 é"
    assert (await get(api, "scratchpad"))["text"] == "new \u0000 é"


@pytest.mark.parametrize(("what", "most"), [("state", MAX_BLOCK), ("scratchpad", MAX_SCRATCHPAD)])
async def test_notes_are_limited_in_size(api: Api, what: str, most: int) -> None:
    await api.append("s", USER)
    assert (await put(api, what, "é" * most)).status_code == 200
    refused = await put(api, what, "x" * (most + 1))
    assert (refused.status_code, refused.json()["field"]) == (413, "text")
    assert refused.headers["content-type"] == "application/problem+json"
    assert (await get(api, what))["text"] == "é" * most
    if what == "scratchpad":
        more = await api.http.post("/api/sessions/s/scratchpad/append", json={"text": "x"})
        assert more.status_code == 413


async def test_bad_notes_are_refused(api: Api) -> None:
    await api.append("s", USER)
    assert (await api.http.put("/api/sessions/s/state", json={"text": 5})).status_code == 422
    assert (await api.http.put("/api/sessions/s/scratchpad", json={})).status_code == 422
    assert (await api.http.get("/api/sessions/s/state/history?after=x")).status_code == 422
    assert (await api.http.get("/api/sessions/none/scratchpad")).status_code == 404
    assert (await api.http.put("/api/sessions/none/state", json={"text": "x"})).status_code == 404


async def test_a_state_written_by_the_client_starts_a_new_epoch(api: Api) -> None:
    await api.append("s", USER, REPLY)
    before = (await api.http.get("/api/sessions/s")).json()["updated_at"]
    await put(api, "scratchpad", "plan")
    assert (await api.http.get("/api/sessions/s")).json()["updated_at"] > before


async def test_the_state_of_an_appended_reply(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": "window"})
    reply = {"role": "assistant", "content": "a\n\n### STATE\nGoal: x"}
    await api.append("s", USER, reply)
    state = await get(api, "state")
    assert (state["text"], state["seq"], state["source"]) == ("Goal: x", 2, "model")
    (_, shown) = (await get(api, "messages"))["items"]
    assert shown["raw"] == REPLY
    (_, both) = (await get(api, "messages?view=all"))["items"]
    assert both["model_raw"] == reply


async def test_notes_are_in_the_context(api: Api) -> None:
    await api.http.post("/api/sessions", json={"id": "s", "strategy": "window", "epoch": "every_request"})
    await api.append("s", USER, {"role": "assistant", "content": "a\n\n### STATE\nGoal: from the model"})
    await put(api, "scratchpad", "- the plan")
    options = {"messages": [USER]}
    sent = (await api.http.post("/api/sessions/s/context", json=options)).text
    assert "Goal: from the model" in sent
    assert "- the plan" in sent
    await put(api, "state", "Goal: from the client")
    sent = (await api.http.post("/api/sessions/s/context", json=options)).text
    assert "Goal: from the client" in sent
