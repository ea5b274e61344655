"""One provider key of the operator's for many tenants: what each of them can reach of the operator's account."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tersely.fakellm.scripted import ScriptedReply
from tersely.settings import Settings
from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.support.http import STORED, Answered, post, request_bytes, wire
from tests.support.loops import eventually
from tests.support.relay import Relay, relay
from tests.support.rows import query
from tests.support.services import Service, serve
from tests.support.tenants import Tenant, tenant
from tests.support.upstreams import Model

OPERATOR = "sk-operator-0123456789"
KEYS = {"openai_api_key": OPERATOR, "anthropic_api_key": OPERATOR, "gemini_api_key": OPERATOR}
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def shared(store: Database, model: Model) -> Iterator[Service]:
    """A service with keys of the operator's, for tenants with keys of their own."""
    with serve(store, model.url, auth="keys", **KEYS) as running:
        yield running


async def ask(
    service: Service, who: Tenant, path: str, body: object = None, *, method: str = "POST", **headers: str
) -> Answered:
    data = b"" if body is None else json.dumps(body).encode()
    return await post(service, data, path=path, method=method, X_Tersely_Key=who.key, **headers)


def response(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "input": [{"role": "user", "content": text}], **more}


def message_of(answer: Answered) -> dict[str, Any]:
    return next(item for item in answer.json["output"] if item["type"] == "message")


# Routes

FORBIDDEN = [
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-abc/content"),
    ("POST", "/v1/files"),
    ("DELETE", "/v1/files/file-abc"),
    ("DELETE", "/v1/models/ft:gpt-4o:acme::1"),
    ("POST", "/v1/fine_tuning/jobs"),
    ("GET", "/v1/organization/admin_api_keys"),
    ("POST", "/v1/organization/projects"),
    ("GET", "/v1/chat/completions"),
    ("GET", "/v1/chat/completions/chatcmpl-1"),
    ("GET", "/v1/responses"),
    ("PUT", "/v1/responses/resp_1"),
    ("POST", "/v1/batches"),
    ("POST", "/v1/moderations"),
    ("GET", "/v1/vector_stores"),
    ("GET", "/v1/containers"),
    ("POST", "/v1/threads"),
    ("GET", "/v1/assistants"),
    ("POST", "/v1/uploads"),
    ("GET", "/v1/realtime"),
    ("POST", "/v1/realtime/client_secrets"),
    ("POST", "/v1/audio/voices"),
    ("GET", "/v1/evals"),
    ("POST", "/v1/messages/batches"),
    ("GET", "/v1/messages/batches/msgbatch_1/results"),
    ("POST", "/v1internals"),
    ("GET", "/v1beta/files"),
    ("GET", "/v1beta/files/abc"),
    ("GET", "/download/v1beta/files/abc:download"),
    ("POST", "/upload/v1beta/files"),
    ("GET", "/v1beta/cachedContents"),
    ("POST", "/v1beta/cachedContents"),
    ("GET", "/v1beta/tunedModels"),
    ("DELETE", "/v1beta/tunedModels/abc"),
    ("POST", "/v1beta/models/gemini-x:batchGenerateContent"),
    ("GET", "/v1beta/corpora"),
    ("POST", "/v1beta/interactions"),
    # The same behind other spellings.
    ("GET", "/v1/%66iles"),
    ("GET", "/v1/models/..%2ffiles"),
    ("GET", "/v1/models/%2e%2e/files"),
    ("GET", "/v1/models/%252e%252e/files"),
    ("GET", "/v1/models//files"),
    ("GET", "/v1/models/..;/files"),
    ("GET", "/v1/models/..%5cfiles"),
    ("GET", "/v1/Files"),
    ("GET", "/v1/files/"),
    ("POST", "/v1/chat/completions/"),
    ("POST", "/v1/chat/completions/../files"),
    ("POST", "/v1/chat/completions%2f..%2ffiles"),
    ("GET", "/v1/files?key=AIza-of-the-caller"),
    ("POST", "/v1beta/models/gemini-x:countTokens?$httpMethod=DELETE"),
    ("POST", "/v1beta/models/gemini-x:countTokens?%24httpHeaders=a"),
]


@pytest.mark.parametrize(("method", "path"), FORBIDDEN)
async def test_routes_outside_the_allow_list_are_403(
    shared: Service, model: Model, ours: Tenant, method: str, path: str
) -> None:
    calls = model.state.calls
    async with wire(shared) as line:
        await line.send(
            f"{method} {path} HTTP/1.1\r\nhost: t\r\nx-tersely-key: {ours.key}\r\nconnection: close\r\n"
            "content-length: 0\r\n\r\n".encode()
        )
        head, _, body = (await line.to_end()).partition(b"\r\n\r\n")

    if path == "/v1internals":  # no operator's key for Code Assist: the caller's own account
        assert b" 404 " in head.splitlines()[0]
        return
    assert head.split(b" ", 2)[1] == b"403"
    assert json.loads(body)["error"]
    assert model.state.calls == calls


@pytest.mark.parametrize("path", ["/v1/files", "/v1/organization/users"])
async def test_the_refusal_has_the_shape_of_the_dialect(shared: Service, ours: Tenant, path: str) -> None:
    openai = await ask(shared, ours, path, method="GET")
    anthropic = await ask(shared, ours, path, method="GET", anthropic_version="2023-06-01")
    gemini = await ask(shared, ours, path, method="GET", x_goog_api_key="AIza")

    assert openai.json["error"]["code"] == "forbidden"
    assert (anthropic.json["type"], anthropic.json["error"]["type"]) == ("error", "permission_error")
    assert gemini.json["error"]["status"] == "PERMISSION_DENIED"
    assert {each.status for each in (openai, anthropic, gemini)} == {403}
    assert "TERSELY_PASSTHROUGH" in openai.json["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ("POST", RESPONSES, response("hi")),
        ("POST", "/v1/messages", {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
        ("POST", "/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
        ("POST", "/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
        ("GET", "/v1/models", None),
        ("GET", "/v1beta/models", None),
    ],
)
async def test_model_calls_and_models_pass_with_the_operators_key(
    shared: Service, model: Model, ours: Tenant, method: str, path: str, body: object
) -> None:
    answer = await ask(shared, ours, path, body, method=method, Authorization="Bearer sk-of-the-caller")

    assert answer.status == 200, answer.body
    assert OPERATOR in str(dict(model.last.headers))
    assert "sk-of-the-caller" not in str(dict(model.last.headers))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/responses/input_tokens"),
        ("POST", "/v1beta/models/m:countTokens"),
        ("POST", "/v1beta/models/m:embedContent"),
        ("GET", "/v1/models/meta-llama/Llama-3"),
        ("GET", "/v1beta/models/gemini-x"),
    ],
)
async def test_allowed_routes_reach_the_host(
    shared: Service, model: Model, ours: Tenant, method: str, path: str
) -> None:
    calls = model.state.calls
    answer = await ask(shared, ours, path, {} if method == "POST" else None, method=method)
    assert answer.status == 404  # the scripted host has no such route; Tersely let it pass
    assert model.state.calls == calls + 1


async def test_headers_that_choose_another_project_or_method_stay_here(
    shared: Service, model: Model, ours: Tenant
) -> None:
    await ask(
        shared,
        ours,
        "/v1/models",
        method="GET",
        OpenAI_Organization="org-other",
        OpenAI_Project="proj-other",
        X_HTTP_Method_Override="DELETE",
        X_Goog_User_Project="other",
    )
    sent = {name.lower() for name in model.last.headers}
    assert not sent & {"openai-organization", "openai-project", "x-http-method-override", "x-goog-user-project"}


async def test_a_callers_own_provider_key_opens_everything(store: Database, model: Model, keyring: Store) -> None:
    who = await tenant(keyring)
    with serve(store, model.url, auth="keys", openai_api_key=OPERATOR) as service:
        openai = await ask(service, who, "/v1/files", method="GET")
        own = await ask(service, who, "/v1/files", method="GET", anthropic_version="2023-06-01", x_api_key="sk-ant-own")

    assert openai.status == 403
    assert own.status == 404  # from the scripted host
    assert model.last.headers["x-api-key"] == "sk-ant-own"


async def test_without_keys_the_user_is_the_operator(store: Database, model: Model) -> None:
    with serve(store, model.url, **KEYS) as service:
        assert (await post(service, b"", path="/v1/files", method="GET")).status == 404
    assert model.last.path == "/v1/files"


async def test_websockets_are_refused(shared: Service, model: Model, ours: Tenant) -> None:
    calls = model.state.calls
    async with wire(shared) as line:
        await line.send(
            f"GET /v1/realtime HTTP/1.1\r\nhost: t\r\nx-tersely-key: {ours.key}\r\nconnection: upgrade\r\n"
            "upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n".encode()
        )
        answer = await line.to_end()
    assert answer.split(b" ", 2)[1] in (b"403", b"426")
    assert model.state.calls == calls


# Ids of replies


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bypass", [{}, {"X-Tersely-Bypass": "true"}])
async def test_a_response_belongs_to_the_tenant_that_made_it(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant, key: str, stream: bool, bypass: dict[str, str]
) -> None:
    first = await ask(shared, ours, RESPONSES, response("secret", user=key, stream=stream), **bypass)
    assert first.status == 200
    made = list(model.state.kept.replies)[-1]
    assert made.encode() in first.body
    calls = model.state.calls

    for method, path in (
        ("GET", f"{RESPONSES}/{made}"),
        ("DELETE", f"{RESPONSES}/{made}"),
        ("POST", f"{RESPONSES}/{made}/cancel"),
        ("GET", f"{RESPONSES}/{made}/input_items"),
    ):
        other = await ask(shared, theirs, path, method=method)
        assert (other.status, other.json["error"]["code"]) == (404, "not_found"), path
    stolen = await ask(shared, theirs, RESPONSES, response("what was said?", previous_response_id=made))
    assert (stolen.status, stolen.json["error"]["param"]) == (404, "previous_response_id")
    around = await ask(shared, theirs, RESPONSES, response("what?", previous_response_id=made), X_Tersely_Bypass="true")
    assert around.status == 404
    assert model.state.calls == calls

    assert (await ask(shared, ours, f"{RESPONSES}/{made}", method="GET")).status == 200
    assert (await ask(shared, ours, RESPONSES, response("more", previous_response_id=made))).status == 200


async def test_unknown_ids_and_foreign_ids_get_the_same_error(shared: Service, ours: Tenant, theirs: Tenant) -> None:
    made = (await ask(shared, ours, RESPONSES, response("secret"))).json["id"]
    unknown = made[:-4] + "0000"
    answers = [
        await ask(shared, theirs, RESPONSES, response("?", previous_response_id=each)) for each in (made, unknown)
    ]
    refusals = [
        each.json["error"]["message"].replace(name, "") for each, name in zip(answers, (made, unknown), strict=True)
    ]
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("store_it", [True, False])
async def test_items_belong_to_the_tenant_that_was_given_them(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant, store_it: bool
) -> None:
    first = await ask(shared, ours, RESPONSES, response("secret", store=store_it))
    item = message_of(first)
    calls = model.state.calls

    for stolen in (
        {"type": "item_reference", "id": item["id"]},
        {"id": item["id"]},
        item,
        {"type": "reasoning", "id": item["id"], "summary": []},
    ):
        refused = await ask(shared, theirs, RESPONSES, {"model": "m", "input": [stolen]})
        assert (refused.status, refused.json["error"]["param"]) == (404, "input"), stolen
    assert model.state.calls == calls

    again = [{"role": "user", "content": "secret"}, item, {"role": "user", "content": "more"}]
    assert (await ask(shared, ours, RESPONSES, {"model": "m", "input": again, "store": store_it})).status == 200


def referring(*ids: str) -> dict[str, Any]:
    """A request that names items, and asks something."""
    references = [{"type": "item_reference", "id": each} for each in ids]
    return {"model": "m", "input": [*references, {"role": "user", "content": "more"}]}


@pytest.mark.parametrize("bypass", [{}, {"X-Tersely-Bypass": "true"}])
async def test_items_that_the_host_lists_for_a_tenants_response_are_the_tenants(
    shared: Service, store: Database, model: Model, ours: Tenant, theirs: Tenant, bypass: dict[str, str]
) -> None:
    first = await ask(shared, ours, RESPONSES, response("secret"), **bypass)
    path = f"{RESPONSES}/{first.json['id']}/input_items"
    assert (await ask(shared, theirs, path, method="GET")).status == 404
    listed = [each["id"] for each in (await ask(shared, ours, path, method="GET")).json["data"]]
    assert listed

    assert (await ask(shared, ours, RESPONSES, referring(*listed))).status == 200
    assert model.last.body.count(listed[0].encode()) == 1
    calls = model.state.calls
    with serve(store, model.url, auth="keys", **KEYS) as replica:
        for service in (shared, replica):
            refused = await ask(service, theirs, RESPONSES, referring(*listed))
            assert (refused.status, refused.json["error"]["param"]) == (404, "input")
        assert model.state.calls == calls
        assert (await ask(replica, ours, RESPONSES, referring(*listed))).status == 200


@pytest.mark.parametrize("kind", ["message", "function_call_output", "nested", "doubled"])
async def test_a_tenant_cannot_claim_an_item_by_bringing_its_id(
    shared: Service, store: Database, model: Model, ours: Tenant, theirs: Tenant, kind: str
) -> None:
    """The host repeats an id that the caller chose in the list of its items."""
    first = await ask(shared, ours, RESPONSES, response("secret"))
    path = f"{RESPONSES}/{first.json['id']}/input_items"
    (foreign,) = [each["id"] for each in (await ask(shared, ours, path, method="GET")).json["data"]]
    item: dict[str, Any] = {"role": "user", "content": "mine", "id": foreign}
    before: list[dict[str, Any]] = []
    if kind == "function_call_output":
        before = [{"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}]
        item = {"type": "function_call_output", "call_id": "c1", "output": "x", "id": foreign}
    body = json.dumps({"model": "gpt-4o-mini", "input": [*before, item]})
    if kind == "doubled":
        body = body.replace(f'"id": "{foreign}"', f'"id": "other", "id": "{foreign}"')
    if kind == "nested":
        body = body.replace(foreign, "".join(f"\\u{ord(letter):04x}" for letter in foreign))
    brought = await post(shared, body.encode(), path=RESPONSES, X_Tersely_Key=theirs.key)
    assert brought.status == 200, brought.body

    with serve(store, model.url, auth="keys", **KEYS) as replica:
        for service in (shared, replica):
            mine = f"{RESPONSES}/{brought.json['id']}/input_items"
            listed = [each["id"] for each in (await ask(service, theirs, mine, method="GET")).json["data"]]
            assert foreign in listed
            calls = model.state.calls
            refused = await ask(service, theirs, RESPONSES, referring(foreign))
            assert (refused.status, refused.json["error"]["param"]) == (404, "input")
            assert model.state.calls == calls
    assert (await ask(shared, ours, RESPONSES, referring(foreign))).status == 200


async def test_a_tenants_own_item_stays_its_own_when_it_is_sent_again(shared: Service, ours: Tenant) -> None:
    first = await ask(shared, ours, RESPONSES, response("secret"))
    path = f"{RESPONSES}/{first.json['id']}/input_items"
    (own,) = (await ask(shared, ours, path, method="GET")).json["data"]
    again = await ask(shared, ours, RESPONSES, {"model": "m", "input": [own, {"role": "user", "content": "more"}]})
    assert again.status == 200
    await ask(shared, ours, f"{RESPONSES}/{again.json['id']}/input_items", method="GET")
    assert (await ask(shared, ours, RESPONSES, referring(own["id"]))).status == 200


async def test_escapes_and_doubled_members_hide_no_id(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant
) -> None:
    made = (await ask(shared, ours, RESPONSES, response("secret"))).json["id"]
    mine = (await ask(shared, theirs, RESPONSES, response("mine"))).json["id"]
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in made)
    calls = model.state.calls
    name = "previous_response_id"
    bodies = [
        f'{{"model":"m","input":"x","previous_response\\u005fid":"{made}"}}',
        f'{{"model":"m","input":"x","{name}":"{escaped}"}}',
        f'{{"model":"m","input":"x","{name}":"{made}","{name}":"{mine}"}}',
        f'{{"model":"m","input":"x","{name}":"{mine}","{name}":"{made}"}}',
        f'{{"model":"m","input":[{{"\\u0069d":"{made}","type":"item_reference"}}]}}',
    ]
    for body in bodies:
        answer = await post(shared, body.encode(), path=RESPONSES, X_Tersely_Key=theirs.key)
        assert answer.status == 404, body
    for encoding in ("utf-16", "utf-32"):
        answer = await post(shared, bodies[1].encode(encoding), path=RESPONSES, X_Tersely_Key=theirs.key)
        assert answer.status in (400, 404), encoding
    assert model.state.calls == calls


async def test_a_compressed_or_unreadable_body_is_refused(shared: Service, model: Model, ours: Tenant) -> None:
    calls = model.state.calls
    for headers, body in (({"Content-Encoding": "gzip"}, b"\x1f\x8b"), ({}, b'{"model":"m",'), ({}, b"[")):
        answer = await post(shared, body, path=RESPONSES, X_Tersely_Key=ours.key, **headers)
        assert answer.status == 400
    assert model.state.calls == calls


async def test_conversations_belong_to_the_tenant_that_opened_them(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant
) -> None:
    opened = await ask(shared, ours, "/v1/conversations", {})
    assert opened.status == 200
    name = opened.json["id"]
    assert (await ask(shared, ours, RESPONSES, response("one", conversation=name))).status == 200
    assert (await ask(shared, ours, RESPONSES, response("two", conversation={"id": name}))).status == 200
    calls = model.state.calls
    for conversation in (name, {"id": name}):
        other = await ask(shared, theirs, RESPONSES, response("what?", conversation=conversation))
        assert (other.status, other.json["error"]["param"]) == (404, "conversation")
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items")):
        body: object = {"items": []} if method == "POST" else None
        other = await ask(shared, theirs, f"/v1/conversations/{name}{path}", body, method=method)
        assert other.status == 404
    assert model.state.calls == calls


async def test_ids_that_another_replica_relayed_are_known(
    shared: Service, store: Database, model: Model, ours: Tenant, theirs: Tenant
) -> None:
    made = (await ask(shared, ours, RESPONSES, response("secret"), X_Tersely_Bypass="true")).json["id"]
    with serve(store, model.url, auth="keys", **KEYS) as replica:
        assert (await ask(replica, ours, f"{RESPONSES}/{made}", method="GET")).status == 200
        assert (await ask(replica, theirs, f"{RESPONSES}/{made}", method="GET")).status == 404


async def test_rest_claims_no_ids(shared: Service, ours: Tenant, theirs: Tenant, key: str) -> None:
    """Messages that a tenant writes by itself make nothing in them the tenant's own."""
    first = await ask(shared, ours, RESPONSES, response("secret"))
    item = message_of(first)
    claimed = await ask(
        shared,
        theirs,
        f"/api/sessions/{key}/messages",
        {"dialect": "openai_responses", "messages": [{"role": "user", "content": "x"}, item]},
    )
    assert claimed.status == 201
    reference = {"model": "m", "input": [{"type": "item_reference", "id": item["id"]}]}
    assert (await ask(shared, theirs, RESPONSES, reference)).status == 404
    assert (await ask(shared, theirs, f"{RESPONSES}/{first.json['id']}", method="GET")).status == 404


# Other things of the account that bodies name

NAMED: list[tuple[str, dict[str, Any], bool]] = [
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]}, True),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]}, True),
    (RESPONSES, {"input": "x", "tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}, True),
    (RESPONSES, {"input": "x", "tools": [{"type": "code_interpreter", "container": "cntr_1"}]}, True),
    (RESPONSES, {"input": "x", "tools": [{"type": "code_interpreter", "container": {"file_ids": ["file-1"]}}]}, True),
    (RESPONSES, {"input": "x", "prompt": {"id": "pmpt_1"}}, True),
    (RESPONSES, {"input": "x", "tools": [{"type": "image_generation", "input_image_mask": {"file_id": "f"}}]}, True),
    (RESPONSES, {"input": [{"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True}]}, True),
    (RESPONSES, {"input": "x", "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, False),
    (RESPONSES, {"input": "x", "metadata": {"file_id": "mine"}}, False),
    (RESPONSES, {"input": "x", "tools": [{"type": "mcp", "server_label": "l", "server_url": "https://x.test"}]}, False),
    (
        RESPONSES,
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"default": {"file_id": "x"}}}]},
        False,
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]},
        True,
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "audio": {"id": "audio_1"}}, {"role": "user", "content": "x"}]},
        True,
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "document", "source": {"type": "file", "file_id": "file_1"}}],
                }
            ],
        },
        True,
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "container": "container_1", "messages": [{"role": "user", "content": "x"}]},
        True,
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "container": {"skills": [{"type": "custom", "skill_id": "skill_1"}]},
            "messages": [{"role": "user", "content": "x"}],
        },
        True,
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"file_id": "x"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
            ],
        },
        False,
    ),
    (
        "/v1beta/models/m:generateContent",
        {"cachedContent": "cachedContents/1", "contents": [{"role": "user", "parts": [{"text": "x"}]}]},
        True,
    ),
    (
        "/v1beta/models/m:generateContent",
        {"cached_content": "cachedContents/1", "contents": [{"role": "user", "parts": [{"text": "x"}]}]},
        True,
    ),
    *(
        (
            "/v1beta/models/m:generateContent",
            {"contents": [{"role": "user", "parts": [{"file_data": {"file_uri": uri}}]}]},
            is_refused,
        )
        for uri, is_refused in (
            ("https://generativelanguage.googleapis.com/v1beta/files/abc", True),
            ("https://generativelanguage.googleapis.com/v1beta/%66iles/abc", True),
            ("files/abc", True),
            ("gs://bucket/object", True),
            ("https://www.youtube.com/watch?v=abc", False),
        )
    ),
    (
        "/v1beta/models/m:generateContent",
        {
            "tools": [{"fileSearch": {"fileSearchStoreNames": ["fileSearchStores/1"]}}],
            "contents": [{"role": "user", "parts": [{"text": "x"}]}],
        },
        True,
    ),
]


@pytest.mark.parametrize(("path", "body", "is_refused"), NAMED)
async def test_files_stores_and_containers_of_the_account(
    shared: Service, model: Model, ours: Tenant, path: str, body: dict[str, Any], is_refused: bool
) -> None:
    calls = model.state.calls
    answer = await ask(shared, ours, path, {"model": "m", **body})
    if is_refused:
        assert answer.status == 404, answer.body
        assert model.state.calls == calls
    else:
        assert model.state.calls == calls + 1


# What the operator adds


async def test_the_operator_adds_routes_and_ids(store: Database, model: Model, keyring: Store) -> None:
    ours, theirs = await tenant(keyring), await tenant(keyring)
    rules = "POST /v1/conversations/{id}/items, GET /v1/vector_stores/*, GET|DELETE /v1/files/{id}, ID vs_common*"
    with serve(store, model.url, auth="keys", passthrough=rules, **KEYS) as service:
        calls = model.state.calls
        assert (await ask(service, ours, "/v1/vector_stores/x", method="GET")).status == 404
        assert model.state.calls == calls + 1
        assert (await ask(service, ours, "/v1/vector_stores/x/files", method="GET")).status == 403
        assert (await ask(service, ours, "/v1/files/file-1", method="GET")).status == 404
        assert (await ask(service, ours, "/v1/files", method="POST")).status == 403
        assert model.state.calls == calls + 1
        tools = [{"type": "file_search", "vector_store_ids": ["vs_common_1"]}]
        assert (await ask(service, theirs, RESPONSES, response("x", tools=tools))).status == 200
        tools = [{"type": "file_search", "vector_store_ids": ["vs_common_1", "vs_2"]}]
        assert (await ask(service, theirs, RESPONSES, response("x", tools=tools))).status == 404


@pytest.mark.parametrize(
    "rules",
    [
        "/v1/files",
        "FETCH /v1/files",
        "GET v1/files",
        "GET /api/sessions",
        "GET /v1/../files",
        "GET /v1/fi%6ces",
        "GET /v1/files?x=1",
        "GET /v1/**/files",
        "GET",
        "GET /v1/files extra",
        "ID",
    ],
)
def test_a_rule_that_is_not_understood_stops_the_start(rules: str) -> None:
    with pytest.raises(ValidationError, match="passthrough"):
        Settings(_env_file=None, passthrough=rules)


async def test_ids_are_not_believed_while_the_database_is_away(store: Database, model: Model, keyring: Store) -> None:
    who = await tenant(keyring)
    cut: Relay
    with relay(store) as cut, serve(store, model.url, dsn=cut.dsn, auth="keys", database_timeout=1, **KEYS) as service:
        assert (await ask(service, who, RESPONSES, response("hello"))).status == 200
        cut.cut()
        calls = model.state.calls
        named = await ask(service, who, RESPONSES, response("x", previous_response_id="resp_unknown"))
        assert (named.status, named.headers["retry-after"]) == (503, "2")
        assert model.state.calls == calls
        cut.restore()

        async def is_back() -> bool:
            return (await ask(service, who, RESPONSES, response("hello"))).context in STORED

        assert await eventually(is_back)


async def test_a_refusal_does_not_wait_for_the_body(shared: Service, ours: Tenant) -> None:
    head = request_bytes(b"", path="/v1/files", **{"content-length": "1000000", "x-tersely-key": ours.key})
    async with wire(shared) as line:
        await line.send(head)
        assert b" 403 " in await line.until(b"\r\n\r\n", limit=2)


async def test_audio_reply_may_be_referenced_by_its_tenant(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant, key: str
) -> None:
    audio = {"id": f"audio_{key}", "data": "UklGRg==", "expires_at": 1, "transcript": "hello"}
    message = {"role": "assistant", "content": None, "audio": audio}
    reply = {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    model.script(key, ScriptedReply(status=200, body=json.dumps(reply).encode()))
    ask_first = {"model": "m", "user": key, "messages": [{"role": "user", "content": "speak"}]}
    assert (await ask(shared, ours, "/v1/chat/completions", ask_first)).status == 200
    spoken = {"role": "assistant", "audio": {"id": audio["id"]}}
    more = {"model": "m", "messages": [*ask_first["messages"], spoken, {"role": "user", "content": "more"}]}

    refused = await ask(shared, theirs, "/v1/chat/completions", more)
    calls = model.state.calls
    await ask(shared, ours, "/v1/chat/completions", more)

    assert refused.status == 404
    assert model.state.calls == calls + 1


@pytest.mark.parametrize("bypass", [{}, {"X-Tersely-Bypass": "true"}])
async def test_a_container_belongs_to_the_tenant_whose_reply_named_it(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant, key: str, bypass: dict[str, str]
) -> None:
    container, file = f"cntr_{key}", f"cfile_{key}"
    note = {"type": "container_file_citation", "container_id": container, "file_id": file, "filename": "a.png"}
    text = {"type": "output_text", "text": "done", "annotations": [note]}
    call = {"type": "code_interpreter_call", "id": f"ci_{key}", "container_id": container, "code": "1", "outputs": []}
    message = {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": "completed", "content": [text]}
    reply = {"id": f"resp_{key}", "object": "response", "status": "completed", "model": "m", "output": [call, message]}
    model.script(key, ScriptedReply(status=200, body=json.dumps(reply).encode()))
    first = response("draw", user=key, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}])
    assert (await ask(shared, ours, RESPONSES, first, **bypass)).status == 200

    again = {**first, "user": "", "input": [*first["input"], call, message, {"role": "user", "content": "more"}]}
    named = response("go on", tools=[{"type": "code_interpreter", "container": container}])
    for body in (again, named):
        assert (await ask(shared, theirs, RESPONSES, body)).status == 404
        calls = model.state.calls
        assert (await ask(shared, ours, RESPONSES, body)).status == 200
        assert model.state.calls == calls + 1


async def test_the_items_of_a_background_response_are_its_tenants(
    shared: Service, model: Model, ours: Tenant, theirs: Tenant
) -> None:
    started = await ask(shared, ours, RESPONSES, response("later", background=True))
    assert (started.status, started.headers.get("x-tersely-session")) == (200, None)
    done = await ask(shared, ours, f"{RESPONSES}/{started.json['id']}", method="GET")
    reference = {"model": "m", "input": [{"type": "item_reference", "id": message_of(done)["id"]}]}
    calls = model.state.calls
    assert (await ask(shared, theirs, RESPONSES, reference)).status == 404
    await ask(shared, ours, RESPONSES, reference)
    assert model.state.calls == calls + 1


async def provider_ids(service: Service, who: Tenant) -> list[tuple[str, str]]:
    """The marks of ids that clients chose, as (session or nothing, id)."""
    rows = await query(
        service,
        "SELECT session_id, id FROM session_provider_ids WHERE tenant_id = $1 "
        "UNION ALL SELECT '', id FROM provider_ids WHERE tenant_id = $1 AND id LIKE 'brought %' ORDER BY 1, 2",
        who.name,
    )
    return [(row["session_id"], row["id"].removeprefix("brought ")) for row in rows]


def bringing(name: str, **more: Any) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "input": [{"role": "user", "content": "mine", "id": name}], **more}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_ids_of_a_clients_choice_go_with_their_session(
    shared: Service, theirs: Tenant, key: str, streams: bool
) -> None:
    for session in ("one", "other"):
        request = bringing(f"msg_{key}", stream=streams)
        assert (await ask(shared, theirs, RESPONSES, request, X_Tersely_Session=f"{key}-{session}")).status == 200
    assert [each for each in await provider_ids(shared, theirs) if key in each[1]] == [
        (f"{key}-one", f"msg_{key}"),
        (f"{key}-other", f"msg_{key}"),
    ]
    assert (await ask(shared, theirs, f"/api/sessions/{key}-one", method="DELETE")).status == 204
    assert [each for each in await provider_ids(shared, theirs) if key in each[1]] == [(f"{key}-other", f"msg_{key}")]


@pytest.mark.parametrize("way", ["same session again", "another session goes on", "listed before"])
async def test_deleting_a_session_lets_nobody_claim_what_its_client_brought(
    shared: Service, store: Database, model: Model, ours: Tenant, theirs: Tenant, key: str, way: str
) -> None:
    """The host goes on listing an item under an id of another tenant's, which the client of a deleted session chose."""
    secret = await ask(shared, ours, RESPONSES, response("secret"))
    path = f"{RESPONSES}/{secret.json['id']}/input_items"
    (foreign,) = [each["id"] for each in (await ask(shared, ours, path, method="GET")).json["data"]]
    first = await ask(shared, theirs, RESPONSES, bringing(foreign), X_Tersely_Session=key)
    replies = [first.json["id"]]
    with serve(store, model.url, auth="keys", **KEYS) as replica:
        if way == "another session goes on":
            onward = {"model": "gpt-4o-mini", "input": "go on", "previous_response_id": replies[0]}
            second = await ask(replica, theirs, RESPONSES, onward, X_Tersely_Session=f"{key}-2")
            assert second.status == 200, second.body
            replies.append(second.json["id"])
        if way == "listed before":
            for service in (shared, replica):
                listing = f"{RESPONSES}/{replies[0]}/input_items"
                assert (await ask(service, theirs, listing, method="GET")).status == 200
        assert (await ask(shared, theirs, f"/api/sessions/{key}", method="DELETE")).status == 204
        if way == "same session again":
            again = await ask(shared, theirs, RESPONSES, bringing(foreign), X_Tersely_Session=key)
            replies.append(again.json["id"])
        for service in (shared, replica):
            for reply in replies:
                await ask(service, theirs, f"{RESPONSES}/{reply}/input_items", method="GET")
            refused = await ask(service, theirs, RESPONSES, referring(foreign))
            assert (refused.status, refused.json["error"]["param"]) == (404, "input")
    assert (await ask(shared, ours, RESPONSES, referring(foreign))).status == 200
