"""Further model hosts: chosen by the model or by the path, each with its own key, one history for all."""

from __future__ import annotations

import gzip
import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import ValidationError

from tersely.settings import Settings, explain
from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.host_replies import answer_with, response
from tests.support.http import body_of, post
from tests.support.services import Service, many, serve
from tests.support.tenants import tenant
from tests.support.upstreams import Model, RawUpstream, http_head, scripted

REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "from azure"}, "finish_reason": "stop"}],
}


def models_of(model: Model) -> list[str]:
    """The models that a host was asked for."""
    return [str((each.request or {}).get("model")) for each in model.state.received if each.method == "POST"]


async def test_the_model_chooses_the_host(store: Database, key: str):
    with many(scripted(), scripted(), scripted()) as (main, local, router):
        upstreams = {
            "local": {"dialect": "openai", "base_url": local.url, "models": ["llama*", "qwen?-*"]},
            "router": {"dialect": "openai", "base_url": router.url, "models": ["*/*"], "api_key": "sk-router"},
        }
        with serve(store, main.url, upstreams=upstreams, openai_api_key="sk-main") as service:
            history: list[dict[str, Any]] = []
            for name in ("gpt-5", "llama3.3", "meta/llama", "qwen3-8b", "gpt-5"):
                history.append({"role": "user", "content": f"ask {name}"})
                answer = await post(
                    service, json.dumps({"model": name, "messages": history}).encode(), Authorization="Bearer sk-mine"
                )
                assert answer.status == 200
                history.append(answer.json["choices"][0]["message"])
                assert answer.headers["x-tersely-session-source"] == ("new" if len(history) == 2 else "lineage")
        assert (models_of(main), models_of(local), models_of(router)) == (
            ["gpt-5", "gpt-5"],
            ["llama3.3", "qwen3-8b"],
            ["meta/llama"],
        )
        sent = [model.state.received[-1].headers["Authorization"] for model in (main, local, router)]
        assert sent == ["Bearer sk-main", "Bearer sk-mine", "Bearer sk-router"]
        assert len(local.state.received[-1].request["messages"]) > 6


async def test_the_path_names_the_host(store: Database):
    with many(scripted(), scripted(), scripted()) as (main, local, claude):
        upstreams = {
            "local": {"dialect": "openai", "base_url": local.url},
            "claude": {"dialect": "anthropic", "base_url": claude.url.removesuffix("/v1"), "api_key": "sk-ant"},
        }
        with serve(store, main.url, upstreams=upstreams) as service:
            with openai.OpenAI(base_url=f"{service.url}/u/local/v1", api_key="none", max_retries=0) as client:
                response = client.chat.completions.create(
                    model="llama", messages=[{"role": "user", "content": "hello"}]
                )
                assert response.choices[0].message.content
                client.models.list()
                events = client.responses.create(model="llama", input="hello", stream=True)
                assert [event.type for event in events][-1] == "response.completed"
            with anthropic.Anthropic(base_url=f"{service.url}/u/claude", api_key="mine", max_retries=0) as client:
                client.messages.create(model="c", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
            for path in ("/u/none/v1/chat/completions", "/u/claude/v1/chat/completions", "/u/local/v1/messages"):
                missing = await post(service, body_of("hello"), path=path)
                assert missing.status == 404, path
                assert "TERSELY_UPSTREAMS" in json.dumps(missing.json)
        assert main.state.received == type(main.state.received)()
        assert [each.path for each in local.state.received] == ["/v1/chat/completions", "/v1/models", "/v1/responses"]
        assert claude.state.received[-1].headers["X-Api-Key"] == "sk-ant"


DEEP = b'{"model":"llama","x":' + b"[" * 5_000 + b"]" * 5_000 + b',"messages":[{"role":"user","content":"a"}]}'


@pytest.mark.parametrize(
    ("path", "body", "headers", "reaches"),
    [
        ("/v1/chat/completions", rb'{"model":"llama","messages":[{"role":"user","content":"cut \ud83d"}]}', {}, True),
        ("/v1/responses", rb'{"model":"llama","input":"cut \ud83d"}', {}, True),
        ("/v1/embeddings", rb'{"model":"llama","input":"cut \ud83d"}', {}, True),
        (
            "/v1/chat/completions",
            b'\xef\xbb\xbf{"model":"llama","messages":[{"role":"user","content":"a"}]}',
            {},
            True,
        ),
        ("/v1/chat/completions", DEEP, {}, False),
        ("/v1/embeddings", DEEP, {}, False),
        ("/v1/embeddings", b'{"model":"llama","input":', {}, False),
        ("/v1/embeddings", gzip.compress(b'{"model":"llama","input":"a"}'), {"Content_Encoding": "gzip"}, False),
    ],
)
async def test_no_other_host_gets_what_is_meant_for_one(
    store: Database, path: str, body: bytes, headers: dict[str, str], reaches: bool
):
    with many(scripted(), scripted()) as (main, local):
        upstreams = {"local": {"dialect": "openai", "base_url": local.url, "models": ["llama*"]}}
        with serve(store, main.url, upstreams=upstreams) as service:
            answer = await post(service, body, path=path, Authorization="Bearer local", **headers)
    assert (len(main.state.received), len(local.state.received)) == (0, int(reaches))
    assert answer.headers["content-type"].startswith("application/json")
    assert reaches or answer.status == 400


@pytest.mark.parametrize("method", ["generateContent", "countTokens", "embedContent", "batchEmbedContents", "predict"])
async def test_a_model_in_the_path_chooses_the_host(store: Database, method: str):
    with many(scripted(), scripted()) as (main, local):
        root = local.url.removesuffix("/v1")
        upstreams = {"local": {"dialect": "gemini", "base_url": root, "models": ["llama*"]}}
        with serve(store, main.url, upstreams=upstreams) as service:
            body = b'{"contents":[{"role":"user","parts":[{"text":"a"}]}]}'
            await post(service, body, path=f"/v1beta/models/llama3:{method}", x_goog_api_key="k")
            await post(service, b'{"model":"models/llama3"}', path="/v1beta/cachedContents", x_goog_api_key="k")
    assert (len(main.state.received), len(local.state.received)) == (0, 2)


GOOD = '{"model":"llama","input":"a"}'


@pytest.mark.parametrize(
    "body", [GOOD.encode("utf-16"), GOOD.encode("utf-32"), b"// c\n" + GOOD.encode(), b"[" + GOOD.encode()]
)
async def test_json_that_cannot_be_read_goes_nowhere(store: Database, body: bytes):
    with many(scripted(), scripted()) as (main, local):
        upstreams = {"local": {"dialect": "openai", "base_url": local.url, "models": ["llama*"]}}
        with serve(store, main.url, upstreams=upstreams) as service:
            answer = await post(service, body, path="/v1/embeddings", Content_Type="application/json")
    assert (answer.status, len(main.state.received), len(local.state.received)) == (400, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b'{"key":"1"}\n{"key":"2"}\n',
        b"{\\rtf1 Hello}",
        b'{"a": [1, 2, ',
        b'{"model":"llama3","note":"a file"}',
        gzip.compress(b"x"),
    ],
)
async def test_a_file_goes_to_the_default_host(store: Database, raw: RawUpstream, body: bytes):
    answer_with(raw, response(b"{}"))
    with scripted() as local:
        upstreams = {"local": {"dialect": "gemini", "base_url": local.url.removesuffix("/v1"), "models": ["llama*"]}}
        with serve(store, raw.url, gemini_base_url=raw.url.removesuffix("/v1"), upstreams=upstreams) as service:
            path = "/upload/v1beta/files?upload_id=1"
            more = {"x_goog_api_key": "k", "Content_Type": "application/octet-stream"}
            encoding = {"Content_Encoding": "gzip"} if body.startswith(b"\x1f") else {}
            answer = await post(service, body, path=path, **more, **encoding)
    assert (answer.status, len(raw.requests), len(local.state.received)) == (200, 1, 0)


async def test_a_form_goes_to_the_default_host(store: Database):
    with many(scripted(), scripted()) as (main, local):
        upstreams = {"local": {"dialect": "openai", "base_url": local.url, "models": ["llama*"]}}
        with serve(store, main.url, upstreams=upstreams) as service:
            body = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nllama\r\n--x--\r\n'
            await post(service, body, path="/v1/audio/transcriptions", Content_Type="multipart/form-data; boundary=x")
    assert (len(main.state.received), len(local.state.received)) == (1, 0)


async def test_azure_s_own_paths_and_version_pass(store: Database, raw: RawUpstream, model: Model):
    raw.answer(http_head("application/json"), json.dumps(REPLY).encode())
    azure = {"dialect": "azure", "base_url": raw.url.removesuffix("/v1"), "api_key": "operators"}
    with serve(store, model.url, upstreams={"azure": azure}, strategy="full", instructions="off") as service:
        client = openai.AzureOpenAI(azure_endpoint=service.url, api_key="mine", api_version="2024-10-21", max_retries=0)
        with client:
            messages: list[Any] = [{"role": "user", "content": "hello"}]
            response = client.chat.completions.with_raw_response.create(model="my-deployment", messages=messages)
        assert response.parse().choices[0].message.content == "from azure"
        assert response.headers["x-tersely-session-source"] == "new", "it is stored"
        request = raw.requests[-1]
        assert request.target == "/openai/deployments/my-deployment/chat/completions?api-version=2024-10-21"
        assert request.headers["api-key"] == "operators"
        assert "authorization" not in request.headers
        named = await post(service, body_of("hello"), path="/u/azure/openai/v1/chat/completions?api-version=preview")
        assert (named.status, raw.requests[-1].target) == (200, "/openai/v1/chat/completions?api-version=preview")
        assert (await post(service, body_of("hello"), path="/u/azure/v1/chat/completions")).status == 404
    with serve(store, model.url) as service:
        nowhere = await post(service, body_of("hello"), path="/openai/deployments/x/chat/completions")
        assert (nowhere.status, "azure" in json.dumps(nowhere.json)) == (404, True)


@pytest.mark.parametrize("path", ["/openai/v1/responses", "/openai/responses", "/u/azure/openai/v1/responses"])
async def test_a_stored_reply_of_azures_is_returned_as_its_client_saw_it(
    store: Database, raw: RawUpstream, model: Model, path: str
):
    text = {"type": "output_text", "text": "Four.\n<terse>added</terse>", "annotations": []}
    said = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    reply = {"id": f"resp_{len(path)}", "object": "response", "status": "completed", "output": [said], "tools": []}
    raw.answer(http_head("application/json"), json.dumps(reply).encode())
    azure = {"dialect": "azure", "base_url": raw.url.removesuffix("/v1"), "models": ["deployed"]}
    with serve(store, model.url, upstreams={"azure": azure}) as service:
        given = await post(service, b'{"model":"deployed","input":"add"}', path=f"{path}?api-version=preview")
        again = await post(service, b"", method="GET", path=f"{path}/{reply['id']}?api-version=preview")
    assert given.json["output"] == again.json["output"] != reply["output"]


async def test_the_azure_sdk_sends_a_tersely_key_in_place_of_azures(store: Database, raw: RawUpstream, model: Model):
    keyring = Store(dsn=store.dsn)
    await keyring.open()
    one = await tenant(keyring)
    await keyring.close()
    raw.answer(http_head("application/json"), json.dumps(REPLY).encode())
    azure = {"dialect": "azure", "base_url": raw.url.removesuffix("/v1"), "api_key": "operators"}
    with serve(store, model.url, upstreams={"azure": azure}, auth="keys") as service:
        client = openai.AzureOpenAI(azure_endpoint=service.url, api_key=one.key, api_version="2024-10-21")
        with client:
            reply = client.chat.completions.create(model="deployment", messages=[{"role": "user", "content": "hello"}])
    assert reply.choices[0].message.content == "from azure"
    assert raw.requests[-1].headers["api-key"] == "operators"


async def test_tenants_reach_permitted_paths_of_a_named_account(store: Database):
    keyring = Store(dsn=store.dsn)
    await keyring.open()
    one = await tenant(keyring)
    await keyring.close()
    with many(scripted(), scripted()) as (main, shared):
        upstreams = {"shared": {"dialect": "openai", "base_url": shared.url, "api_key": "sk-o", "models": ["llama*"]}}
        with serve(store, main.url, upstreams=upstreams, auth="keys") as service:
            assert (await post(service, body_of("hello", model="llama"), X_Tersely_Key=one.key)).status == 200
            for path in ("/u/shared/v1/files", "/u/shared/v1/fine_tuning/jobs"):
                assert (await post(service, b"", path=path, method="GET", X_Tersely_Key=one.key)).status == 403
            own = await post(service, b"", path="/v1/models", method="GET", X_Tersely_Key=one.key)
            assert own.status == 200
            assert (await post(service, body_of("hello"), path="/u/shared/v1/chat/completions")).status == 401
        assert models_of(shared) == ["llama"]


def test_settings_of_hosts_are_checked(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tersely.toml").write_text(
        '[upstreams.ollama]\ndialect = "openai"\nbase_url = "http://127.0.0.1:11434/v1/"\nmodels = ["llama*"]\n'
    )
    found = Settings(_env_file=None).upstreams["ollama"]
    assert (found.base_url, found.models) == ("http://127.0.0.1:11434/v1", ("llama*",))
    monkeypatch.setenv("TERSELY_UPSTREAMS", '{"vllm": {"dialect": "openai", "base_url": "http://gpu:8000/v1"}}')
    assert "vllm" in Settings(_env_file=None).upstreams
    for wrong in (
        {"a b": {"dialect": "openai", "base_url": "http://x"}},
        {"a": {"dialect": "cohere", "base_url": "http://x"}},
        {"a": {"dialect": "openai", "base_url": "ftp://x"}},
        {"a": {"dialect": "openai", "base_url": "http://x", "keys": "1"}},
    ):
        with pytest.raises(ValidationError):
            Settings(_env_file=None, upstreams=wrong)
    with pytest.raises(ValidationError) as raised:
        Settings(_env_file=None, upstreams={"a": {"dialect": "openai", "api_key": "sk-hidden"}})
    assert explain(raised.value) == "TERSELY_UPSTREAMS.a.base_url: Field required"


@pytest.mark.parametrize("by_path", [False, True])
async def test_summaries_of_a_session_come_from_its_host(store: Database, key: str, by_path: bool):
    with many(scripted(), scripted()) as (main, router):
        given: dict[str, Any] = {"dialect": "openai", "base_url": router.url, "api_key": "sk-router"}
        upstreams = {"router": given if by_path else {**given, "models": ["*/*"]}}
        options = {"summarizer_model": "session", "openai_api_key": "sk-main", "chat_commands": "on"}
        with serve(store, main.url, upstreams=upstreams, strategy="window", **options) as service:
            path = f"{'/u/router' if by_path else ''}/v1/chat/completions"
            history: list[dict[str, Any]] = []
            for n in range(6):
                history.append({"role": "user", "content": f"question {n} of {key} " + "word " * 300})
                body = json.dumps({"model": "meta/llama", "messages": history}).encode()
                answer = await post(service, body, path=path, X_Tersely_Session=key)
                assert answer.status == 200
                history.append(answer.json["choices"][0]["message"])
            assert len(models_of(router)) == 6
            history.append({"role": "user", "content": "/context rebuild"})
            body = json.dumps({"model": "meta/llama", "messages": history}).encode()
            answer = await post(service, body, path=path, X_Tersely_Session=key)
            assert answer.status == 200
            done = await post(service, b"{}", path=f"/api/sessions/{key}/state/rebuild")
            assert done.status == 200
            calls = await post(service, b"", path=f"/api/sessions/{key}/calls", method="GET")
            assert [each["host"] for each in calls.json["items"]] == ["router"] * 6
        assert len(models_of(router)) == 8, answer.body
        assert "/context rebuild" not in str(router.state.received[-1].request)
        assert {each.headers["Authorization"] for each in router.state.received} == {"Bearer sk-router"}
        assert models_of(main) == []


async def converse(service: Service, key: str, prefix: str, model: str, **headers: str) -> None:
    """Ask six long questions of one session at a host that speaks Anthropic's format."""
    history: list[dict[str, Any]] = []
    for n in range(6):
        history.append({"role": "user", "content": f"question {n} of {key} " + "word " * 300})
        body = json.dumps({"model": model, "max_tokens": 99, "messages": history}).encode()
        answer = await post(service, body, path=f"{prefix}/v1/messages", X_Tersely_Session=key, **headers)
        assert answer.status == 200, answer.body
        history.append({"role": "assistant", "content": answer.json["content"]})


@pytest.mark.parametrize("prefix", ["", "/u/claude"])
@pytest.mark.parametrize("strategy", ["compact", "trim"])
async def test_commands_over_rest_ask_the_host_of_the_last_call(store: Database, key: str, prefix: str, strategy: str):
    with many(scripted(), scripted(), scripted()) as (main, default, named):
        claude = {"dialect": "anthropic", "base_url": named.url.removesuffix("/v1"), "api_key": "sk-named"}
        options: dict[str, Any] = {
            "summarizer_model": "session",
            "openai_api_key": "sk-main",
            "anthropic_api_key": "sk-default",
            "anthropic_base_url": default.url.removesuffix("/v1"),
            "upstreams": {"claude": claude},
        }
        with serve(store, main.url, strategy=strategy, **options) as service:
            await converse(service, key, prefix, "claude-x")
            for command in ("compact", "clear", "undo"):
                done = await post(service, b"{}", path=f"/api/sessions/{key}/{command}")
                assert done.status == 200, (command, done.body)
        host, other = (named, default) if prefix else (default, named)
        assert len(models_of(host)) > 6, "summaries were asked for"
        assert set(models_of(host)) == {"claude-x"}
        assert {each.headers["X-Api-Key"] for each in host.state.received} == {"sk-named" if prefix else "sk-default"}
        assert (models_of(main), models_of(other)) == ([], []), "no other host has read anything"


async def test_session_that_moved_is_summarised_where_it_is(store: Database, key: str):
    with many(scripted(), scripted()) as (main, local):
        upstreams = {"local": {"dialect": "openai", "base_url": local.url, "api_key": "sk-local"}}
        options: dict[str, Any] = {"summarizer_model": "session", "openai_api_key": "sk-main"}
        with serve(store, main.url, strategy="compact", upstreams=upstreams, **options) as service:
            history: list[dict[str, Any]] = []
            for prefix in ("", "", "/u/local", "/u/local", ""):
                history.append({"role": "user", "content": f"{len(history)} {key} " + "word " * 300})
                body = json.dumps({"model": "m", "messages": history}).encode()
                answer = await post(service, body, path=f"{prefix}/v1/chat/completions", X_Tersely_Session=key)
                history.append(answer.json["choices"][0]["message"])
                before = len(models_of(main)), len(models_of(local))
                if len(history) > 2:
                    assert (await post(service, b"{}", path=f"/api/sessions/{key}/compact")).status == 200
                    after = len(models_of(main)), len(models_of(local))
                    asked_more = [then - now for now, then in zip(before, after, strict=True)]
                    assert asked_more[bool(prefix)] >= 1
                    assert asked_more[not prefix] == 0
            calls = await post(service, b"", path=f"/api/sessions/{key}/calls", method="GET")
            assert [each["host"] for each in calls.json["items"]] == ["", "", "local", "local", ""]
