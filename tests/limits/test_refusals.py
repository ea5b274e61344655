"""Requests over a limit are refused as the provider would refuse them, and told when to come back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from google.genai import errors as genai_errors
from google.genai import types
from google.genai.models import Models

from tersely.fakellm.scripted import ScriptedReply
from tersely.service.limits import limiter
from tests.limits.conftest import NewTenant, admin
from tests.support.http import Answered, body_of
from tests.support.services import Worker
from tests.support.tenants import Tenant
from tests.support.upstreams import MODEL, Model


async def use_up(worker: Worker, tenant: Tenant) -> Answered:
    """Call until a call is refused."""
    for _ in range(20):
        answer = await worker.post(body_of("hello"), X_Tersely_Key=tenant.key)
        if answer.status != 200:
            return answer
    raise AssertionError("nothing was refused")


async def test_refusals_carry_the_callers_request_id(worker: Worker, new_tenant: NewTenant) -> None:
    north = await new_tenant(requests_per_minute=1)
    await use_up(worker, north)
    headers = {"X-Tersely-Key": north.key, "X-Request-Id": "mine-429"}
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent"):
        async with worker.http.post(f"{worker.base_url}{path}", data=body_of("hello"), headers=headers) as refused:
            assert (refused.status, refused.headers["x-request-id"]) == (429, "mine-429")


def _ask_whole(google: Models) -> None:
    google.generate_content(model="gemini-x", contents="hello")


def _ask_stream(google: Models) -> None:
    list(google.generate_content_stream(model="gemini-x", contents="hello"))


@pytest.mark.parametrize("streams", [False, True])
async def test_sdks_raise_their_own_rate_limit_error_in_every_dialect(
    worker: Worker, new_tenant: NewTenant, streams: bool
) -> None:
    north = await new_tenant(requests_per_minute=2)
    refused = await use_up(worker, north)
    assert refused.status == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 61

    headers = {"X-Tersely-Key": north.key}
    asks: Any = [{"role": "user", "content": "hello"}]
    gpt = openai.AsyncOpenAI(api_key="k", base_url=f"{worker.base_url}/v1", max_retries=0, default_headers=headers)
    claude = anthropic.AsyncAnthropic(api_key="k", base_url=worker.base_url, max_retries=0, default_headers=headers)
    with pytest.raises(openai.RateLimitError) as chat:
        await gpt.chat.completions.create(model=MODEL, messages=asks, stream=streams)
    assert (chat.value.code, chat.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert 1 <= int(chat.value.response.headers["retry-after"]) <= 61
    with pytest.raises(openai.RateLimitError) as responses:
        await gpt.responses.create(model=MODEL, input="hello", stream=streams)
    assert responses.value.code == "rate_limit_exceeded"
    with pytest.raises(anthropic.RateLimitError) as messages:
        await claude.messages.create(model="claude-x", max_tokens=9, messages=asks, stream=streams)
    assert messages.value.response.json()["error"]["type"] == "rate_limit_error"
    client = genai.Client(api_key="k", http_options=types.HttpOptions(base_url=worker.base_url, headers=headers))
    ask = _ask_stream if streams else _ask_whole
    with pytest.raises(genai_errors.ClientError) as gemini:
        await asyncio.to_thread(ask, client.models)
    assert (gemini.value.code, gemini.value.status) == (429, "RESOURCE_EXHAUSTED")
    wait = gemini.value.details["error"]["details"][0]
    assert wait["@type"].endswith("RetryInfo")
    assert wait["retryDelay"].endswith("s")
    path = f"/v1internal:{'streamGenerateContent?alt=sse' if streams else 'generateContent'}"
    body = {"model": "gemini-x", "project": "p", "request": {"contents": [{"role": "user", "parts": [{"text": "a"}]}]}}
    async with worker.http.post(f"{worker.base_url}{path}", json=body, headers=headers) as answer:
        assert answer.status == 429
        assert (await answer.json())["error"]["status"] == "RESOURCE_EXHAUSTED"
    async with worker.http.get(f"{worker.base_url}/api/sessions", headers=headers) as answer:
        problem = json.loads(await answer.read())
        assert (answer.status, answer.content_type) == (429, "application/problem+json")
        assert problem["limit"] == "requests_per_minute"
        assert int(answer.headers["retry-after"]) == problem["retry_after"]
    await gpt.close()
    await claude.close()


async def test_a_limit_of_a_key_holds_beside_that_of_its_tenant(worker: Worker, new_tenant: NewTenant) -> None:
    south = await new_tenant(of_key=True, requests_per_minute=1)
    assert "this key's limit" in (await use_up(worker, south)).json["error"]["message"]


async def test_concurrent_calls_are_refused_over_the_limit_and_come_back(
    worker: Worker, new_tenant: NewTenant, model: Model
) -> None:
    east = await new_tenant(concurrent=3)

    async def ask(n: int) -> Answered:
        body = body_of(f"question {n}", user=f"slow-{n}")
        return await worker.post(body, X_Tersely_Key=east.key, X_Script=f"{east.name}-{n}")

    for n in range(8):
        model.script(f"{east.name}-{n}", ScriptedReply(message={"content": "late"}, first_delay=3.0))
    answers = await asyncio.gather(*(ask(n) for n in range(8)))
    assert sorted(answer.status for answer in answers) == [200] * 3 + [429] * 5
    assert {answer.headers["retry-after"] for answer in answers if answer.status == 429} == {"1"}
    assert (await worker.post(body_of("again"), X_Tersely_Key=east.key)).status == 200


async def test_one_call_after_the_other_is_never_refused_for_concurrency(worker: Worker, new_tenant: NewTenant) -> None:
    west = await new_tenant(concurrent=1)
    for n in range(20):
        assert (await worker.post(body_of(f"question {n}"), X_Tersely_Key=west.key)).status == 200


async def test_tokens_of_a_day_end_also_for_calls_that_are_not_stored(worker: Worker, new_tenant: NewTenant) -> None:
    for headers in ({}, {"X-Tersely-Bypass": "true"}):
        tenant = await new_tenant(tokens_per_day=100)
        spent = each = 0
        while (answer := await worker.post(body_of("hello"), X_Tersely_Key=tenant.key, **headers)).status == 200:
            each = answer.json["usage"]["total_tokens"]
            spent += each
            assert spent < 1000
        assert answer.status == 429
        assert "tokens per day" in answer.json["error"]["message"]
        assert abs(spent - 100) <= each
        path = f"{worker.base_url}/api/sessions"
        async with worker.http.get(path, headers={"X-Tersely-Key": tenant.key}) as listed:
            assert listed.status == 200


async def test_money_of_a_month_ends_where_the_price_is_known(worker: Worker, new_tenant: NewTenant) -> None:
    rich, poor = await new_tenant(money_per_month=1000), await new_tenant(money_per_month=0.00001)
    assert (await worker.post(body_of("hello"), X_Tersely_Key=rich.key)).status == 200
    refused = await use_up(worker, poor)
    assert refused.status == 429
    assert "USD per month" in refused.json["error"]["message"]
    if int(refused.headers["retry-after"]) > 60:
        assert refused.headers["x-should-retry"] == "false"


@pytest.fixture
def quick_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure stored bytes every second."""
    monkeypatch.setattr(limiter, "MEASURE", 1.0)


@pytest.mark.usefixtures("quick_measures")
async def test_stored_bytes_limit_refuses_appends_until_a_deletion(worker: Worker, new_tenant: NewTenant) -> None:
    full = await new_tenant(stored_bytes=20_000)
    headers = {"X-Tersely-Key": full.key}
    status = 0
    for _ in range(200):
        answer = await worker.post(body_of("x" * 3000), X_Tersely_Session="big", **headers)
        if (status := answer.status) == 429:
            break
        await asyncio.sleep(0.05)
    assert status == 429
    bypass = await worker.post(body_of("hello"), X_Tersely_Bypass="true", **headers)
    assert bypass.status == 200
    async with worker.http.delete(f"{worker.base_url}/api/sessions/big", headers=headers) as deleted:
        assert deleted.status == 204
    async with asyncio.timeout(40):
        while (await worker.post(body_of("small"), **headers)).status == 429:
            await asyncio.sleep(0.5)


async def test_pages_of_tenants_list_the_default_tenant_once(worker: Worker):
    for name in ("a-tenant", "b-tenant", "default", "e-tenant"):
        await admin(worker.http, worker.base_url, "POST", "/keys", {"tenant": name})
    listed: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await admin(worker.http, worker.base_url, "GET", f"/tenants?limit=1&after={after}")
        listed += [each["tenant"] for each in page["items"]]
        after = page["next"]
    assert sorted(set(listed)) == sorted(listed)
    assert {"a-tenant", "b-tenant", "default", "e-tenant"} <= set(listed)
