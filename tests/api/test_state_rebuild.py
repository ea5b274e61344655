"""`POST state/rebuild` and `/context rebuild` without a model: an extract is never stored as a state block."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Api, serve
from tests.conftest import Database

GOOD = (
    "Goal: Ship the parser\nContext: src/parse.py\nResolved: the lexer is done\nTechnical Anchors: port 8484, 10.0.0.7"
)
MARKUP = (
    '<div class="grid-col-main" id="x_y_1"><span data-test-id="a-b-c">took 123456 ms</span></div>\n'
    "# 4711 items\n| 20240501 | 99999 |\n&nbsp;&#8217;"
)


COMMANDS = "/api/sessions/s/commands"


async def rebuild(api: Api, session: str = "s") -> Any:
    return await api.http.post(f"/api/sessions/{session}/state/rebuild")


async def state(api: Api) -> str:
    return str((await api.http.get("/api/sessions/s/state")).json()["text"])


async def test_a_good_state_block_is_kept_and_the_answer_names_the_way_out(api: Api) -> None:
    await api.append("s", {"role": "user", "content": f"What is this? {MARKUP}"}, {"role": "assistant", "content": "?"})
    assert (await api.http.put("/api/sessions/s/state", json={"text": GOOD})).status_code == 200
    before = await state(api)
    refused = await rebuild(api)
    assert refused.status_code == 409, refused.text
    assert "TERSELY_SUMMARIZER_MODEL" in refused.json()["detail"]
    assert "/state" in refused.json()["detail"]
    answer = await api.http.post("/api/sessions/s/commands", json={"text": "/context rebuild"})
    assert answer.status_code == 409
    assert "TERSELY_SUMMARIZER_MODEL" in answer.json()["detail"]
    assert await state(api) == before


async def test_failed_rebuild_keeps_the_state_block(database: Database) -> None:
    settings: dict[str, Any] = {
        "summarizer_model": "m",
        "summarizer_base_url": "http://127.0.0.1:9/v1",
        "summarizer_api_key": "k",
    }
    async with serve(database.dsn, **settings) as api:
        await api.append("s", {"role": "user", "content": "Fix it"}, {"role": "assistant", "content": "Fixed."})
        await api.http.put("/api/sessions/s/state", json={"text": GOOD})
        before = await state(api)
        refused = await rebuild(api)
        assert refused.status_code == 409, refused.text
        assert "the host cannot be reached" in refused.json()["detail"]
        assert await state(api) == before


@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("has_model", [False, True])
async def test_rebuild_without_a_model_writes_no_first_block(
    database: Database, *, is_cleared: bool, has_model: bool
) -> None:
    """``has_model``: one that fails."""
    model = {"summarizer_model": "m", "summarizer_base_url": "http://127.0.0.1:9/v1", "summarizer_api_key": "k"}
    settings: dict[str, Any] = model if has_model else {}
    async with serve(database.dsn, **settings) as api:
        if is_cleared:
            await api.append("s", {"role": "user", "content": "first"})
            await api.http.put("/api/sessions/s/state", json={"text": GOOD})
            await api.http.post("/api/sessions/s/clear")
        question = {"role": "user", "content": f"Fix src/parse.py on port 8484. {MARKUP}"}
        await api.append("s", question, {"role": "assistant", "content": f"I fixed src/parse.py.\n{MARKUP}"})
        for refused in (await rebuild(api), await api.http.post(COMMANDS, json={"text": "/context rebuild"})):
            assert refused.status_code == 409, refused.text
            assert "was not written" in refused.json()["detail"]
            way_out = "try again later" if has_model else "TERSELY_SUMMARIZER_MODEL"
            assert way_out in refused.json()["detail"]
        assert await state(api) == ""
