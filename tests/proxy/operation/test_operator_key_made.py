"""Objects that a tenant made in the operator's provider account and may name again: containers, files, conversation
items.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tersely.store.db.connection import Database as Store
from tests.conftest import Database
from tests.proxy.operation.test_operator_key import KEYS, RESPONSES, ask, response
from tests.support.services import Service, serve
from tests.support.tenants import Tenant, tenant
from tests.support.upstreams import RawRequest, RawUpstream, http_head, raw_upstream

BYPASS = [{}, {"X-Tersely-Bypass": "true"}]
MESSAGES = "/v1/messages"


class Host:
    """A provider that answers requests for a path with prepared bodies, and counts them."""

    def __init__(self, raw: RawUpstream) -> None:
        self.calls = 0
        self.bodies: dict[str, bytes] = {}
        self.kind = "application/json"
        self.url = raw.url
        raw.handler = self._answer

    def give(self, path: str, reply: dict[str, Any]) -> None:
        self.kind = "application/json"
        self.bodies[path] = json.dumps(reply).encode()

    def stream(self, path: str, events: list[dict[str, Any]]) -> None:
        self.kind = "text/event-stream"
        self.bodies[path] = b"".join(
            f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events
        )

    async def _answer(self, request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        self.calls += 1
        body = self.bodies[request.target.partition("?")[0]]
        writer.write(http_head(self.kind) + body)
        await writer.drain()


@pytest.fixture(scope="module")
def upstream() -> Iterator[RawUpstream]:
    with raw_upstream() as running:
        yield running


@pytest.fixture
def host(upstream: RawUpstream) -> Host:
    return Host(upstream)


@pytest.fixture(scope="module")
def shared(store: Database, upstream: RawUpstream) -> Iterator[Service]:
    with serve(store, upstream.url, auth="keys", **KEYS) as running:
        yield running


@pytest.fixture(scope="module")
def replica(store: Database, upstream: RawUpstream) -> Iterator[Service]:
    with serve(store, upstream.url, auth="keys", **KEYS) as running:
        yield running


async def assert_passes_for_its_tenant_alone(
    services: list[Service], host: Host, ours: Tenant, theirs: Tenant, path: str, body: dict[str, Any]
) -> None:
    for service in services:
        calls = host.calls
        refused = await ask(service, theirs, path, body)
        assert (refused.status, host.calls) == (404, calls), refused.body
        passed = await ask(service, ours, path, body)
        assert (passed.status, host.calls) == (200, calls + 1), passed.body


def message(key: str, content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": f"msg_{key}", "type": "message", "role": "assistant", "model": "m", "content": content,
        "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}, **more,
    }  # fmt: skip


def code_blocks(key: str) -> list[dict[str, Any]]:
    output = {"type": "bash_code_execution_output", "file_id": f"file_{key}"}
    result = {
        "type": "bash_code_execution_result", "stdout": "", "stderr": "", "return_code": 0, "content": [output],
    }  # fmt: skip
    use = {
        "type": "server_tool_use",
        "id": f"srvtoolu_{key}",
        "name": "bash_code_execution",
        "input": {"command": "ls"},
    }
    done = {"type": "bash_code_execution_tool_result", "tool_use_id": use["id"], "content": result}
    return [use, done, {"type": "text", "text": "Drawn."}]


def as_events(reply: dict[str, Any]) -> list[dict[str, Any]]:
    start = {**reply, "content": [], "stop_reason": None, "container": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(reply["content"]):
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "end_turn", "stop_sequence": None, "container": reply["container"]}
    return [*events, {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 1}}, {"type": "message_stop"}]


@pytest.mark.parametrize("bypass", BYPASS, ids=["built", "bypass"])
@pytest.mark.parametrize("streams", [False, True])
async def test_a_container_of_anthropic_belongs_to_the_tenant_whose_reply_named_it(
    shared: Service, replica: Service, host: Host, ours: Tenant, theirs: Tenant, key: str, streams: bool,
    bypass: dict[str, str],
) -> None:  # fmt: skip
    container = {"id": f"container_{key}", "expires_at": "2030-01-01T00:00:00Z"}
    reply = message(key, code_blocks(key), container=container)
    if streams:
        host.stream(MESSAGES, as_events(reply))
    else:
        host.give(MESSAGES, reply)
    messages = [{"role": "user", "content": f"draw {key}"}]
    first = {"model": "m", "max_tokens": 9, "messages": messages, "stream": streams}
    assert (await ask(shared, ours, MESSAGES, first, **bypass)).status == 200

    host.give(MESSAGES, message(f"{key}2", [{"type": "text", "text": "More."}]))
    more = [*messages, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "more"}]
    plain = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": f"more {key}"}]}
    for body in (
        {**plain, "container": container["id"]},
        {**plain, "container": {"id": container["id"], "skills": []}},
        {**plain, "messages": more},
    ):
        await assert_passes_for_its_tenant_alone([shared, replica], host, ours, theirs, MESSAGES, body)


def output_of(key: str, file: str) -> list[dict[str, Any]]:
    notes = [
        {"type": "file_citation", "file_id": file, "filename": "a.md", "index": 3},
        {"type": "file_path", "file_id": f"{file}-path", "index": 3},
    ]
    search = {
        "type": "file_search_call", "id": f"fs_{key}", "status": "completed", "queries": ["a"],
        "results": [{"file_id": file, "filename": "a.md", "score": 1, "text": "words", "attributes": {"file_id": "x"}}],
    }  # fmt: skip
    text = {"type": "output_text", "text": "It says so.", "annotations": notes}
    message = {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": "completed", "content": [text]}
    return [search, message]


@pytest.mark.parametrize("bypass", BYPASS, ids=["built", "bypass"])
async def test_a_cited_file_may_be_repeated_but_not_opened(
    shared: Service, replica: Service, host: Host, ours: Tenant, theirs: Tenant, key: str, bypass: dict[str, str]
) -> None:
    file = f"file-{key}"
    output = output_of(key, file)
    reply = {"id": f"resp_{key}", "object": "response", "status": "completed", "model": "m", "output": output}
    host.give(RESPONSES, reply)
    assert (await ask(shared, ours, RESPONSES, response(key), **bypass)).status == 200

    again = response(key)
    again["input"] = [*again["input"], *output, {"role": "user", "content": "more"}]
    host.give(RESPONSES, {**reply, "id": f"resp_{key}_2", "output": []})
    await assert_passes_for_its_tenant_alone([shared, replica], host, ours, theirs, RESPONSES, again)

    opened = response("read it")
    opened["input"] = [{"role": "user", "content": [{"type": "input_file", "file_id": file}]}]
    calls = host.calls
    for who in (ours, theirs):
        assert (await ask(shared, who, RESPONSES, opened)).status == 404
    other = json.loads(json.dumps(again).replace(file, f"{file}-other"))
    assert (await ask(shared, ours, RESPONSES, other)).status == 404
    assert host.calls == calls


async def open_conversation(service: Service, host: Host, who: Tenant, key: str) -> str:
    host.give("/v1/conversations", {"id": f"conv_{key}", "object": "conversation"})
    opened = await ask(service, who, "/v1/conversations", {})
    assert opened.status == 200
    return f"conv_{key}"


def item(name: str, role: str = "user", text: str = "hello") -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    content = [{"type": kind, "text": text}]
    return {"id": name, "type": "message", "role": role, "status": "completed", "content": content}


@pytest.mark.parametrize("how", ["created", "listed", "fetched"])
async def test_items_of_a_conversation_belong_to_its_tenant(
    shared: Service, replica: Service, host: Host, ours: Tenant, theirs: Tenant, key: str, how: str
) -> None:
    conversation = await open_conversation(shared, host, ours, key)
    items = [item(f"msg_{key}_user"), item(f"msg_{key}_assistant", "assistant")]
    listed = {"object": "list", "data": items, "first_id": items[0]["id"], "has_more": False}
    path = f"/v1/conversations/{conversation}/items"
    if how == "created":
        host.give(path, listed)
        brought = [{name: value for name, value in each.items() if name != "id"} for each in items]
        assert (await ask(shared, ours, path, {"items": brought})).status == 200
    elif how == "listed":
        host.give(path, listed)
        assert (await ask(shared, ours, f"{path}?limit=20", method="GET")).status == 200
    else:
        for each in items:
            host.give(f"{path}/{each['id']}", each)
            assert (await ask(shared, ours, f"{path}/{each['id']}", method="GET")).status == 200

    host.give(RESPONSES, {"id": f"resp_{key}", "object": "response", "status": "completed", "output": []})
    for each in items:
        body = {"model": "m", "input": [{"type": "item_reference", "id": each["id"]}]}
        await assert_passes_for_its_tenant_alone([shared, replica], host, ours, theirs, RESPONSES, body)
    body = {"model": "m", "input": [items[1], {"role": "user", "content": "more"}]}
    await assert_passes_for_its_tenant_alone([shared, replica], host, ours, theirs, RESPONSES, body)


async def test_item_id_in_a_conversation_does_not_claim_the_item(
    shared: Service, host: Host, ours: Tenant, theirs: Tenant, key: str
) -> None:
    conversation = await open_conversation(shared, host, theirs, key)
    path = f"/v1/conversations/{conversation}/items"
    stolen = item(f"msg_{key}_of_ours")
    result = {"type": "function_call_output", "id": f"fco_{key}", "call_id": "c", "output": "1"}
    host.give(path, {"object": "list", "data": [stolen, result]})
    host.give(RESPONSES, {"id": f"resp_{key}", "object": "response", "status": "completed", "output": []})
    calls = host.calls
    for each in (stolen, result):
        assert (await ask(shared, theirs, path, {"items": [each]})).status == 404
        brought = {"model": "m", "input": [each], "conversation": conversation}
        assert (await ask(shared, theirs, RESPONSES, brought)).status == 404
        assert (await ask(shared, theirs, "/v1/conversations", {"items": [each]})).status == 404
    assert host.calls == calls


async def test_a_list_that_the_operator_opens_claims_nothing(
    store: Database, upstream: RawUpstream, host: Host, keyring: Store, key: str
) -> None:
    who = await tenant(keyring)
    host.give("/v1/files", {"object": "list", "data": [{"id": f"file-{key}", "object": "file"}]})
    with serve(
        store, upstream.url, auth="keys", passthrough="GET|POST /v1/files, GET /v1/files/{id}", **KEYS
    ) as service:
        assert (await ask(service, who, "/v1/files", method="GET")).status == 200
        assert (await ask(service, who, f"/v1/files/file-{key}", method="GET")).status == 404
