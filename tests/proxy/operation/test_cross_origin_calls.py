"""Calls by web pages: which page may read the answer is said by `TERSELY_CORS_ORIGINS` alone."""

from __future__ import annotations

import httpx
import pytest

from tersely.fakellm.scripted import ScriptedReply
from tests.conftest import Database
from tests.support.http import body_of
from tests.support.services import serve
from tests.support.tenants import Tenant
from tests.support.upstreams import Model

ORIGIN = "https://app.example.com"
# As Ollama and others answer.
PATH = "/v1/chat/completions"
OPEN = {"access-control-allow-origin": "*", "access-control-allow-credentials": "true"}


@pytest.mark.parametrize("stream", [False, True])
async def test_streams_and_errors_can_be_read_by_configured_pages_alone(
    store: Database, model: Model, ours: Tenant, key: str, stream: bool
):
    body = body_of("hello", user=key, stream=stream)
    with serve(store, model.url, auth="keys", cors_origins=ORIGIN, max_body=2048) as service:
        async with httpx.AsyncClient(base_url=service.url, timeout=20) as http:
            for origin in (ORIGIN, "https://evil.example"):
                headers = {"origin": origin, "content-type": "application/json", "x-tersely-key": ours.key}
                model.script(key, ScriptedReply(headers=OPEN), ScriptedReply(status=500, body=b"{}", headers=OPEN))
                answers = [await http.post(PATH, content=body, headers=headers) for _ in range(2)]
                answers.append(await http.post(PATH, content=b" " * 3000, headers=headers))
                answers.append(await http.post(PATH, content=b"{", headers=headers))
                answers.append(await http.post(PATH, content=body, headers={**headers, "x-tersely-key": "tsk_no"}))
                answers.append(await http.get("/api/sessions/none", headers=headers))
                assert [answer.status_code for answer in answers] == [200, 500, 413, 400, 401, 404]
                allowed = {answer.headers.get("access-control-allow-origin") for answer in answers}
                assert allowed == {origin if origin == ORIGIN else None}
                assert not [answer for answer in answers if "access-control-allow-credentials" in answer.headers]
                readable = answers[0].headers.get("access-control-expose-headers", "")
                assert origin != ORIGIN or "X-Tersely-Session" in readable
