"""The context strip: each call's tokens, divided into instructions, tools, head and tail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tersely.service.common.tokens import count_text, count_tools_of, encoding_for
from tersely.store.history.sent_contexts import decode, encode
from tests.conftest import Database
from tests.support.rows import query
from tests.support.services import FROM_THE_START, Service, serve
from tests.support.upstreams import Model, scripted

NAME = "read_file"
ABOUT = "Reads a file of the repository, with line numbers. " * 20
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "Where the file is."}}}
SYSTEM = "You are a careful engineer who reads before writing. " * 5


@pytest.fixture(scope="module")
def answering() -> Iterator[Model]:
    with scripted() as model:
        yield model


@pytest.fixture(scope="module")
def fronting(store: Database, answering: Model) -> Iterator[Service]:
    with serve(store, answering.url) as running:
        yield running


async def call_twice(service: Service, session: str, path: str, body: dict[str, Any], member: str) -> None:
    """Call a model twice; the second call repeats the first one's history."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        for _ in range(2):
            answer = await http.post(path, json=body, headers={"x-tersely-session": session})
            assert answer.status_code == 200, answer.text
            body[member] = [*body[member], body[member][-1]]


async def layers_of(service: Service, session: str) -> list[dict[str, int]]:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        page = (await http.get(f"/api/sessions/{session}/calls")).json()["items"]
    for call in page:
        assert sum(layer["tokens"] for layer in call["layers"]) == call["tokens_after"]
    return [{layer["name"]: layer["tokens"] for layer in call["layers"]} for call in page]


async def strip_of(service: Service, session: str) -> str:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        return (await http.get("/console/session", params={"id": session})).text


def heights(page: str, group: str) -> list[float]:
    return [float(height) for height in re.findall(rf'<rect class="p-{group}"[^>]* height="([\d.]+)"', page)]


CHAT_TOOL = {"type": "function", "function": {"name": NAME, "description": ABOUT, "parameters": PARAMETERS}}
DIALECTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Read it."}],
            "tools": [CHAT_TOOL],
        },
        "messages",
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "system": SYSTEM,
            "messages": [{"role": "user", "content": "Read it."}],
            "tools": [{"name": NAME, "description": ABOUT, "input_schema": PARAMETERS}],
        },
        "messages",
    ),
    "gemini": (
        "/v1beta/models/gpt-4o:generateContent",
        {
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "contents": [{"role": "user", "parts": [{"text": "Read it."}]}],
            "tools": [
                {"functionDeclarations": [{"name": NAME, "description": ABOUT, "parametersJsonSchema": PARAMETERS}]}
            ],
        },
        "contents",
    ),
    "responses": (
        "/v1/responses",
        {
            "instructions": SYSTEM,
            "input": [{"role": "user", "content": "Read it."}],
            "tools": [{"type": "function", "name": NAME, "description": ABOUT, "parameters": PARAMETERS}],
        },
        "input",
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_strip_divides_instructions_and_tools(fronting: Service, dialect: str) -> None:
    path, body, member = DIALECTS[dialect]
    await call_twice(fronting, f"divided-{dialect}", path, {"model": "gpt-4o", **body}, member)
    encoding = encoding_for("gpt-4o")
    tools = count_tools_of(msgspec.json.encode(body["tools"]), encoding)
    for layers in await layers_of(fronting, f"divided-{dialect}"):
        assert layers["tools"] == pytest.approx(tools, rel=0.05)
        assert layers["instructions"] == pytest.approx(count_text(SYSTEM, encoding), rel=0.3)
    page = await strip_of(fronting, f"divided-{dialect}")
    shown = zip(heights(page, "tools"), heights(page, "instructions"), strict=True)
    assert all(tool > instruction > 0 for tool, instruction in shown)
    assert len(heights(page, "tools")) == 2
    assert f"tools {layers['tools']:,}" in page


async def test_own_tools_and_instructions_are_counted_apart(store: Database, answering: Model) -> None:
    with serve(store, answering.url, epoch=FROM_THE_START, tools="retrieve_memos") as service:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        await call_twice(service, "own-tools", "/v1/chat/completions", {"model": "gpt-4o", **body}, "messages")
        for layers in await layers_of(service, "own-tools"):
            assert layers["tools"] > 20
            assert layers["instructions"] > 20


async def test_calls_of_earlier_versions_are_divided_where_their_tools_are_stored(
    fronting: Service, store: Database
) -> None:
    path, body, member = DIALECTS["anthropic"]
    await call_twice(fronting, "earlier", path, {"model": "gpt-4o", **body}, member)
    new = await layers_of(fronting, "earlier")
    for row in await query(store, "SELECT number, sent FROM calls WHERE session_id = 'earlier'"):
        sent = decode(row["sent"])
        assert sent is not None
        undivided = dict(sent.layers)
        undivided["instructions"] += undivided.pop("tools")
        changed = msgspec.structs.replace(sent, layers=tuple(undivided.items()))
        if row["number"] == 2:
            changed = msgspec.structs.replace(changed, tools=b"")
        await query(
            store, "UPDATE calls SET sent = $1 WHERE session_id = 'earlier' AND number = $2",
            encode(changed), row["number"],
        )  # fmt: skip
    first, second = await layers_of(fronting, "earlier")
    assert first == new[0]
    assert "tools" not in second
    assert second["instructions"] == new[1]["instructions"] + new[1]["tools"]
    page = await strip_of(fronting, "earlier")
    assert heights(page, "tools")[0] > 0
    assert heights(page, "tools")[1] == 0
    assert "1 of these calls was stored by an earlier version" in page
