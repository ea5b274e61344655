"""Tenants and keys of requests: each provider's own addresses and headers under one root."""

from __future__ import annotations

import io
import json
import secrets
import warnings
from datetime import UTC, datetime

import pytest

from tersely.api.routes import find_target
from tersely.service.common.auth import new_key
from tersely.store.ops import keys
from tests.conftest import Database
from tests.support.http import post
from tests.support.services import serve
from tests.support.stores import open_store
from tests.support.upstreams import Model, RawUpstream, http_head

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from google import genai
    from google.genai import types

MESSAGES = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}).encode()
CONTENTS = json.dumps({"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}).encode()
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
GENERATE = "/v1beta/models/m:generateContent"
TSK = f"tsk_0123456789abcdef_{'s' * 40}"


@pytest.mark.parametrize(
    ("method", "target", "headers", "dialect", "is_call"),
    [
        ("POST", "/v1/chat/completions", {}, "openai_chat", True),
        ("GET", "/v1/chat/completions", {}, "openai_chat", False),
        ("POST", "/v1/responses", {"x-api-key": "a"}, "openai_responses", True),
        ("POST", "/v1/responses/compact", {}, "openai_responses", False),
        ("GET", "/v1/responses/resp_1", {}, "openai_responses", False),
        ("POST", "/v1/messages", {}, "anthropic", True),
        ("POST", "/v1/messages?beta=true", {}, "anthropic", True),
        ("POST", "/v1/messages/count_tokens", {}, "anthropic", False),
        ("POST", "/v1/messages/batches", {}, "anthropic", False),
        ("GET", "/v1/models", {}, "openai_chat", False),
        ("GET", "/v1/models", {"x-api-key": "a"}, "anthropic", False),
        ("GET", "/v1/models", {"x-api-key": TSK}, "openai_chat", False),
        ("GET", "/v1/models/m", {"anthropic-version": "2023-06-01"}, "anthropic", False),
        ("GET", "/v1/files", {"anthropic-version": "2023-06-01"}, "anthropic", False),
        ("GET", "/v1/models/ft:gpt-4o:org::id", {}, "openai_chat", False),
        ("GET", "/v1/models", {"x-goog-api-key": "g"}, "gemini", False),
        (
            "GET",
            "/v1/models",
            {"x-goog-api-client": "google-genai-sdk/2", "authorization": "Bearer y"},
            "gemini",
            False,
        ),
        ("GET", "/v1/models/m", {"x-goog-api-key": TSK}, "gemini", False),
        ("DELETE", "/v1/files/f", {"x-goog-api-key": "g"}, "gemini", False),
        ("GET", "/v1/models", {"x-goog-api-key": "g", "anthropic-version": "2023-06-01"}, "anthropic", False),
        ("POST", "/v1/chat/completions", {"x-goog-api-key": "g"}, "openai_chat", True),
        ("GET", "/v1/responses/resp_1", {"x-goog-api-key": "g"}, "openai_responses", False),
        ("GET", "/v1beta/models", {"x-goog-api-key": "g"}, "gemini", False),
        ("POST", "/v1beta/models/m:generateContent", {}, "gemini", True),
        ("POST", "/v1/models/m:streamGenerateContent?alt=sse", {}, "gemini", True),
        ("POST", "/v1alpha/models/m:generateContent", {}, "gemini", True),
        ("POST", "/v1beta/tunedModels/t:generateContent", {}, "gemini", True),
        ("POST", "/v1beta/models/m:countTokens", {}, "gemini", False),
        ("POST", "/v1beta/models/m:embedContent", {}, "gemini", False),
        ("POST", "/upload/v1beta/files?upload_id=u&upload_protocol=resumable", {}, "gemini", False),
        ("POST", "/upload/v1/files", {"anthropic-version": "2023-06-01"}, "gemini", False),
        ("PUT", "/upload/v1alpha/fileSearchStores/s:uploadToFileSearchStore", {}, "gemini", False),
        ("GET", "/download/v1beta/files/f:download?alt=media", {}, "gemini", False),
        ("POST", "/upload/v1beta/models/m:generateContent", {}, "gemini", False),
        ("POST", "/v1internal:streamGenerateContent?alt=sse", {}, "gemini_gca", True),
        ("POST", "/v1internal:loadCodeAssist", {}, "gemini_gca", False),
    ],
)
def test_path_and_headers_name_the_dialect(
    method: str, target: str, headers: dict[str, str], dialect: str, is_call: bool
) -> None:
    path = target.partition("?")[0]
    found = find_target(method, path, target, headers)
    assert found is not None
    assert (found.dialect, found.is_call) == (dialect, is_call)
    assert found.path == (target.removeprefix("/v1") if dialect.startswith("openai") else target)
    assert found.streams is ("stream" in target and is_call)


@pytest.mark.parametrize(
    ("target", "dialect", "path", "keys"),
    [
        ("/v1/models?key=AIza", "gemini", "/v1/models", {"x-goog-api-key": "AIza"}),
        (f"/v1/models?pageSize=2&key={TSK}", "gemini", "/v1/models?pageSize=2", {"x-tersely-key": TSK}),
        (
            f"/v1/models/m?key=AIza&key={TSK}",
            "gemini",
            "/v1/models/m",
            {"x-goog-api-key": "AIza", "x-tersely-key": TSK},
        ),
        ("/v1/models?%6bey=a%2Bb", "gemini", "/v1/models", {"x-goog-api-key": "a+b"}),
        ("/v1/models?key=", "openai_chat", "/models", {}),
        ("/v1/models?keys=a&monkey=b", "openai_chat", "/models?keys=a&monkey=b", {}),
        ("/v1/responses/r?key=AIza", "openai_responses", "/responses/r", {"x-goog-api-key": "AIza"}),
        (f"/v1/chat/completions?key={TSK}&a=b", "openai_chat", "/chat/completions?a=b", {"x-tersely-key": TSK}),
        (f"/v1/messages?beta=true&key={TSK}", "anthropic", "/v1/messages?beta=true", {"x-tersely-key": TSK}),
        ("/upload/v1beta/files?key=AIza&a=b", "gemini", "/upload/v1beta/files?a=b", {"x-goog-api-key": "AIza"}),
    ],
)
def test_keys_in_the_query_become_headers(target: str, dialect: str, path: str, keys: dict[str, str]) -> None:
    found = find_target("GET", target.partition("?")[0], target, {})
    assert found is not None
    assert (found.dialect, found.path, dict(found.keys)) == (dialect, path, keys)
    assert found.with_keys([("x-goog-api-key", "own")])[0] == ("x-goog-api-key", "own")
    assert [name for name, _ in found.with_keys([("x-goog-api-key", "own")])].count("x-goog-api-key") == 1


def test_stored_reply_is_returned_again() -> None:
    for method, path, name in (
        ("GET", "/v1/responses/resp_1", "resp_1"),
        ("DELETE", "/v1/responses/resp_1", ""),
        ("GET", "/v1/responses/resp_1/input_items", ""),
        ("GET", "/v1/responses", ""),
        ("GET", "/openai/v1/responses/resp_1", "resp_1"),
        ("GET", "/openai/responses/resp_1", "resp_1"),
        ("GET", "/openai/deployments/d/responses/resp_1", "resp_1"),
        ("GET", "/openai/v1/responses/resp_1/input_items", ""),
        ("POST", "/openai/v1/responses/resp_1", ""),
    ):
        found = find_target(method, path, path, {})
        assert found is not None
        assert found.reply_id == name
        assert found.dialect == "openai_responses"


def test_unknown_paths_belong_to_no_dialect() -> None:
    for address in (
        "/upload",
        "/upload/v1beta",
        "/upload/v2/files",
        "/download/v1",
        "/api/v1beta/files",
        "/v1upload/x",
    ):
        assert find_target("POST", address, address, {}) is None
    assert find_target("GET", "/v2/models", "/v2/models", {}) is None
    assert find_target("GET", "/v1", "/v1", {}) is None


@pytest.mark.parametrize(
    ("path", "body", "carrier"),
    [
        ("/v1/messages", MESSAGES, {"x-api-key": TSK, "authorization": "Bearer own"}),
        ("/v1/messages", MESSAGES, {"authorization": f"Bearer {TSK}", "x-api-key": "own"}),
        ("/v1/messages", MESSAGES, {"x-tersely-key": TSK, "x-api-key": "own"}),
        ("/v1/chat/completions", CHAT, {"api-key": TSK, "authorization": "Bearer own"}),
        (GENERATE, CONTENTS, {"x-goog-api-key": TSK}),
        (f"{GENERATE}?key={TSK}", CONTENTS, {"x-goog-api-key": "own"}),
        (f"{GENERATE}?key=own", CONTENTS, {"x-tersely-key": TSK}),
        ("/v1internal:generateContent", CONTENTS, {"x-tersely-key": TSK, "authorization": "Bearer own"}),
        (f"/v1/models?key={TSK}", b"", {"x-goog-api-key": "own"}),
        (f"/v1/models?key=own&key={TSK}", b"", {}),
        (f"/v1/messages?key={TSK}", MESSAGES, {"x-api-key": "own"}),
        (f"/upload/v1beta/files?key={TSK}", b"{}", {"x-goog-api-key": "own"}),
    ],
)
async def test_a_tersely_key_never_goes_up(
    store: Database, raw: RawUpstream, path: str, body: bytes, carrier: dict[str, str]
) -> None:
    text = await made_key(store)
    raw.answer(http_head("application/json"), b"{}")
    with serve(store, raw.url, auth="keys") as locked:
        refused = await post(locked, body, path=path.replace(TSK, "other"))
        assert refused.status == 401
        assert "error" in refused.json
        before = len(raw.requests)
        given = {name: value.replace(TSK, text) for name, value in carrier.items()}
        answer = await post(locked, body, path=path.replace(TSK, text), **given)
    assert answer.status == 200
    assert len(raw.requests) == before + 1
    sent = raw.requests[-1]
    seen = sent.target.encode() + b"\n".join(sent.lines)
    assert b"tsk_" not in seen
    assert (b"own" in seen) is ("own" in f"{carrier} {path}")
    assert "key=" not in sent.target


@pytest.mark.parametrize(
    ("setting", "path", "body", "header", "value"),
    [
        ("anthropic_api_key", "/v1/messages", MESSAGES, "x-api-key", "operators"),
        ("gemini_api_key", f"{GENERATE}?key=callers", CONTENTS, "x-goog-api-key", "operators"),
        ("openai_api_key", "/v1/responses", b'{"model":"m","input":"hi"}', "authorization", "Bearer operators"),
    ],
)
async def test_the_operators_key_takes_the_callers_place(
    store: Database, raw: RawUpstream, setting: str, path: str, body: bytes, header: str, value: str
) -> None:
    raw.answer(http_head("application/json"), b"{}")
    with serve(store, raw.url, **{setting: "operators"}) as running:
        await post(running, body, path=path, **{"x-api-key": "callers", "authorization": "Bearer callers"})
    sent = raw.requests[-1]
    assert sent.headers[header] == value
    assert b"callers" not in sent.target.encode() + b"\n".join(sent.lines)


async def test_files_of_google_s_sdk_with_a_tersely_key(store: Database, model: Model) -> None:
    headers = {"X-Tersely-Key": await made_key(store)}
    before = model.state.calls
    rules = "POST /upload/v1beta/files, GET /v1beta/files/*"
    with serve(store, model.url, auth="keys", gemini_api_key="operators", passthrough=rules) as locked:
        options = types.HttpOptions(base_url=locked.url, headers=headers)
        with genai.Client(api_key="none", http_options=options) as client:
            made = client.files.upload(file=io.BytesIO(b"hello"), config={"mime_type": "text/plain"})
            assert client.files.get(name=made.name or "").size_bytes == 5
        refused = await post(locked, b"x", path="/upload/v1beta/files?upload_id=u1&upload_protocol=resumable")
    assert (refused.status, refused.json["error"]["status"]) == (401, "UNAUTHENTICATED")
    begun, piece, found = (each for each in model.state.received if each.number > before)
    assert begun.headers["x-goog-api-key"] == found.headers["x-goog-api-key"] == "operators"
    assert "x-goog-api-key" not in piece.headers  # it goes straight to the host that said where
    assert not any("x-tersely-key" in each.headers for each in (begun, piece, found))


async def made_key(store: Database) -> str:
    """A Tersely key of a new tenant."""
    key_id = secrets.token_hex(8)
    text, stored = new_key(f"t-{key_id}", "", now=datetime.now(UTC), key_id=key_id, secret=secrets.token_urlsafe(32))
    async with open_store(store) as database:
        await keys.add(database, stored)
    return text


async def test_calls_are_counted_by_dialect(store: Database, model: Model) -> None:
    with serve(store, model.url) as running:
        await post(running, MESSAGES, path="/v1/messages")
        await post(running, CONTENTS, path=GENERATE)
        metrics = (await post(running, b"", path="/metrics", method="GET")).body.decode()
    for route, dialect in (("messages", "anthropic"), ("generate", "gemini")):
        line = f'tersely_requests_total{{dialect="{dialect}",route="{route}",status="200",strategy="slim"}} 1.0'
        assert line in metrics
