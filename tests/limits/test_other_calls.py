"""Model calls that are no conversations count towards the limits, and requests without a model do not."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.conftest import Database
from tests.limits.conftest import ADMIN_KEY, admin, make_tenant
from tests.support.services import Worker, run_worker
from tests.support.tenants import Tenant

pytestmark = pytest.mark.usefixtures("quick_accounts")
# A worker has read new limits, and has counted all that was used, after so many seconds.
FOLLOWED = 1.3
LIMIT = 10_000_000
WORDS = "a question of some length " * 400
TOKENS = len(WORDS) // 4
PIXELS = "iVBORw0KGgo" * 20_000
FORM = "multipart/form-data; boundary=XX"
USAGE = {"prompt_tokens": 300, "completion_tokens": 40, "total_tokens": 340}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, the host's reply, and how many tokens the call counts: at least, and at most."""

    path: str
    body: Any = field(default_factory=dict)
    reply: Any = field(default_factory=dict)
    counts: tuple[int, int] = (0, 0)
    kind: str = "application/json"
    reply_kind: str = "application/json"
    status: int = 200
    delay: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)


def exactly(tokens: int) -> tuple[int, int]:
    return tokens, tokens


def about(tokens: int) -> tuple[int, int]:
    return tokens - 20, tokens + 60


def sse(*events: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(each).encode() for each in events)


def form(**fields: str) -> bytes:
    head = '--XX\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    file = (
        '--XX\r\nContent-Disposition: form-data; name="file"; filename="a.mp3"\r\n\r\n' + "0" * 400_000 + "\r\n--XX--"
    )
    return ("".join(head.format(*each) for each in fields.items()) + file).encode()


ANTHROPIC = {"anthropic-version": "2023-06-01"}
RESPONSES_USAGE = {"input_tokens": 300, "output_tokens": 40, "total_tokens": 340}
VECTORS = {"object": "list", "data": [{"embedding": [0.25] * 20_000}], "model": "m"}
REPORTED = [
    Case(path="/v1/completions", reply={"choices": [{"text": "hi"}], "usage": USAGE}, counts=exactly(340)),
    Case(path="/v1/completions/", reply={"choices": [{"text": "hi"}], "usage": USAGE}, counts=exactly(340)),
    Case(path="/v1/responses/compact", reply={"output": [], "usage": RESPONSES_USAGE}, counts=exactly(340)),
    Case(
        path="/v1/embeddings",
        body={"input": "x"},
        reply={**VECTORS, "usage": {"prompt_tokens": 77, "total_tokens": 77}},
        counts=exactly(77),
    ),
    Case(
        path="/v1/images/generations",
        reply={"data": [{"b64_json": PIXELS}], "usage": RESPONSES_USAGE},
        counts=exactly(340),
    ),
    Case(
        path="/v1/audio/transcriptions",
        body=form(model="gpt-4o-transcribe"),
        kind=FORM,
        reply={"text": "words", "usage": {"type": "tokens", **RESPONSES_USAGE}},
        counts=exactly(340),
    ),
    Case(
        path="/v1/audio/speech",
        reply=sse({"type": "speech.audio.delta", "audio": PIXELS}, {"type": "done", "usage": RESPONSES_USAGE}),
        reply_kind="text/event-stream",
        counts=exactly(340),
    ),
    Case(path="/v1/rerank", reply={"results": [], "usage": {"total_tokens": 340}}, counts=exactly(340)),
    Case(path="/openai/deployments/d/embeddings", reply={**VECTORS, "usage": {"prompt_tokens": 9}}, counts=exactly(9)),
    Case(path="/openai/deployments/d/completions", reply={"choices": [], "usage": USAGE}, counts=exactly(340)),
    Case(
        path="/v1beta/models/m:generateAnswer",
        reply={"answer": {}, "usageMetadata": {"promptTokenCount": 300, "candidatesTokenCount": 40}},
        counts=exactly(340),
    ),
    Case(
        path="/v1beta/cachedContents",
        reply={"name": "cachedContents/c", "usageMetadata": {"totalTokenCount": 4_096}},
        counts=exactly(4_096),
    ),
    Case(
        path="/v1beta/interactions",
        reply={"outputs": [], "usage": {"total_input_tokens": 300, "total_thought_tokens": 40, "total_tokens": 340}},
        counts=exactly(340),
    ),
    Case(path="/v1beta/openai/chat/completions", reply={"choices": [], "usage": USAGE}, counts=exactly(340)),
    Case(
        path="/v1internal:generateCode",
        reply={"response": {"usageMetadata": {"promptTokenCount": 300, "candidatesTokenCount": 40}}},
        counts=exactly(340),
    ),
]
EVENTS = [{"choices": [{"text": "word " * 100, "index": 0}], "model": "m"}] * 40
ESTIMATED = [
    Case(
        path="/v1/completions", body={"prompt": WORDS}, reply={"choices": [{"text": WORDS}]}, counts=about(2 * TOKENS)
    ),
    Case(path="/v1/completions", body={"prompt": [[5] * 3_000]}, counts=about(3_000)),
    Case(path="/v1/completions", body={"prompt": "data:" + WORDS}, counts=about(TOKENS)),
    Case(path="/v1/completions", body={"prompt": WORDS, "requests": [{"params": {}}]}, counts=about(TOKENS)),
    Case(path="/v1/images/edits", body={"prompt": WORDS, "image": PIXELS}, counts=about(TOKENS + 1_200)),
    Case(
        path="/v1beta/models/m:batchEmbedContents",
        body={"requests": [{"model": "models/m", "content": {"parts": [{"text": WORDS}]}}] * 2},
        counts=about(2 * TOKENS),
    ),
    Case(
        path="/v1/completions",
        body={"prompt": WORDS, "stream": True},
        reply=sse(*EVENTS) + b"data: [DONE]\n\n",
        reply_kind="text/event-stream",
        counts=about(TOKENS + 40 * 125),
    ),
    Case(
        path="/v1/completions",
        body=gzip.compress(WORDS.encode()),
        headers={"content-encoding": "gzip"},
        counts=(50, 400),
    ),
    Case(path="/v1/complete", body={"prompt": WORDS}, reply={"completion": WORDS}, counts=about(2 * TOKENS)),
    Case(path="/v1/embeddings", body={"input": [WORDS, WORDS]}, reply=VECTORS, counts=about(2 * TOKENS)),
    Case(path="/v1beta/models/m:embedContent", body={"content": {"parts": [{"text": WORDS}]}}, counts=about(TOKENS)),
    Case(
        path="/v1beta/models/m:batchGenerateContent",
        body={"batch": {"requests": [{"contents": [{"parts": [{"text": WORDS}]}]}] * 5}},
        reply={"name": "batches/b"},
        counts=about(5 * TOKENS),
    ),
    Case(
        path="/v1beta/models/m:predict",
        body={"instances": [{"prompt": WORDS}]},
        reply={"predictions": [{"bytesBase64Encoded": PIXELS}]},
        counts=about(TOKENS),
    ),
    Case(
        path="/v1/messages/batches",
        body={"requests": [{"custom_id": "a", "params": {"model": "m", "messages": [WORDS]}}] * 3},
        reply={"id": "b", "processing_status": "in_progress"},
        headers=ANTHROPIC,
        counts=about(3 * TOKENS),
    ),
    Case(path="/v1/moderations", body={"input": WORDS}, reply={"results": []}, counts=about(TOKENS)),
    Case(path="/v1/audio/transcriptions", body=form(model="w", prompt=WORDS), kind=FORM, counts=(TOKENS, 3 * TOKENS)),
    Case(
        path="/v1/audio/speech",
        body={"input": WORDS},
        reply=b"0" * 900_000,
        reply_kind="audio/mpeg",
        counts=about(TOKENS),
    ),
    Case(path="/v1/completions", body={"prompt": WORDS}, kind=FORM, counts=about(TOKENS)),
    Case(path="/v1/a/path/that/nobody/knows", body={"text": WORDS}, counts=about(TOKENS)),
    Case(path="/v1/threads/runs", body={"thread": {"messages": [{"content": WORDS}]}}, counts=about(TOKENS)),
]
REPEATED = {"id": "resp_1", "usage": USAGE}
FREE = [
    Case(path="/v1/messages/count_tokens", body={"messages": [WORDS]}, reply={"input_tokens": 9}, headers=ANTHROPIC),
    Case(path="/v1/responses/input_tokens", body={"input": WORDS}, reply={"input_tokens": 9}),
    Case(path="/v1beta/models/m:countTokens", body={"contents": WORDS}, reply={"totalTokens": 9}),
    Case(path="/v1internal:countTokens", body={"request": WORDS}, reply={"totalTokens": 9}),
    Case(path="/v1internal:loadCodeAssist", body={"metadata": WORDS}),
    Case(path="/v1/responses/resp_1/cancel", reply=REPEATED),
    Case(path="/v1/chat/completions/chatcmpl-1", body={"metadata": {}}, reply=REPEATED),
    Case(path="/v1/conversations", body={"items": [WORDS]}),
    Case(path="/v1/files", body=form(purpose="batch"), kind=FORM),
    Case(path="/v1/completions", body={"prompt": WORDS}, reply={"error": {"message": "no"}}),
    Case(path="/v1/completions", body={"prompt": WORDS}, reply={"error": {"message": "no"}}, status=429),
]


class Host:
    """A host that answers as it is told, by a header."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        case = self.cases[int(request.headers["x-case"])]
        await asyncio.sleep(case.delay)
        body = case.reply if isinstance(case.reply, bytes) else json.dumps(case.reply).encode()
        return web.Response(body=body, content_type=case.reply_kind, status=case.status)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    found = Host([*REPORTED, *ESTIMATED, *FREE])
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", found.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield found
    await runner.cleanup()


async def ask(worker: Worker, tenant: Tenant, case: Case, number: int = 0) -> int:
    body = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    headers = {"content-type": case.kind, "X-Tersely-Key": tenant.key, "x-case": str(number), **case.headers}
    async with worker.http.post(worker.base_url + case.path, data=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def used(worker: Worker, tenant: Tenant) -> Any:
    return (await admin(worker.http, worker.base_url, "GET", f"/tenants/{tenant.name}/limits"))["used"]


async def test_model_calls_of_every_kind_count_and_other_requests_do_not(store: Database, host: Host) -> None:
    azure = {"azure": {"dialect": "azure", "base_url": host.url.removesuffix("/v1")}}
    async with run_worker(store, host.url, auth="keys", admin_key=ADMIN_KEY, upstreams=azure) as worker:
        tenants = [await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT) for _ in host.cases]
        await asyncio.sleep(FOLLOWED)
        for number, (case, tenant) in enumerate(zip(host.cases, tenants, strict=True)):
            assert await ask(worker, tenant, case, number) == case.status, case.path
        await asyncio.sleep(FOLLOWED)
        wrong = []
        for case, tenant in zip(host.cases, tenants, strict=True):
            tokens = (await used(worker, tenant))["tokens_per_day"]
            if not case.counts[0] <= tokens <= case.counts[1]:
                wrong.append((case.path, tokens, case.counts))
        assert not wrong


async def test_other_model_calls_are_refused_over_a_limit_and_free_requests_are_not(
    store: Database, host: Host
) -> None:
    completion, counting = REPORTED[0], FREE[0]
    async with run_worker(store, host.url, auth="keys", admin_key=ADMIN_KEY) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=300)
        assert await ask(worker, tenant, completion) == 200
        assert await ask(worker, tenant, completion) == 429
        assert await ask(worker, tenant, counting, host.cases.index(counting)) == 200


async def test_other_model_calls_cost_the_price_of_their_model(store: Database, host: Host, tmp_path: Path) -> None:
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"dear": {"input": 1000, "output": 1000}, "cheap": {"input": 1, "output": 1}}))
    batch = {"requests": [{"params": {"model": name, "text": WORDS}} for name in ("cheap", "dear")]}
    cases = [
        Case(path="/v1/completions", body={"model": "dear"}, reply={"usage": USAGE}),
        Case(path="/v1/images/edits", body=form(model="dear"), kind=FORM, reply={"usage": RESPONSES_USAGE}),
        Case(path="/v1beta/models/dear:embedContent", reply={"usageMetadata": {"promptTokenCount": 340}}),
        Case(path="/v1/messages/batches", body=batch, headers=ANTHROPIC),
    ]
    host.cases = cases
    async with run_worker(store, host.url, auth="keys", admin_key=ADMIN_KEY, prices=prices) as worker:
        tenants = [await make_tenant(worker.http, worker.base_url, money_per_month=LIMIT) for _ in cases]
        for number, (case, tenant) in enumerate(zip(cases, tenants, strict=True)):
            assert await ask(worker, tenant, case, number) == 200
        await asyncio.sleep(FOLLOWED)
        spent = [(await used(worker, tenant))["money_per_month"] for tenant in tenants]
        assert spent[:3] == [pytest.approx(0.34)] * 3
        assert spent[3] == pytest.approx(TOKENS * 1.001e-3, rel=0.02)


async def test_other_model_calls_count_whose_client_leaves(store: Database, host: Host) -> None:
    host.cases = [Case(path="/v1/completions", body={"prompt": WORDS}, reply={"usage": USAGE}, delay=1.0)]
    async with run_worker(store, host.url, auth="keys", admin_key=ADMIN_KEY) as worker:
        tenant = await make_tenant(worker.http, worker.base_url, tokens_per_day=LIMIT, concurrent=1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await ask(worker, tenant, host.cases[0])
        await asyncio.sleep(FOLLOWED)
        found = await used(worker, tenant)
        assert abs(found["tokens_per_day"] - TOKENS) < 50
        assert found["concurrent"] == 0
