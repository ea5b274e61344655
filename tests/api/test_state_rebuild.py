"""`POST state/rebuild` and `/context rebuild` without a model: a good state block is never replaced by an extract."""

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
    told = await api.http.post("/api/sessions/s/commands", json={"text": "/context rebuild"})
    assert told.status_code == 409
    assert "TERSELY_SUMMARIZER_MODEL" in told.json()["detail"]
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


async def test_no_goal_no_block(api: Api) -> None:
    await api.append("s", {"role": "user", "content": "<a href='/x_1'></a> 1234567"})
    refused = await rebuild(api)
    assert refused.status_code == 409, refused.text
    assert "TERSELY_SUMMARIZER_MODEL" in refused.json()["detail"]
    assert await state(api) == ""


@pytest.mark.parametrize("is_cleared", [False, True])
async def test_rebuild_without_a_block_extracts_plain_text(api: Api, is_cleared: bool) -> None:
    if is_cleared:
        await api.append("s", {"role": "user", "content": "first"})
        await api.http.put("/api/sessions/s/state", json={"text": GOOD})
        await api.http.post("/api/sessions/s/clear")
    await api.append(
        "s",
        {"role": "user", "content": f"Fix src/parse.py on port 8484 and 10.0.0.7. MAX_DEPTH=12. {MARKUP}"},
        {"role": "assistant", "content": f"I fixed src/parse.py as you said.\n{MARKUP}"},
    )
    made = await rebuild(api)
    assert made.status_code == 200, made.text
    lines = dict(line.split(":", 1) for line in made.json()["text"].splitlines() if ":" in line)
    assert "Fix src/parse.py" in lines["Goal"]
    assert "src/parse.py" in lines["Context"]
    anchors = lines["Technical Anchors"]
    assert [each.strip() for each in anchors.split(";")] == ["port 8484", "10.0.0.7", "MAX_DEPTH=12"]
    for noise in ("123456", "4711", "20240501", "99999", "grid-col", "a-b-c", "x_y_1", "span", "nbsp", "8217"):
        assert noise not in lines["Context"] + anchors, noise
