"""Chat commands over REST: what they answer and what they change."""

from __future__ import annotations

import pytest

from tests.api.conftest import Api, NewKey


async def run_command(api: Api, text: str) -> str:
    answer = await api.http.post("/api/sessions/s/commands", json={"text": text})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


@pytest.fixture
async def talk(api: Api) -> Api:
    for number in range(1, 4):
        await api.append(
            "s",
            {"role": "user", "content": f"Question {number} about the palette"},
            {"role": "assistant", "content": f"Answer {number}."},
        )
    return api


async def test_commands_that_show(talk: Api) -> None:
    assert (await run_command(talk, "/context")).startswith("6 messages: 3 user, 3 assistant\n111 characters\n")
    shown = await run_command(talk, "/context show")
    assert "--- user ---\nQuestion 1 about the palette\n" in shown
    listed = (await run_command(talk, "/messages list 2")).splitlines()
    assert [line.split(" ")[0] for line in listed] == ["t2", "t3"]
    assert "2 messages" in listed[0]
    assert listed[0].endswith("Question 2 about the palette")
    whole = await run_command(talk, "/message show t2")
    assert "--- assistant ---\nAnswer 2." in whole
    assert "Question 3" not in whole
    assert await run_command(talk, "/session scratchpad") == "The scratchpad is empty."
    assert (await run_command(talk, "/help")).startswith("/context ")


async def test_the_scratchpad_is_written_to(talk: Api) -> None:
    assert (
        await run_command(talk, "/session scratchpad - [ ] test it") == "Added. The scratchpad is now:\n- [ ] test it"
    )
    assert await run_command(talk, "/session scratchpad ship") == "Added. The scratchpad is now:\n- [ ] test it\nship"
    assert await run_command(talk, "/session scratchpad") == "- [ ] test it\nship"


async def test_commands_that_undo(talk: Api) -> None:
    assert await run_command(talk, "/undo") == "t3 was taken back."
    assert await run_command(talk, "/context drop t1") == "t1 is hidden from every context."
    assert (await run_command(talk, "/context")).startswith("2 messages: 1 user, 1 assistant")
    assert [line.split(" · ")[0] for line in (await run_command(talk, "/message list")).splitlines()] == [
        "t1 (dropped)",
        "t2",
        "t3 (undone)",
    ]
    assert await run_command(talk, "/message remove 2") == "t2 was removed for good."
    assert (await run_command(talk, "/context")).startswith("0 messages: none\n")
    for text, status in (("/undo", 409), ("/message show 2", 404), ("/message show 9", 404), ("/context foo", 422)):
        assert (await talk.http.post("/api/sessions/s/commands", json={"text": text})).status_code == status


async def test_commands_that_pin(talk: Api) -> None:
    shown = await run_command(talk, "/message show t1")
    assert "message 1\n--- user ---\nQuestion 1" in shown
    assert await run_command(talk, "/message pin 1") == "Message 1 stays in every context."
    assert await run_command(talk, "/message important 2") == "Message 2 has priority 75."
    assert await run_command(talk, "/message important 1 90") == "Message 1 has priority 90."
    shown = await run_command(talk, "/message show t1")
    assert "message 1 (pinned, priority 90)\n--- user ---" in shown
    assert "message 2 (priority 75)\n--- assistant ---" in shown
    assert await run_command(talk, "/context clear")
    assert "Question 1" in await run_command(talk, "/context show")
    assert await run_command(talk, "/message unpin 1") == "Message 1 is no longer pinned."
    assert await run_command(talk, "/message important 1 50") == "Message 1 has priority 50."
    assert "message 1\n--- user ---" in await run_command(talk, "/message show t1")
    for text, status in (("/message pin 99", 404), ("/message important 99", 404), ("/message pin x", 422)):
        assert (await talk.http.post("/api/sessions/s/commands", json={"text": text})).status_code == status


async def test_clear_and_rebuild(talk: Api) -> None:
    refused = await talk.http.post("/api/sessions/s/commands", json={"text": "/context rebuild"})
    assert refused.status_code == 409
    assert "TERSELY_SUMMARIZER_MODEL" in refused.json()["detail"]
    assert (await run_command(talk, "/context clear")).startswith("The context is empty now")
    assert (await run_command(talk, "/context")).startswith("1 messages: 1 system")
    assert "Question 1" in (await talk.http.post("/api/sessions/s/search", json={"mode": "head"})).json()["text"]


async def test_commands_that_configure(talk: Api) -> None:
    assert await run_command(talk, "/config") == "strategy: slim\nepoch: auto"
    assert '"recent_turns": 5' in await run_command(talk, "/context window 5")
    assert await run_command(talk, "/config strategy trim") == "strategy: trim\nepoch: auto"
    assert '"max_context_tokens": 80000' in await run_command(talk, "/config agent_max_context_tokens 80000")
    assert '"max_context_turns": 30' in await run_command(talk, "/context window 30")
    assert "epoch: every_request" in await run_command(talk, "/config epoch every_request")
    session = (await talk.http.get("/api/sessions/s")).json()
    assert session["strategy"] == {"name": "trim", "max_context_tokens": 80_000, "max_context_turns": 30}
    for text in ("/config agent_max_context_tokens lots", "/config colour red", "/config strategy none"):
        assert (await talk.http.post("/api/sessions/s/commands", json={"text": text})).status_code == 422
    refused = await talk.http.post("/api/sessions/s/commands", json={"text": "/config recent_turns 5"})
    assert refused.json()["detail"].startswith("recent_turns is a parameter of slim; this session's strategy is trim.")
    refused = await talk.http.post("/api/sessions/s/commands", json={"text": "/config colour red"})
    assert "max_context_tokens" in refused.json()["detail"]
    await run_command(talk, "/config strategy full")
    refused = await talk.http.post("/api/sessions/s/commands", json={"text": "/context window 3"})
    assert "/config strategy window" in refused.json()["detail"]


async def test_commands_on_another_tenants_session_are_404(guarded: Api, new_tenant: NewKey) -> None:
    north, south = await new_tenant("north"), await new_tenant("south")
    await guarded.append("s", {"role": "user", "content": "hi"}, **north)
    for text in ("/context", "/context show", "/undo", "/message list", "/message show 1", "/config", "/context clear"):
        answer = await guarded.http.post("/api/sessions/s/commands", json={"text": text}, headers=south)
        assert answer.status_code == 404, text
    assert (await guarded.http.post("/api/sessions/s/commands", json={"text": "/undo"})).status_code == 401
    words = await guarded.http.post("/api/sessions/s/commands", json={"text": "hello"}, headers=north)
    assert words.status_code == 422
